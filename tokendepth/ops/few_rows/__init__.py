"""Products of a few rows with whole matrices, at memory bandwidth: building blocks for kernels, and a CPU version."""
