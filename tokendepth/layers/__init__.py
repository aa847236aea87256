"""The layers of a block. Each file defines a layer's forward, its weights for the kernels and its cost."""
