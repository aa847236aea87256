"""Studies: many runs and measurements, and what they say together. The only layer that knows recipes, benchmarks,
analysis and report at once; nothing but the commands knows it."""
