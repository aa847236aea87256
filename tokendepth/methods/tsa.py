"""Token-Selective Attention: a learned gate per token on the residual updates of each block but the first.

    h <- f_0(h);   p_l = r_l(h),   h <- f_{l+1}(h, p_l)   for l = 0 .. L-2                                     (eq. 1)

`p` is the halting probability, and `1 - p` scales the block's updates. The stem f_0 is never gated. Attention and
feed-forward of a block share one `p`.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from tokendepth.config import ModelConfig, TSAConfig
from tokendepth.context import Context, Rows
from tokendepth.layers.routers import Router
from tokendepth.methods.base import Method, blocks_of, everyone
from tokendepth.model import Block, MethodOutput
from tokendepth.ops.decide import decide
from tokendepth.ops.gated_add import gated_add
from tokendepth.ops.rows import compact, put, take
from tokendepth.trace import Site


class GatedBlock(Block):
    """A block and its router."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__(model, layer)
        self.router = Router(model.d_model)

    def skip_ffn(self, h: Tensor, ctx: Context, active: Tensor) -> Tensor:
        """The paper's sparse mode: attention for every token, with masked updates; feed-forward for active tokens."""
        h = gated_add(h, self.attention(self.norm_attention(h), ctx), active)
        places = compact(active)
        states = take(h, places)
        return put(h, places, states + self.ffn(self.norm_ffn(states)))


class TSA(Method):
    def __init__(self, model: ModelConfig, config: TSAConfig) -> None:
        super().__init__(model, config)
        self.depth_penalty, self.skip = config.depth_penalty, config.skip
        self.skips_on_device = config.skip == "block"
        # If on, hard execution scales the updates of active tokens by 1 - p, as in training, instead of by 1, as in the
        # paper: a control for the effect of rounding the gates up.
        self.keeps_weights = False
        self.controls = {"kept_weights_hard": {"keeps_weights": True}}
        # The decision p > threshold, made on logits, since the sigmoid rounds close ones to the same number.
        t = config.threshold
        self.threshold_logit = math.log(t / (1 - t)) if 0 < t < 1 else math.copysign(math.inf, t - 0.5)
        gated = [GatedBlock(model, layer) for layer in range(1, model.n_layer)]
        self.blocks = nn.ModuleList([Block(model, 0), *gated])

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        hidden = self.blocks[0](hidden, ctx)
        keeps, gated = [everyone(hidden)], self._gated()
        for threshold, block in zip(ctx.thresholds([-self.threshold_logit] * len(gated)), gated, strict=True):
            if ctx.execution == "soft":
                keep = torch.sigmoid(-block.router(hidden))
                hidden = block(hidden, ctx, gate=keep)
            else:
                hidden, keep = self._execute(block, hidden, ctx, threshold)
            keeps.append(keep)
        if ctx.execution != "soft" or not gated:  # a decision has no gradient, so no penalty either
            return MethodOutput(hidden, self.traced(keeps, ctx), {})
        work = torch.stack(keeps)
        losses = {"depth": self.depth_penalty * _mean(work[1:], ctx)}
        return MethodOutput(hidden, self.traced(work, ctx), losses)

    def _execute(
        self, block: GatedBlock, hidden: Tensor, ctx: Context, threshold: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """The states after a block, and which tokens did not halt."""
        if ctx.execution == "sparse" and self.skip == "ffn":
            active = decide(block.router(hidden), threshold, ctx.valid, inclusive=True).active
            return block.skip_ffn(hidden, ctx, active), active
        rows: Rows = block.decide(hidden, ctx, block.router, threshold, inclusive=True)
        return block(hidden, ctx, rows, gate=rows.keep if self.keeps_weights else None), rows.active

    def sites(self, keys: int) -> tuple[Site, ...]:
        sites = []
        for layer, block in enumerate(blocks_of(self.blocks)):
            router = block.router.flops if isinstance(block, GatedBlock) else 0
            site = block.site(f"block {layer}", keys, routed=layer > 0, router=router)
            if self.skip == "ffn" and layer:
                site = replace(site, always=site.always + site.active - block.ffn.flops, active=block.ffn.flops)
            sites.append(site)
        return tuple(sites)

    def routers(self) -> list[Router]:
        return [block.router for block in self._gated()]

    def _gated(self) -> list[GatedBlock]:
        return [block for block in self.blocks if isinstance(block, GatedBlock)]


def _mean(keep: Tensor, ctx: Context) -> Tensor:
    """The mean active fraction over layers, batch and time in eq. 5, of the tokens that losses are averaged over."""
    if ctx.valid is None and ctx.counted is None:
        return keep.mean()
    return ctx.mean(keep).mean()
