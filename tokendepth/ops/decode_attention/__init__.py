"""A kernel for decoding attention, one new token per cache slot; see kernel.py. `decode_many` calls it."""
