"""Span routing: one decision per token for several adjacent blocks. Ours, after Mixture-of-Depths and H-Net.

    s_t = -r(norm(h_t)),   active_t = s_t > tau,   u = f_n(... f_1(H~)) - H~,   h_t <- h_t + c_t

H~ are the active tokens of a sequence in their order and at their true positions: the blocks f_1 to f_n take them as a
shorter sequence, gathered once and scattered once. A token that skips the span leaves no keys and values in it. What a
token gets, c_t, is its own update, weighted by sigmoid(s_t) so that the router learns what its decisions are worth. For
a token that skips it is nothing, or (`carry`) that of the last active token before it; then the first token of a
sequence is always active.

`budget` names the share of tokens that take the span. While training tau is the batch's own quantile; in use it is one
number, calibrated on training text, so that a decision depends on the token's past alone. Training needs shapes that
are known beforehand: each sequence has `ROOM` times its share of rows, and the lowest scores that find none skip.

Left open and decided here: thresholds that are given, such as decisions to be obeyed, hold for the first token too. On
a GPU with kernels for the block nothing is packed, because how long a packed sequence is only the device knows: there
each block works on the listed rows, as in Mixture-of-Depths.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from tokendepth.config import ModelConfig, SpanConfig
from tokendepth.context import Context, Rows
from tokendepth.layers.exact_buffers import ExactBuffers
from tokendepth.layers.norm import without_scale
from tokendepth.layers.routers import Router
from tokendepth.methods.base import Dial, Method, blocks_of, everyone
from tokendepth.methods.budget import CURVE, between, quantile
from tokendepth.methods.mod import Selected, among_site
from tokendepth.model import Block, MethodOutput
from tokendepth.ops.decide import Decision, list_active
from tokendepth.ops.rows import compact, put, take
from tokendepth.trace import Site

ROOM = 1.5
"""Rows that a sequence has in the span while training, as a multiple of its share of tokens."""


class Span(ExactBuffers, Method):
    has_soft = False
    one_decision = True
    skips_on_device = True
    batch_statistic = "the quantile of the scores, which is the threshold while training"
    threshold: Tensor

    def __init__(self, model: ModelConfig, config: SpanConfig) -> None:
        super().__init__(model, config)
        self.knobs, self.span = config, config.blocks(model.n_layer)
        self.blocks = nn.ModuleList(Block(model, layer) for layer in range(model.n_layer))
        self.router = Router(model.d_model)
        self.register_buffer("threshold", torch.tensor(0.0))

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        before, _, after = self._stages()
        hidden = _through(before, hidden, ctx)
        score = self._score(hidden)
        ranked, fewer_keys = self._ranked(score, ctx), None
        if self.training:
            update, active = self._train(hidden, ctx, ranked)
        else:
            threshold = ctx.thresholds([self.threshold] * len(self.span))[0]
            active = ctx.real(ranked > threshold)
            update, fewer_keys = self._execute(hidden, ctx, active)
        hidden = hidden + self._passed_on(torch.sigmoid(score), update, active, ctx)
        hidden = _through(after, hidden, ctx)
        work = [active if n in self.span else everyone(hidden) for n in range(len(self.blocks))]
        return MethodOutput(hidden, replace(self.traced(work, ctx), fewer_keys=fewer_keys), {})

    def _stages(self) -> tuple[list[Block], list[Block], list[Block]]:
        blocks, begin, end = blocks_of(self.blocks), self.span.start, self.span.stop
        return blocks[:begin], blocks[begin:end], blocks[end:]

    def _score(self, hidden: Tensor) -> Tensor:
        """`[batch, time]`, the higher the sooner active."""
        _, (first, *_), _ = self._stages()
        return -self.router(without_scale(first.norm_attention, hidden))

    def _ranked(self, score: Tensor, ctx: Context) -> Tensor:
        """What is compared with the threshold: a sequence's first token is above any where updates are carried."""
        if self.knobs.carry == "none":
            return score.detach()
        assert ctx.positions is not None
        return torch.where(ctx.positions == 0, torch.inf, score.detach())

    def _passed_on(self, weight: Tensor, update: Tensor, active: Tensor, ctx: Context) -> Tensor:
        """What each token gets of the active tokens' updates, `[batch, time, d]` and zero for all others."""
        fresh = weight[..., None].to(update.dtype) * update
        if self.knobs.carry == "none":
            return fresh
        last = None if ctx.cache is None else ctx.cache.state("span update", like=fresh[0, 0])
        carried = carry_on(fresh, ~active, last)
        if ctx.cache is not None:
            ctx.cache.remember("span update", carried[:, -1])
        return carried

    # -- evaluation

    def _execute(self, hidden: Tensor, ctx: Context, active: Tensor) -> tuple[Tensor, Tensor | None]:
        """The active tokens' updates, zero for the others; and how many keys fewer they attended over, if packed."""
        _, blocks, _ = self._stages()
        count = active.sum(1)
        earlier = torch.zeros_like(count) if ctx.cache is None else ctx.cache.state("span length", like=count[0])
        columns, lengths = earlier[:, None] + active.cumsum(1) - 1, earlier + count
        if ctx.cache is not None:
            ctx.cache.remember("span length", lengths)
        if ctx.execution == "sparse" and not blocks[0].skips_by_kernel(hidden):
            places = compact(active)
            taken = take(hidden, places)
            rows = _through(blocks, taken, ctx.gathered(active, places, columns, lengths))
            update = put(torch.zeros_like(hidden), places, rows - taken)
            return update, ctx.key_count(hidden.shape[1]) - lengths
        if ctx.cache is not None:
            writes = torch.where(active, columns, ctx.cache.capacity)
            ctx = replace(ctx, columns=columns.clamp(min=0), writes=writes)
        listed = list_active(active, hidden) if ctx.execution == "sparse" else None
        rows, state = Rows(active, Decision(active, active, listed=listed)), ctx.spare(hidden)
        for block in blocks:
            state = block(state, ctx, rows, keys="active")
        return state - hidden, None

    @torch.no_grad()
    def calibrate(self, parts: list[Tensor], ctx: Context, share: float) -> Tensor:
        before, _, _ = self._stages()
        ranked = torch.cat([self._ranked(self._score(_through(before, part, ctx)), ctx) for part in parts])
        self.threshold.copy_(_finite(between(ranked, 1 - share)))
        return (ranked > self.threshold).float().mean(1)

    # -- training

    def _train(self, hidden: Tensor, ctx: Context, ranked: Tensor) -> tuple[Tensor, Tensor]:
        """The active tokens' updates, zero for the others, and who they are."""
        level = torch.full((1, 1), 1 - self.knobs.budget, device=ranked.device)
        chosen = self._chosen(ranked, _finite(quantile(ranked, level, ctx.valid)), ctx)
        taken = chosen.take(hidden)
        # The active ones stand first, so that causal attention alone keeps from them what fills up the rows.
        rows = _through(self._stages()[1], taken, replace(chosen.context(ctx), valid=None))
        return chosen.add(torch.zeros_like(hidden), rows - taken), chosen.as_mask(ranked).bool()

    def _chosen(self, ranked: Tensor, threshold: Tensor, ctx: Context) -> Selected:
        """The tokens above the threshold that find room, first and in order; then whatever fills up the rows."""
        time, share = ranked.shape[1], ROOM * self.knobs.budget
        if ctx.valid is not None:
            ranked = torch.where(ctx.valid, ranked, -torch.inf)
        room = min(time, math.ceil(share * time))
        best = ranked.argsort(dim=1, descending=True, stable=True)[:, :room]  # of equals the earlier
        there = ranked.gather(1, best) > threshold
        if ctx.valid is not None:  # padding takes no room and makes none
            real = ctx.valid.sum(1, keepdim=True)
            there = there & (torch.arange(room, device=best.device) < (share * real.double()).ceil())
        order = torch.where(there, best, best + time).sort(dim=1).values
        return Selected(order % time, order < time)

    # -- what others ask

    def sites(self, keys: int) -> tuple[Site, ...]:
        sites = []
        for n, block in enumerate(blocks_of(self.blocks)):
            if n in self.span:
                router = self.router.flops if n == self.span.start else 0
                site = among_site(block, f"block {n}", keys, router=router)
                sites.append(replace(site, per_key=block.attention.key_flops))
            else:
                sites.append(block.site(f"block {n}", keys, routed=False))
        return tuple(sites)

    def routers(self) -> list[nn.Module]:
        return [self.router]

    @classmethod
    def dial(cls, model: ModelConfig, config: SpanConfig) -> Dial | None:
        return Dial("budget", CURVE, config.budget, calibrated=True, trained=False)

    def live_thresholds(self) -> Tensor:
        return self.threshold.expand(len(self.span))

    def set_thresholds(self, values: list[float]) -> None:
        self.threshold.fill_(values[0])


def carry_on(fresh: Tensor, keep: Tensor, before: Tensor | None = None) -> Tensor:
    """c_t = fresh_t + keep_t c_{t-1} for `fresh` `[batch, time, d]` and `keep` `[batch, time]`; c_0 is `before`, or 0.

    Over distances of 1, 2, 4, ... tokens: log2(time) passes instead of a step for every token.
    """
    keep, distance = keep[..., None].to(fresh.dtype), 1
    while distance < fresh.shape[1]:
        fresh = torch.cat([fresh[:, :distance], fresh[:, distance:] + keep[:, distance:] * fresh[:, :-distance]], 1)
        keep = torch.cat([keep[:, :distance], keep[:, distance:] * keep[:, :-distance]], 1)
        distance *= 2
    return fresh if before is None else fresh + keep * before[:, None]


def _through(blocks: Iterable[Block], hidden: Tensor, ctx: Context) -> Tensor:
    for block in blocks:
        hidden = block(hidden, ctx)
    return hidden


def _finite(threshold: Tensor) -> Tensor:
    """Below infinity, so that tokens that are always active exceed it."""
    return threshold.clamp(max=torch.finfo(threshold.dtype).max)
