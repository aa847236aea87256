"""Span routing: one decision per token for several adjacent blocks. Ours, after Mixture-of-Depths and H-Net.

    active_t = s_t > tau,   u = f_n(... f_1(H~)) - H~,   h_t <- h_t + c_t

The score s_t comes from the decider (`span_deciders.py`). H~ are the active tokens of a sequence, in order and at their
true positions. With `keys` = active, the blocks f_1 to f_n process them as a shorter sequence, gathered once and
scattered once, in which skipped tokens have no keys and values. With `keys` = all, every block projects keys and values
of all tokens, as a model trained without a span needs, and rows are gathered in each block. If the span has a `width`
of its own, linear maps take active tokens into and out of it, while its heads are those of the other blocks:
u = leave(f_n(... f_1(enter(H~))) - enter(H~)).

The update of a token, c_t, depends on `carry`. none: its own, or nothing if it skips. last: that of the last active
token. smooth: z of that token, with z_t = p_t u_t + (1 - p_t) z_{t-1} over active tokens, p_1 = 1 and p from the
decider. If updates are carried, the first token of a sequence is always active. With a `bypass`, a token that skips
gets a linear map instead, h <- h + rms(h) W norm(h), after the span: its keys and values in the span are projected from
the state it entered with.

Several spans may follow each other, with blocks for every token between them. Each decides anew, from the states at its
entry. Their losses are added up; where a loss compares taking a span with skipping it, all tokens take what follows.

`budget` is the share of tokens that take the span. In training tau is the quantile of the batch's scores; in evaluation
it is a fixed number, calibrated on training text, so that a decision depends only on the token and its past. Training
needs shapes known beforehand: each sequence has `ROOM` times its share of rows; if they do not suffice, the tokens with
the lowest scores skip.

Left open and decided here: given thresholds, which may encode decisions, also hold for the first token. A score weights
updates by sigmoid(s) unless they are smoothed, which already weights them. On a GPU tokens are packed only if `room` is
given or the span has another width; otherwise each block works on listed rows, as in Mixture-of-Depths. Only a model
with one span takes `room`: how many tokens take a second one is not known before the first has run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from tokendepth.config import ModelConfig, SpanConfig
from tokendepth.context import Context
from tokendepth.methods.base import Dial, blocks_of, everyone, through
from tokendepth.methods.budget import CURVE
from tokendepth.methods.mod import among_site
from tokendepth.methods.one_span import OneSpan, SpanBlocks
from tokendepth.methods.span_deciders import WordEnds
from tokendepth.model import Block, MethodOutput
from tokendepth.ops.decide import decide
from tokendepth.trace import Site


class Span(OneSpan):
    """The method: all blocks, and the spans. It is itself the first span, whose weights thus keep their names."""

    blocks: nn.ModuleList
    has_soft = False
    skips_on_device = True
    draft_share = 0.0

    def __init__(self, model: ModelConfig, config: SpanConfig) -> None:
        first, *others = config.ranges(model.n_layer)
        inner, inside = config.inner(model), {layer for span in (first, *others) for layer in span}
        shapes = [inner if layer in inside else model for layer in range(model.n_layer)]
        blocks = nn.ModuleList(Block(shape, layer) for layer, shape in enumerate(shapes))
        super().__init__(model, config, first, 0, blocks)
        self.further = nn.ModuleList(OneSpan(model, config, span, n) for n, span in enumerate(others, 1))
        self.sites_per_decision = len(first)
        if config.width is not None:
            self.skips_on_device = False  # rows are packed before they are mapped, so the host must know how many
        if config.replaced:
            for block in self._blocks_of_span(self).within:
                block.requires_grad_(False)
        self.packs = config.keys == "active" and not config.replaced and not others
        self.batch_statistic, self.wants_teacher = self.decider.statistic, config.gain == "teacher"

    @property
    def spans(self) -> list[OneSpan]:
        return [self, *(span for span in self.further if isinstance(span, OneSpan))]

    def _blocks_of_span(self, span: OneSpan) -> SpanBlocks:
        blocks = blocks_of(self.blocks)
        return SpanBlocks(blocks[span.span.start : span.span.stop], blocks[span.span.stop :])

    def _before(self, span: OneSpan) -> list[Block]:
        """The blocks for every token between the previous span, or the embedding, and this one."""
        begin = self.spans[span.number - 1].span.stop if span.number else 0
        return blocks_of(self.blocks)[begin : span.span.start]

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        full, spans = everyone(hidden), self.spans
        work, fewer, losses = [full] * len(self.blocks), {}, {}
        for span in spans:
            if ctx.scored is None:
                score, hidden = None, through(self._before(span), hidden, ctx)
            else:
                hidden, score = ctx.scored
            ran = span.run(hidden, ctx, self._blocks_of_span(span), score)
            hidden = ran.hidden
            for layer in span.span:
                work[layer] = ran.active
                if ran.fewer_keys is not None:
                    fewer[layer] = ran.fewer_keys
            for name, loss in ran.losses.items():
                losses[name] = losses[name] + loss if name in losses else loss
        hidden = through(self._blocks_of_span(spans[-1]).after, hidden, ctx)
        trace = self.traced(work, ctx)
        if fewer:
            none = torch.zeros_like(next(iter(fewer.values())))
            trace = replace(trace, fewer_keys=torch.stack([fewer.get(layer, none) for layer in range(len(work))]))
        return MethodOutput(hidden, trace, losses)

    def until_decided(self, hidden: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        state = through(self._before(self), hidden, ctx)
        score = self.scored(state, ctx, self._blocks_of_span(self))
        return state, score, None if self.decides_by_text else self._active_count(score, ctx)

    def active_count_by_text(self, ctx: Context) -> Tensor:
        return self._active_count(self.decider(ctx.ids, ctx), ctx)

    def _active_count(self, score: Tensor, ctx: Context) -> Tensor:
        return decide(-self.ranked(score, ctx), self.threshold_in(ctx), ctx.valid).active.sum()

    # -- training

    def set_progress(self, done: float) -> None:
        for span in self.spans:
            span.change(done)

    def warning(self, ids: Tensor) -> str | None:
        rule = self.decider if isinstance(self.decider, WordEnds) else self.rule
        return None if rule is None else rule.warning(ids, self.knobs.budget, self.room)

    @torch.no_grad()
    def fit(self, parts: Iterable[Tensor], ctx: Context) -> None:
        if self.bypass is not None:  # which only one span can have
            self.fit_bypass((through(self._before(self), part, ctx) for part in parts), ctx, self._blocks_of_span(self))

    def read_vocabulary(self, spellings: Sequence[bytes]) -> None:
        for rule in (rule for span in self.spans for rule in span.rules()):
            rule.read_vocabulary(spellings)

    # -- sites, routers and operating points

    def sites(self, keys: int) -> tuple[Site, ...]:
        sites = [block.site(f"block {n}", keys, routed=False) for n, block in enumerate(blocks_of(self.blocks))]
        for span in self.spans:
            for n, block in zip(span.span, self._blocks_of_span(span).within, strict=True):
                entry = n == span.span.start
                router = span.entry_flops if entry else 0
                if self.knobs.keys == "all":
                    sites[n] = block.site(sites[n].name, keys, routed=True, router=router)
                else:
                    site = among_site(block, sites[n].name, keys, router=router)
                    mapped = span.width_flops if entry else 0
                    sites[n] = replace(site, active=site.active + mapped, per_key=block.attention.key_flops)
        return tuple(sites)

    def routers(self) -> list[nn.Module]:
        return [router for span in self.spans for router in span.decider.routers()]

    def additions(self) -> list[nn.Module]:
        return [*self.routers(), *([] if self.bypass is None else [self.bypass])]

    @classmethod
    def dial(cls, model: ModelConfig, config: SpanConfig) -> Dial | None:
        if config.decide in ("rule", "dice"):
            return None
        return Dial("budget", CURVE, config.budget, calibrated=True, trained=False)

    @torch.no_grad()
    def calibrate(self, parts: list[Tensor], ctx: Context, share: float) -> Tensor:
        active, spans = [], self.spans
        for span in spans:
            blocks = self._blocks_of_span(span)
            for n, part in enumerate(parts):
                parts[n] = through(self._before(span), part, ctx)
            active.append(span.calibrate_on(parts, ctx, blocks, share))
            if span is not spans[-1]:
                for n, part in enumerate(parts):
                    parts[n] = span.run(part, ctx, blocks).hidden
        return torch.stack(active) if len(spans) > 1 else active[0]

    def live_thresholds(self) -> Tensor:
        own, *others = (span.threshold.expand(self.sites_per_decision) for span in self.spans)
        return torch.cat([own, *others]) if others else own

    def set_thresholds(self, values: list[float]) -> None:
        for span, value in zip(self.spans, values[:: self.sites_per_decision], strict=True):
            span.threshold.fill_(value)
