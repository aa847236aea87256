"""One span: a decision per token, and the adjacent blocks that it covers. The equations are in `span.py`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import ModelConfig, SpanConfig
from tokendepth.context import Context, Rows
from tokendepth.layers.exact_buffers import ExactBuffers
from tokendepth.layers.ffn import initialise_residual
from tokendepth.layers.linear import Linear
from tokendepth.layers.norm import without_scale
from tokendepth.methods.base import Method, annealed, divergence, through
from tokendepth.methods.budget import gain_target, quantile, threshold_for
from tokendepth.methods.mod import Selected
from tokendepth.methods.span_bypass import Bypass, rms
from tokendepth.methods.span_carry import Passing
from tokendepth.methods.span_deciders import (
    QUANTILE,
    Boundary,
    Dice,
    Entropy,
    Gain,
    WordEnds,
    make_decider,
    ratio_loss,
    taught_loss,
)
from tokendepth.model import Block
from tokendepth.ops.decide import Decision, decide
from tokendepth.ops.rows import ChosenRows, compact, first_places, last_active, put, put_active, take

ROOM = 1.5
"""Rows per sequence in the span during training, as a multiple of its share of tokens."""


@dataclass(frozen=True)
class SpanBlocks:
    """The blocks of a span, and those that follow it."""

    within: list[Block]
    after: list[Block]


@dataclass(frozen=True)
class SpanOutput:
    """What a span did in one forward pass."""

    hidden: Tensor
    active: Tensor
    losses: dict[str, Tensor]
    fewer_keys: Tensor | None
    """`[batch]`, if its tokens were packed: by how many keys that shortened their attention."""


class OneSpan(ExactBuffers, Method):
    """Everything about a span but its blocks, which `Span` has and passes."""

    threshold: Tensor
    skipping: Tensor
    """The share of tokens that skip in training; with `anneal` it rises from 0."""
    told: Tensor
    """1 while word ends decide and teach the boundaries, then 0."""

    def __init__(
        self, model: ModelConfig, config: SpanConfig, span: range, number: int, blocks: nn.ModuleList | None = None
    ) -> None:
        """blocks: of the model, if it is the one that has them; they come first in its parameters."""
        super().__init__(model, config)
        if blocks is not None:
            self.blocks = blocks
        self.knobs, self.span, self.number = config, span, number
        self.decider = make_decider(model, config, number)
        self.rule = WordEnds(model) if config.taught else None
        self.bypass = Bypass(model) if config.bypass else None
        self.enter = self.leave = None
        if config.width is not None:
            self.enter = Linear(model.d_model, config.width, bias=False)
            self.leave = Linear(config.width, model.d_model, bias=False)
            initialise_residual(self.leave, model.n_layer)
        self.decides_by_text = not self.decider.reads_states
        self.register_buffer("threshold", torch.tensor(self.decider.threshold))
        self.register_buffer("skipping", torch.tensor(1 - config.budget), persistent=False)
        self.register_buffer("told", torch.tensor(0.0), persistent=False)
        self.change(0.0)

    def change(self, done: float) -> None:
        """As `Method.set_progress`."""
        self.told.fill_(float(done < self.knobs.taught))
        self.skipping.fill_((1 - self.knobs.budget) * annealed(done, self.knobs.anneal))

    def run(self, hidden: Tensor, ctx: Context, blocks: SpanBlocks, known_score: Tensor | None = None) -> SpanOutput:
        """From the states at its entry. known_score: if it was computed before."""
        ctx = replace(ctx, span=self.number)
        reads = self.bypass is not None or (known_score is None and not self.decides_by_text)
        seen = self.seen(hidden, blocks) if reads else hidden
        score: Tensor = self.decider(seen, ctx) if known_score is None else known_score
        ends = self.rule(seen, ctx) if self.rule is not None and self.training else None
        ranked = self.ranked(score if ends is None else torch.where(self.told > 0, ends, score), ctx)
        passed_by = hidden if self.bypass is None else hidden + self.bypass(seen, hidden)
        if self.training:
            threshold = self._training_threshold(ranked, ctx)
            state, active = self._train(hidden, passed_by, ctx, blocks, ranked, score, threshold)
            return SpanOutput(state, active, self._losses(hidden, passed_by, score, ends, ctx, blocks), None)
        threshold = self.threshold_in(ctx)
        listing = hidden if ctx.execution == "sparse" else None  # kernels list active tokens once, for all blocks
        decision = decide(-ranked, threshold, ctx.valid, states=listing)
        state, fewer_keys = self._execute(hidden, passed_by, ctx, blocks, decision, score, threshold)
        return SpanOutput(state, decision.active, {}, fewer_keys)

    def scored(self, hidden: Tensor, ctx: Context, blocks: SpanBlocks) -> Tensor:
        """The scores of tokens with the states `hidden` at the entry of the span."""
        ctx = replace(ctx, span=self.number)
        return self.decider(hidden if self.decides_by_text else self.seen(hidden, blocks), ctx)

    def ranked(self, score: Tensor, ctx: Context) -> Tensor:
        """What is compared with the threshold; if updates are carried, a sequence's first token is above any."""
        if self.knobs.carry == "none":
            return score.detach()
        assert ctx.positions is not None
        return torch.where(ctx.positions == 0, torch.inf, score.detach())

    def threshold_in(self, ctx: Context) -> Tensor | float:
        site = self.number * len(self.span)
        return ctx.thresholds([self.threshold] * (site + 1))[site]

    def seen(self, hidden: Tensor, blocks: SpanBlocks) -> Tensor:
        """What decider and bypass read."""
        return without_scale(blocks.within[0].norm_attention, hidden)

    def taken(self, states: Tensor, ctx: Context, blocks: SpanBlocks, rows: Rows | None = None) -> Tensor:
        """`states` after the span, which the tokens of `rows` take (None: all). Sparse execution may overwrite them."""
        keys = "all" if rows is None else self.knobs.keys
        if self.enter is None or self.leave is None:
            return through(blocks.within, states, ctx, rows, keys)
        inner = self.enter(states).to(states.dtype)  # autocast rounds products, but not states
        return states + self.leave(through(blocks.within, ctx.spare(inner), ctx, rows, keys) - inner)

    def _bypassed(self, state: Tensor, passed_by: Tensor, active: Tensor) -> Tensor:
        return state if self.bypass is None else torch.where(active[..., None], state, passed_by)

    # -- evaluation

    def _execute(
        self,
        hidden: Tensor,
        passed_by: Tensor,
        ctx: Context,
        blocks: SpanBlocks,
        decision: Decision,
        score: Tensor,
        threshold: Tensor | float,
    ) -> tuple[Tensor, Tensor | None]:
        """The states after the span and, if it was packed, how many fewer keys were attended to."""
        first, active = blocks.within[0], decision.active
        passing = Passing(self.knobs.carry, self.decider, active, score, threshold, ctx)
        if self.knobs.keys == "active":
            count = active.sum(1)
            earlier = torch.zeros_like(count) if ctx.cache is None else ctx.state("span length", like=count[0])
            columns, lengths = earlier[:, None] + active.cumsum(1) - 1, earlier + count
            if ctx.cache is not None:
                ctx.remember("span length", columns + 1)
                writes = torch.where(active, columns, ctx.cache.capacity)
                ctx = replace(ctx, columns=columns.clamp(min=0), writes=writes)
            room = ctx.room if ctx.cache is None else 0
            if ctx.execution == "sparse" and (room or self.enter is not None or not first.skips_by_kernel(hidden)):
                places = first_places(active, decision.listed, room) if room else compact(active)
                inside = ctx.gathered(active, places, columns, lengths, spare=room > 0)
                taken, fewer_keys = take(hidden, places), ctx.key_count(hidden.shape[1]) - lengths
                rows = self.taken(taken, inside, blocks)  # library calls do not overwrite `taken`
                if self.knobs.carry == "last" and ctx.cache is None:  # one gather; carry_on needs log2(time) passes
                    updates, weight = rows - taken, self.decider.weight(score)
                    updates = updates if weight is None else take(weight[..., None].to(rows.dtype), places) * updates
                    return hidden + last_active(updates, active), fewer_keys
                state = put_active(hidden, active, rows) if room else put(hidden, places, rows)
                return passing.updated(hidden, self._bypassed(state, passed_by, active)), fewer_keys
        state = self.taken(ctx.spare(hidden), ctx, blocks, Rows(active, decision))
        return passing.updated(hidden, self._bypassed(state, passed_by, active)), None

    def calibrate_on(self, states: list[Tensor], ctx: Context, blocks: SpanBlocks, share: float) -> Tensor:
        """As `Method.calibrate`, from states at the entry of the span."""
        ranked = torch.cat([self.ranked(self.scored(part, ctx, blocks), ctx) for part in states])
        self.threshold.copy_(_finite(threshold_for(ranked, share)))
        return (ranked > self.threshold).float().mean(1)

    def fit_bypass(self, states: Iterable[Tensor], ctx: Context, blocks: SpanBlocks) -> None:
        """As `Method.fit`, from states at the entry of the span."""
        assert self.bypass is not None

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for hidden in states:
                update = self.taken(hidden, ctx, blocks) - hidden
                yield self.seen(hidden, blocks).flatten(0, 1), (update / rms(hidden)).flatten(0, 1)

        self.bypass.fit(pairs())

    # -- training

    @property
    def room(self) -> float:
        """Rows per sequence in training, as a share of its tokens."""
        return 1.0 if self.knobs.anneal else min(1.0, ROOM * self.knobs.budget)

    def _training_threshold(self, ranked: Tensor, ctx: Context) -> Tensor | float:
        if self.decider.statistic == QUANTILE:
            return _finite(quantile(ranked, self.skipping.view(1, 1), ctx.valid))
        return self.skipping if isinstance(self.decider, Dice) else self.decider.threshold

    def _train(
        self,
        hidden: Tensor,
        passed_by: Tensor,
        ctx: Context,
        blocks: SpanBlocks,
        ranked: Tensor,
        score: Tensor,
        threshold: Tensor | float,
    ) -> tuple[Tensor, Tensor]:
        """The states after the span, and which tokens were active."""
        if self.knobs.replaced:
            return passed_by, torch.zeros_like(ranked, dtype=torch.bool)
        chosen = Selected.above(ranked, threshold, self.room, ctx.valid)
        active = chosen.as_mask(ranked).bool()
        passing = Passing(self.knobs.carry, self.decider, active, score, threshold, ctx)
        if self.knobs.keys == "active":
            # Active tokens come first, so causal attention already hides the filler behind them.
            taken = chosen.take(hidden)
            rows = self.taken(taken, replace(chosen.context(ctx), valid=None), blocks)
            if self.knobs.carry != "none":
                return passing.updated_by_rows(hidden, rows - taken, chosen.places), active
            state = chosen.put(hidden, rows)
        else:
            batch, time = active.shape
            places = (chosen.places + time * torch.arange(batch, device=active.device)[:, None]).flatten()
            packed, state = Rows(active, chosen=ChosenRows.at(places, batch * time)), hidden
            for block in blocks.within:
                state = block(state, ctx, packed, gate=active.to(hidden.dtype))
        return passing.updated(hidden, self._bypassed(state, passed_by, active)), active

    def _losses(
        self, hidden: Tensor, passed_by: Tensor, score: Tensor, ends: Tensor | None, ctx: Context, blocks: SpanBlocks
    ) -> dict[str, Tensor]:
        losses = self._decider_losses(hidden, passed_by, score, ctx, blocks)
        if ends is not None:
            losses["taught"] = self.told * taught_loss(score, ends, ctx)
        if self.knobs.draft and ctx.targets is not None:
            losses["draft"] = self.knobs.draft * self._draft_loss(hidden, passed_by, ctx.targets, ctx, blocks)
        return losses

    def _draft_loss(
        self, hidden: Tensor, passed_by: Tensor, targets: Tensor, ctx: Context, blocks: SpanBlocks
    ) -> Tensor:
        """The divergence of predictions that skip the span from those that take it, which get no gradient.

        Half of the tokens skip at a time, since in a draft, too, tokens that skip attend to others that did not.
        """
        assert ctx.readout is not None
        with torch.no_grad():
            taken = self.taken(hidden, ctx, blocks)
            full = ctx.readout(through(blocks.after, taken, ctx))
        skips = torch.rand(hidden.shape[:2], device=hidden.device) < 0.5
        drafted = ctx.readout(through(blocks.after, torch.where(skips[..., None], passed_by, taken), ctx))
        counted = skips & (targets >= 0)
        return (divergence(full, drafted) * counted).sum() / counted.sum().clamp(min=1)

    def _decider_losses(
        self, hidden: Tensor, passed_by: Tensor, score: Tensor, ctx: Context, blocks: SpanBlocks
    ) -> dict[str, Tensor]:
        knobs = self.knobs
        if isinstance(self.decider, Boundary) and knobs.ratio_loss:
            ratio = ratio_loss(score, score > self.decider.threshold, knobs.budget, ctx)
            return {"ratio": knobs.ratio_loss * ratio * (1 - self.told)}
        if ctx.targets is None or not isinstance(self.decider, Gain | Entropy):
            return {}
        counted = ctx.targets >= 0  # positions with a loss
        if isinstance(self.decider, Gain):
            errors = (score - gain_target(self._skipping_costs(hidden, passed_by, ctx, blocks))).square()
        else:
            predicted = self.decider.predict(self.seen(hidden, blocks))
            errors = -predicted.gather(2, ctx.targets.clamp(min=0)[..., None])[..., 0]
        return {knobs.decide: (errors * counted).sum() / counted.sum().clamp(min=1)}

    @torch.no_grad()
    def _skipping_costs(self, hidden: Tensor, passed_by: Tensor, ctx: Context, blocks: SpanBlocks) -> Tensor:
        """`[batch, time]`: the cost for each token if no token takes the span, and all take what follows.

        The increase in loss relative to a forward pass in which all do, or the divergence from it or from the teacher.
        """
        readout, targets = ctx.readout, ctx.targets
        assert readout is not None
        assert targets is not None

        def read(state: Tensor) -> Tensor:
            return readout(through(blocks.after, state, ctx)).float()

        def loss(logits: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

        skipped = read(passed_by)
        if self.knobs.gain == "teacher" and ctx.teacher is not None:
            return divergence(ctx.teacher, skipped)
        taken = read(self.taken(hidden, ctx, blocks))
        return loss(skipped) - loss(taken) if self.knobs.gain == "loss" else divergence(taken, skipped)

    # -- costs

    @property
    def entry_flops(self) -> int:
        """Per token, before the span: the decider, and the bypass, computed for every token since that is no slower."""
        return self.decider.flops + (0 if self.bypass is None else self.bypass.flops)

    @property
    def width_flops(self) -> int:
        """Per active token: into the span's width, and back."""
        return 2 * sum(part.weight.numel() for part in (self.enter, self.leave) if part is not None)

    def rules(self) -> list[WordEnds]:
        return [rule for rule in (self.decider, self.rule) if isinstance(rule, WordEnds)]


def _finite(threshold: Tensor) -> Tensor:
    """Finite, so that the infinite scores of tokens that are always active exceed it."""
    return threshold.clamp(max=torch.finfo(threshold.dtype).max)
