"""What a block computes for every token before any is skipped: norm, key and value, and the router's decision.

All three read the same states, so one pass over them is enough.
"""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from tokendepth.ops.decide import Decision, decide
from tokendepth.ops.launch import compiles_inference, fits_one_tile, serves, unknown_backend

if TYPE_CHECKING:
    from tokendepth.ops.decode_inputs import Unwritten

__all__ = ["BlockInputs", "NormWeights", "RouterWeights", "Threshold", "block_inputs"]


class NormWeights(NamedTuple):
    """Weights of a LayerNorm, or of an RMSNorm, which has no shift."""

    scale: Tensor
    shift: Tensor | None
    eps: float = 1e-5


class RouterWeights(NamedTuple):
    """Arguments of `halting_logits`. `normed`: the router reads the normalised state, before scale and shift."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    normed: bool = False


class Threshold(NamedTuple):
    """Arguments of `decide`."""

    value: Tensor | float
    valid: Tensor | None = None
    inclusive: bool = False


class BlockInputs(NamedTuple):
    x: Tensor
    """The state after the first norm, `[..., d]`."""
    kv: Tensor | None
    """Projected keys and values side by side, `[..., 2 x kv heads x width]`; None: the cache has them."""
    decision: Decision | None
    """None if there is no router."""
    unwritten: "Unwritten | None" = None
    """What `decode_block` has to write to the cache; None: nothing."""


def block_inputs(
    h: Tensor,
    norm: NormWeights,
    w_kv: Tensor,
    b_kv: Tensor | None = None,
    router: RouterWeights | None = None,
    threshold: Threshold | None = None,
    backend: str = "auto",
) -> BlockInputs:
    """h: `[batch, time, d]`. w_kv: `[out, d]`, b_kv: `[out]`. A router needs the threshold of its decision.

    `auto` is the kernel for low precision on a GPU without a gradient, `joined` if torch.compile packs the weights
    (`infer/compile.py`), and `eager` otherwise.
    """
    assert (router is None) == (threshold is None), "a router decides by a threshold"
    if backend == "auto":
        if fits_one_tile(h.shape[-1]) and norm.shift is not None and b_kv is None and serves(h):
            backend = "kernel"
        else:
            packed = compiles_inference() and not h.is_cuda
            backend = "joined" if router is not None and packed else "eager"
    if backend == "kernel":
        from tokendepth.ops.block_inputs.kernel import kernel

        return BlockInputs(*kernel(h, norm, w_kv, b_kv, router, threshold))
    if backend == "joined":
        from tokendepth.ops.block_inputs.joined import joined as run
    elif backend == "eager":
        from tokendepth.ops.block_inputs.eager import eager as run
    elif backend == "reference":
        from tokendepth.ops.block_inputs.reference import reference as run
    else:
        raise unknown_backend(backend, ("auto", "reference", "eager", "joined", "kernel"))
    x, kv, logit = run(h, norm, w_kv, b_kv, router)
    if threshold is None or logit is None:
        return BlockInputs(x, kv, None)
    value, valid, inclusive = threshold
    return BlockInputs(x, kv, decide(logit, value, valid, inclusive=inclusive, states=h))
