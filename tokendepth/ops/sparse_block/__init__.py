"""A block for its active tokens: query, attention row, output projection, feed-forward; other tokens are unchanged.

Keys and values are given. The kernel is for inference only: it has no gradient.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from tokendepth.ops.launch import FEW_TOKENS, NARROWEST_HEAD, fits_one_tile, serves, unknown_backend
from tokendepth.ops.rows import Listed

__all__ = [
    "Activation",
    "BlockParts",
    "BlockWeights",
    "finds_own_rows",
    "has_kernel",
    "launch_bound",
    "one_tile",
    "runs_kernel",
    "sparse_block",
]

TILE = 64
"""Widths that are not multiples of this gain nothing from kernels, so they use the library."""
HIDDEN_TILE = 16
"""The same for the number of hidden units."""
SHORT = 256
"""In sequences up to this length a program finds its own rows without a list."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines for the tokens' positions, `[batch or 1, time, width / 2]` each."""


Activation = Literal["gelu", "swiglu", "geglu"]
"""Activation of the feed-forward network: GELU, or gated by SiLU or by GELU's tanh form."""


class BlockWeights(NamedTuple):
    """Weights of a block, except those for keys and values; matrices are `[out, in]`, None if the block has none."""

    heads: int
    """Query heads."""
    query: Tensor
    out: Tensor
    norm: Tensor
    norm_bias: Tensor | None
    """None: an RMSNorm."""
    eps: float
    up: Tensor
    """If gated, the rows of the gate, then those of `up`."""
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    activation: Activation = "gelu"
    query_bias: Tensor | None = None
    query_norm: Tensor | None = None
    """The scale of an RMSNorm of each head's queries."""
    query_eps: float = 0.0
    out_bias: Tensor | None = None
    rotary: bool = False
    """Whether queries are rotated."""

    @property
    def is_classic(self) -> bool:
        """LayerNorm, GELU, and square projections without bias, norm or rotation for queries and output."""
        square = self.query.shape[0] == self.query.shape[1]
        plain = self.query_bias is None and self.query_norm is None and self.out_bias is None and not self.rotary
        return square and plain and self.norm_bias is not None and self.activation == "gelu"


class BlockParts(NamedTuple):
    """A block after its first norm, as functions of rows `[..., d]`; `weights` are for kernels, None if unsupported."""

    query: Callable[[Tensor, Rotation | None], Tensor]
    """From rows and their rotation to queries `[..., head, width]`."""
    out: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    ffn: Callable[[Tensor], Tensor]
    weights: BlockWeights | None


def sparse_block(
    h: Tensor,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    active: Tensor | None,
    parts: BlockParts,
    gate: Tensor | None = None,
    key_valid: Tensor | None = None,
    columns: Tensor | None = None,
    listed: Listed | None = None,
    rotation: Rotation | None = None,
    backend: str = "auto",
) -> Tensor:
    """h, x: `[batch, time, d]`, the state before and after the first norm. k, v: `[batch, kv head, keys, width]`.

    active: `[batch, time]` bool, None for all tokens. listed: the list from `decide`. gate: `[batch, time]`, scales the
    updates of active tokens. key_valid: `[batch, keys]`, False for keys that must not be seen (a token always sees its
    own). columns: `[batch, time]`, each token's index among the keys; None: the tokens are the last keys.
    Returns h with the active rows replaced; without a gradient it may overwrite h. The kernel needs no host
    synchronisation: counts stay on the device, so it can be captured in a CUDA graph.
    """
    if backend == "auto":
        backend = "kernel" if runs_kernel(h, parts.weights) else "eager"
    if backend == "kernel":
        from tokendepth.ops.sparse_block.kernel import kernel as run
    elif backend == "eager":
        from tokendepth.ops.sparse_block.eager import eager as run
    elif backend == "reference":
        from tokendepth.ops.sparse_block.reference import reference as run
    else:
        raise unknown_backend(backend)
    return run(h, x, k, v, active, parts, gate, key_valid, columns, listed, rotation)


def has_kernel(weights: BlockWeights | None) -> bool:
    if weights is None:
        return False
    q_out, d = weights.query.shape
    width = q_out // weights.heads
    fits = d % TILE == q_out % TILE == weights.down.shape[1] % HIDDEN_TILE == 0
    return fits and width >= NARROWEST_HEAD and width % 2 == 0


def runs_kernel(h: Tensor, weights: BlockWeights | None) -> bool:
    """Whether a kernel, without host synchronisation, runs the block on `h`."""
    return has_kernel(weights) and serves(h)


def finds_own_rows(h: Tensor, weights: BlockWeights) -> bool:
    """Whether every program finds its own rows, which with few tokens costs less than a kernel that lists them."""
    short = h.shape[1] <= SHORT and h.shape[0] * h.shape[1] <= FEW_TOKENS
    return short and one_tile(h, weights)


def one_tile(h: Tensor, weights: BlockWeights) -> bool:
    """Whether the kernels that hold a whole row in one tile can be used."""
    return fits_one_tile(h.shape[-1]) and weights.is_classic


def launch_bound(h: Tensor, weights: BlockWeights | None) -> bool:
    """Whether a block of this shape is so small that kernel launches dominate its time."""
    # In this order, so that without kernels torch.compile need not know the sizes.
    return weights is not None and runs_kernel(h, weights) and finds_own_rows(h, weights)
