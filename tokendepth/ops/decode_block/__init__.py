"""A block for one more token of each slot of a cache, where that token is active; the others pass unchanged.

A decoding step of a few slots is as long as its weights take to arrive from memory, so where nobody is active none are
loaded: a kernel returns first, without asking the host. Of more slots some token is active nearly everywhere, and only
keys and values are left unread (`decode_many`). On a CPU, of one sequence, the host looks at the decision itself.
"""

import torch
from torch import Tensor

from tokendepth.ops.decode_inputs import CacheLayer, Unwritten
from tokendepth.ops.launch import serves, unknown_backend
from tokendepth.ops.sparse_block import BlockWeights, Rotation, has_kernel

__all__ = ["decode_block", "runs_eager", "runs_kernel"]

MOST_ROWS = 256
"""More tokens than this are computed as a prompt is, by products of the active rows alone, which by then pays. Of 64
that took 3.9 ms a step, and this takes 2.0 (H200, d 1,024)."""


def runs_kernel(h: Tensor, weights: BlockWeights | None) -> bool:
    """Whether kernels, without host synchronisation, decode one token `h` `[slots, 1, d]` of each slot."""
    return h.shape[1] == 1 and len(h) <= MOST_ROWS and has_kernel(weights) and serves(h)


def runs_eager(h: Tensor) -> bool:
    """Whether `h` `[slots, 1, d]` is one token alone on a CPU, of which nothing is compiled or learned."""
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
    """h, x: `[slots, 1, d]`, the state and what the first norm made of it; columns: `[slots, 1]`, its own column.

    active: `[slots, 1]` bool, None for all; gate: `[slots, 1]`, scales an active token's updates. A token always sees
    its own key. unwritten: keys and values that `decode_inputs` has left to be made. Returns h with the active rows
    replaced; it may overwrite h.
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
