"""Products of a few slots, each with what comes before and after it: parts of `decode_many`."""
