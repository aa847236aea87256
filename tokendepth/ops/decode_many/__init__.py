"""`decode_block` for more than a few slots, where nearly every block has an active token and its weights are read."""
