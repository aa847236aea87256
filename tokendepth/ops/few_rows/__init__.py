"""Parts of the kernels that decode: a few rows of tokens times whole matrices, as fast as memory delivers those."""
