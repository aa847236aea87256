"""The run folder and its parts: atomic files, checkpoints, metrics, lock, results files, machine facts."""
