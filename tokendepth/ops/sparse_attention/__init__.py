"""Causal attention in which only active tokens are queries and every token is a key."""

from tokendepth.ops.sparse_attention.eager import eager as sparse_attention

__all__ = ["sparse_attention"]
