"""Measurements of a model: loss, depth, FLOPs, time."""
