"""The run folder and its parts: atomic files, checkpoints, metrics, the lock, rows of results, the machine."""
