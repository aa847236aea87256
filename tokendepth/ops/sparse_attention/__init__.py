"""Causal attention for some of the rows: only active tokens ask, every token can be attended to."""

from tokendepth.ops.sparse_attention.eager import eager as sparse_attention

__all__ = ["sparse_attention"]
