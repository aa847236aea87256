"""`decode_block` for more than a few slots: nearly every block has an active token, so all weights are read."""
