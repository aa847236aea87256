"""Training: the loop, one optimiser step, ranks, signals, progress, and sweeps of many runs."""
