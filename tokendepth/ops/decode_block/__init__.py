"""A block in a decoding step, one new token per cache slot: active tokens go through it, the others are unchanged.

With few slots, a decoding step takes as long as loading the weights. So if no token is active, the kernel returns
before it loads any, without host synchronisation. With more slots, nearly every block has an active token, and only the
keys and values of inactive ones are not read (`decode_many`). For one sequence on a CPU, the host checks the decision.
"""

import torch
from torch import Tensor

from tokendepth.ops.decode_inputs import CacheLayer, Unwritten
from tokendepth.ops.launch import serves, unknown_backend
from tokendepth.ops.sparse_block import BlockWeights, Rotation, has_kernel

__all__ = ["decode_block", "runs_eager", "runs_kernel"]

MOST_ROWS = 256
"""More tokens than this are computed like a prompt, with products over only the active rows, which pays off by then.
For 64 tokens that took 3.9 ms per step; the kernels here take 2.0 (H200, d 1,024)."""


def runs_kernel(h: Tensor, weights: BlockWeights | None) -> bool:
    """Whether kernels without host synchronisation support `h`, one token per slot, `[slots, 1, d]`."""
    return h.shape[1] == 1 and len(h) <= MOST_ROWS and has_kernel(weights) and serves(h)


def runs_eager(h: Tensor) -> bool:
    """Whether `h` `[slots, 1, d]` is a single token on a CPU, without compilation or gradient."""
    alone = h.shape[:2] == (1, 1) and h.device.type == "cpu"
    return alone and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def decode_block(
    h: Tensor,
    x: Tensor,
    layer: CacheLayer,
    columns: Tensor,
    active: Tensor | None,
    weights: BlockWeights,
    gate: Tensor | None = None,
    rotation: Rotation | None = None,
    unwritten: Unwritten | None = None,
    backend: str = "auto",
) -> Tensor:
    """h, x: `[slots, 1, d]`, the state before and after the first norm. columns: `[slots, 1]`, the tokens' own columns.

    active: `[slots, 1]` bool, None for all. gate: `[slots, 1]`, scales the updates of active tokens. A token always
    sees its own key. unwritten: keys and values that `decode_inputs` has left to compute. Returns h with the active
    rows replaced; may overwrite h.
    """
    if backend == "auto":
        backend = "kernel" if serves(h) else "eager"
    if unwritten is not None:
        assert backend == "kernel", "nobody else leaves anything"
        from tokendepth.ops.decode_many.kernel import kernel as many

        return many(h, x, layer, columns, active, weights, gate, rotation, unwritten)
    if backend == "kernel":
        from tokendepth.ops.decode_block.kernel import kernel as run
    elif backend == "eager":
        from tokendepth.ops.decode_block.eager import eager as run
    elif backend == "reference":
        from tokendepth.ops.decode_block.reference import reference as run
    else:
        raise unknown_backend(backend)
    return run(h, x, layer, columns, active, weights, gate, rotation)
