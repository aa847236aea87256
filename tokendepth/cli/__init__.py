"""The command line: main reads the arguments, commands/ does the work."""
