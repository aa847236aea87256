"""What a block is made of. Each layer says its forward, its weights for the kernels and its cost, in one file."""
