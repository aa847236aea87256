"""Numerics. Most ops have a simple `reference`, an `eager` version for any device, and often a Triton `kernel`."""
