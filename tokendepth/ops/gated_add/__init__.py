"""The gated residual update in eq. 3 and 4: `h + gate * update`, one gate per token."""

from tokendepth.ops.gated_add.eager import eager as gated_add

__all__ = ["gated_add"]
