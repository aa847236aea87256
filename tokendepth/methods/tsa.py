"""Token-Selective Attention: a learned gate per token on the residual updates of each block but the first.

    h <- f_0(h);   p_l = r_l(h),   h <- f_{l+1}(h, p_l)   for l = 0 .. L-2                                     (eq. 1)

`p` is the probability to halt, `1 - p` is what the block keeps of its update. The stem f_0 is never gated. One `p`
serves a block's attention and feed-forward alike.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from tokendepth.config import ModelConfig, TSAConfig
from tokendepth.methods.base import Method
from tokendepth.model import Block, Pass, Spent, block_site
from tokendepth.ops.choose import choose
from tokendepth.ops.enter_block import RouterWeights
from tokendepth.ops.router import halting_logits
from tokendepth.trace import DepthTrace, Site


class Router(nn.Module):
    """r_l of eq. 2, up to the sigmoid: a two-layer MLP from a token's state to its halting logit."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(d_model, max(16, d_model // 4))
        self.logit = nn.Linear(self.hidden.out_features, 1)
        nn.init.constant_(self.logit.bias, -1.0)  # sigmoid(-1) = 0.27: nothing halts before there is something to learn

    def forward(self, h: Tensor) -> Tensor:
        """`[batch, time, d] -> [batch, time]`, in float32 so that the gate is fine where the products are not."""
        return halting_logits(h, *self.weights()[:4], low_precision=torch.is_autocast_enabled(h.device.type))

    def weights(self, *, normed: bool = False) -> RouterWeights:
        return RouterWeights(self.hidden.weight, self.hidden.bias, self.logit.weight, self.logit.bias, normed)

    @property
    def flops(self) -> int:
        return 2 * (self.hidden.weight.numel() + self.logit.weight.numel())


class GatedBlock(Block):
    """A block and the router that guards it."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__(model, layer)
        self.router = Router(model.d_model)


class TSA(Method):
    def __init__(self, model: ModelConfig, config: TSAConfig) -> None:
        super().__init__(model, config)
        self.depth_penalty, self.skip = config.depth_penalty, config.skip
        self.skips_on_device = config.skip == "block"
        # On, a token that does not halt keeps 1 - p of its update under hard execution, as it was trained, instead of
        # all of it, as the paper has it: a control of what rounding the gates up does.
        self.keeps_weights = False
        # The decision p > threshold, taken on logits: the sigmoid would round away what separates close ones.
        t = config.threshold
        self.threshold_logit = math.log(t / (1 - t)) if 0 < t < 1 else math.copysign(math.inf, t - 0.5)
        gated = [GatedBlock(model, layer) for layer in range(1, model.n_layer)]
        self.blocks = nn.ModuleList([Block(model, 0), *gated])

    def forward(self, hidden: Tensor, run: Pass) -> Spent:
        sites = self.sites(run.keys(hidden.shape[1]))
        stem = self.blocks[0]
        assert isinstance(stem, Block)
        hidden = stem.forward_all(hidden, run)
        keeps = [torch.ones(hidden.shape[:2], device=hidden.device)]
        for threshold, block in zip(
            run.thresholds([-self.threshold_logit] * len(self.routers())), self._gated(), strict=True
        ):
            if run.execution == "soft":
                keep = torch.sigmoid(-block.router(hidden))
                hidden = block(hidden, run, gate=keep)
            else:
                hidden, active = self._decided(block, hidden, run, threshold)
                keep = active.float()
            keeps.append(keep)
        work = torch.stack(keeps)
        gated = run.execution == "soft" and len(keeps) > 1  # a decision has no gradient, so no price either
        losses = {"depth": self.depth_penalty * _mean(work[1:], run.valid)} if gated else {}
        return Spent(hidden, DepthTrace(work.detach(), sites, run.execution), losses)

    def _decided(
        self, block: GatedBlock, hidden: Tensor, run: Pass, threshold: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """What a block makes of the tokens that do not halt, and who they are."""
        if run.execution == "sparse" and self.skip == "block":
            entered = block.enter(hidden, block.router.weights())
            return block.forward_chosen(hidden, run, entered, entered.logit, threshold, inclusive=True)
        halt = block.router(hidden)
        active, _ = choose(halt, threshold, run.valid, inclusive=True)
        if run.execution == "sparse":
            return block.forward_active_ffn(hidden, run, active), active
        return block(hidden, run, gate=active * torch.sigmoid(-halt) if self.keeps_weights else active), active

    def sites(self, keys: int) -> tuple[Site, ...]:
        sites = [block_site(self.model, "block 0", keys, routed=False)]
        for layer, router in enumerate(self.routers(), 1):
            site = block_site(self.model, f"block {layer}", keys, routed=True, router=router.flops)
            if self.skip == "ffn":
                attention = site.active - 4 * self.model.d_model * self.model.d_ff
                site = replace(site, always=site.always + attention, active=site.active - attention)
            sites.append(site)
        return tuple(sites)

    def routers(self) -> list[Router]:
        return [block.router for block in self._gated()]

    def _gated(self) -> list[GatedBlock]:
        return [block for block in self.blocks if isinstance(block, GatedBlock)]


def _mean(keep: Tensor, valid: Tensor | None) -> Tensor:
    """The mean active fraction over layers, batch and time of eq. 5, padding left out."""
    if valid is None:
        return keep.mean()
    return (keep * valid).sum() / (len(keep) * valid.sum())
