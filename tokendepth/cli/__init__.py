"""The command line: main.py reads the arguments, commands/ does the work."""
