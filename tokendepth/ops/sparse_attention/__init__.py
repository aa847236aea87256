"""Causal attention for some of the rows: only active tokens are queries, every token is a key."""

from tokendepth.ops.sparse_attention.eager import eager as sparse_attention

__all__ = ["sparse_attention"]
