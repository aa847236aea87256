"""Faults, injected on purpose and counted: what a killed, full, damaged or poisoned run loses. See `registry.py`."""
