"""Numerics. Each op has an obvious `reference`, an `eager` version for any device, and may have a Triton `kernel`."""
