"""Count the FLOPs that are dispatched: 2 x multiply-adds of matrix products, with attention over the full square.

PyTorch's own counter has no formula for CPU attention and returns 0 for it. Here every attention op has a formula, and
a matrix product or a custom op without one is an error, so nothing goes uncounted. What attention kernels recompute in
the backward pass is left out, since it differs between kernels and is not part of the method.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tokendepth.config import RunConfig
from tokendepth.methods import build

aten = torch.ops.aten


def _attention(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """From shapes: scores and weighted sum for every query head, even if heads share keys and values.

    A causal kernel may skip half of the square; by convention all of it is counted.
    """
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (width + v[3])


def _attention_backward(_: Any, q: Any, k: Any, v: Any, *__: Any, out_shape: Any = None, **___: Any) -> int:
    """Two products for each one in the forward pass, as for any matrix product."""
    return 2 * _attention(q, k, v)


# PyTorch has formulas for the other attention ops, and for `bmm`, which the math fallback uses.
FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}

# Matched against the op's name. Custom ops are recognised by their namespace instead.
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "ger", "addr", "linear", "matmul"}


class _NothingUncounted(TorchDispatchMode):
    """Checks the ops that remain after decomposition: one that multiplies matrices must have a formula."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._overloadpacket._qualified_op_name.split("::")
        multiplies = name in _PRODUCTS or "attention" in name or "conv" in name or namespace not in ("aten", "prim")
        if multiplies and func._overloadpacket not in {**flop_registry, **FORMULAS}:
            raise NotImplementedError(f"{namespace}::{name} has no FLOP formula; add it to FORMULAS in flops.py")
        return func(*args, **(kwargs or {}))


def count_flops(function: Callable[[], object], *, gradients: bool = False) -> int:
    """The FLOPs that `function()` dispatches; without `gradients` it runs under no_grad."""
    # The innermost mode sees an op first: the counter decomposes and counts it, the guard checks what remains.
    with (
        torch.set_grad_enabled(gradients),
        _NothingUncounted(),
        FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter,
    ):
        function()
    return counter.get_total_flops()


def training_flops(config: RunConfig) -> float:
    """FLOPs per token of a training step at full context, forward and backward (AdamW has no matrix products).

    Counted on one sequence with an untrained model without dropout, since no method's cost depends on weights or text.
    """
    model = build(replace(config, model=replace(config.model, dropout=0.0))).train()
    ids = torch.zeros(1, config.model.context, dtype=torch.long)

    def step() -> None:
        out = model(ids, targets=ids)
        task = F.cross_entropy(out.logits.flatten(0, 1).float(), ids.flatten())
        torch.autograd.grad(sum(out.losses.values(), task), list(model.parameters()))

    return count_flops(step, gradients=True) / ids.numel()
