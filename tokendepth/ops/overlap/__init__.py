"""Kernels that begin while the one before them ends: what their launches and their programs share."""
