"""Models that are not trained, but whose matrices matter and whose routers decide either way."""

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn

from tokendepth.context import Context, Rows
from tokendepth.model import Block, LanguageModel, Output


@torch.no_grad()
def enlivened(model: LanguageModel, ids: Tensor, spread: float = 1.0) -> LanguageModel:
    """With matrices that matter; a router that has a bias is set to decide either way, one without is left to luck.

    Unless its threshold can be set instead. `ids`: what they decide about; `spread`: how far router logits lie apart.
    """
    for matrix in (p for p in model.parameters() if p.ndim == 2):
        matrix.mul_(0.2 / matrix.std())
    for number, router in enumerate(model.method.routers()):
        linears = [module for module in router.modules() if isinstance(module, nn.Linear)]
        if not linears:
            continue
        _, logits = with_router_logits(model, lambda: model(ids, execution="hard"))
        bias = 0.0 if linears[-1].bias is None else linears[-1].bias.clone()
        scale = spread / logits[number].std()
        scaled = (logits[number] - bias) * scale
        median = scaled.median()
        centre = (median + scaled[scaled > median + 1e-3].min()) / 2  # no token stands on the threshold itself
        if linears[-1].bias is None and model.method.live_thresholds() is not None:
            model.method.set_thresholds([float(centre / scale)] * len(routed_sites(model)))
            continue
        linears[-1].weight.mul_(scale)
        if linears[-1].bias is not None:
            linears[-1].bias.fill_(-centre)
    return model


def routed_sites(model: LanguageModel) -> list[int]:
    return [number for number, site in enumerate(model.method.sites(keys=1)) if site.routed]


def with_router_logits(model: LanguageModel, forward: Callable[[], Output]) -> tuple[Output, list[Tensor]]:
    """What `forward` returns, and the logits of each router in the order of the routed sites."""
    logits: list[Tensor] = []

    def note(_router: nn.Module, _states: object, found: Tensor) -> None:
        logits.append(found)

    hooks = [router.register_forward_hook(note) for router in model.method.routers()]
    decide = Block.decide

    def decided(block: Block, h: Tensor, ctx: Context, *args, **kwargs) -> Rows:
        """A block that skips asks its router together with its norm."""
        found = decide(block, h, ctx, *args, **kwargs)
        assert found.decision is not None
        logits.extend([found.decision.logit] if ctx.execution == "sparse" else [])
        return found

    try:
        with mock.patch.object(Block, "decide", decided):
            return forward(), logits
    finally:
        for hook in hooks:
            hook.remove()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((actual - expected).abs().max() / expected.abs().max())
