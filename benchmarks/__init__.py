"""What writes the committed rows of results/ that are not the paper's. `python -m benchmarks --help`."""
