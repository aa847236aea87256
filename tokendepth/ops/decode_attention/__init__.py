"""A kernel for one new token of each slot over keys and values of a cache; see kernel.py. `decode_many` calls it."""
