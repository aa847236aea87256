"""The run folder and what it is made of: files that appear whole, the lock, rows of results, the machine."""
