"""A few rows of tokens times whole matrices, as fast as memory delivers those: parts of kernels, and on a CPU."""
