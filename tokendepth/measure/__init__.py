"""What a model does and costs: loss, depth, FLOPs, time."""
