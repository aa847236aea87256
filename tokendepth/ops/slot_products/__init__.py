"""Products for a few slots, each fused with what comes before and after it: parts of `decode_many`."""
