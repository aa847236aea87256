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

`budget` is the share of tokens that take the span. In training tau is the quantile of the batch's scores; in evaluation
it is a fixed number, calibrated on training text, so that a decision depends only on the token and its past. Training
needs shapes known beforehand: each sequence has `ROOM` times its share of rows; if they do not suffice, the tokens with
the lowest scores skip.

Left open and decided here: given thresholds, which may encode decisions, also hold for the first token. A score weights
updates by sigmoid(s) unless they are smoothed, which already weights them. On a GPU tokens are packed only if `room` is
given or the span has another width; otherwise each block works on listed rows, as in Mixture-of-Depths.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import ModelConfig, SpanConfig
from tokendepth.context import Context, Rows
from tokendepth.layers.exact_buffers import ExactBuffers
from tokendepth.layers.ffn import initialise_residual
from tokendepth.layers.linear import Linear
from tokendepth.layers.norm import without_scale
from tokendepth.methods.base import Dial, Method, annealed, blocks_of, divergence, everyone, through
from tokendepth.methods.budget import CURVE, gain_target, quantile, threshold_for
from tokendepth.methods.mod import Selected, among_site
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
from tokendepth.model import Block, MethodOutput
from tokendepth.ops.decide import Decision, decide
from tokendepth.ops.rows import ChosenRows, compact, first_places, last_active, put, put_active, take
from tokendepth.trace import Site

ROOM = 1.5
"""Rows per sequence in the span during training, as a multiple of its share of tokens."""


class Span(ExactBuffers, Method):
    has_soft = False
    one_decision = True
    skips_on_device = True
    draft_share = 0.0
    threshold: Tensor
    skipping: Tensor
    """The share of tokens that skip in training; with `anneal` it rises from 0."""
    told: Tensor
    """1 while word ends decide and teach the boundaries, then 0."""

    def __init__(self, model: ModelConfig, config: SpanConfig) -> None:
        super().__init__(model, config)
        self.knobs, self.span = config, config.blocks(model.n_layer)
        inner = config.inner(model)
        shapes = [inner if layer in self.span else model for layer in range(model.n_layer)]
        self.blocks = nn.ModuleList(Block(shape, layer) for layer, shape in enumerate(shapes))
        self.decider = make_decider(model, config)
        self.rule = WordEnds(model) if config.taught else None
        self.bypass = Bypass(model) if config.bypass else None
        self.enter = self.leave = None
        if config.width is not None:
            self.enter = Linear(model.d_model, config.width, bias=False)
            self.leave = Linear(config.width, model.d_model, bias=False)
            initialise_residual(self.leave, model.n_layer)
            self.skips_on_device = False  # rows are packed before they are mapped, so the host must know how many
        if config.replaced:
            _, replaced, _ = self._stages()
            for block in replaced:
                block.requires_grad_(False)
        self.packs = config.keys == "active" and not config.replaced
        self.decides_by_text = not self.decider.reads_states
        self.batch_statistic, self.wants_teacher = self.decider.statistic, config.gain == "teacher"
        self.register_buffer("threshold", torch.tensor(self.decider.threshold))
        self.register_buffer("skipping", torch.tensor(1 - config.budget), persistent=False)
        self.register_buffer("told", torch.tensor(0.0), persistent=False)
        self.set_progress(0.0)

    def warning(self, ids: Tensor) -> str | None:
        rule = self.decider if isinstance(self.decider, WordEnds) else self.rule
        return None if rule is None else rule.warning(ids, self.knobs.budget, self._room)

    @property
    def _room(self) -> float:
        """Rows per sequence in training, as a share of its tokens."""
        return 1.0 if self.knobs.anneal else min(1.0, ROOM * self.knobs.budget)

    def set_progress(self, done: float) -> None:
        self.told.fill_(float(done < self.knobs.taught))
        self.skipping.fill_((1 - self.knobs.budget) * annealed(done, self.knobs.anneal))

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        hidden, seen, score = self._scored(hidden, ctx)
        ends = self.rule(seen, ctx) if self.rule is not None and self.training else None
        ranked = self._ranked(score if ends is None else torch.where(self.told > 0, ends, score), ctx)
        passed_by = hidden if self.bypass is None else hidden + self.bypass(seen, hidden)
        fewer_keys, losses = None, {}
        if self.training:
            threshold = self._training_threshold(ranked, ctx)
            state, active = self._train(hidden, passed_by, ctx, ranked, score, threshold)
            losses = self._losses(hidden, passed_by, score, ends, ctx)
            hidden = state
        else:
            threshold = self._threshold(ctx)
            listing = hidden if ctx.execution == "sparse" else None  # kernels list active tokens once, for all blocks
            decision = decide(-ranked, threshold, ctx.valid, states=listing)
            active = decision.active
            hidden, fewer_keys = self._execute(hidden, passed_by, ctx, decision, score, threshold)
        hidden, full = through(self._stages()[2], hidden, ctx), everyone(hidden)
        work = [active if n in self.span else full for n in range(len(self.blocks))]
        return MethodOutput(hidden, replace(self.traced(work, ctx), fewer_keys=fewer_keys), losses)

    def until_decided(self, hidden: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        state, _, score = self._scored(hidden, ctx)
        return state, score, None if self.decides_by_text else self._active_count(score, ctx)

    def active_count_by_text(self, ctx: Context) -> Tensor:
        return self._active_count(self.decider(ctx.ids, ctx), ctx)

    def _active_count(self, score: Tensor, ctx: Context) -> Tensor:
        return decide(-self._ranked(score, ctx), self._threshold(ctx), ctx.valid).active.sum()

    def _threshold(self, ctx: Context) -> Tensor | float:
        return ctx.thresholds([self.threshold] * len(self.span))[0]

    def _scored(self, hidden: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """States at the entry of the span, what the decider reads of them, and their scores."""
        before, _, _ = self._stages()
        hidden = through(before, hidden, ctx) if ctx.scored is None else ctx.scored[0]
        seen = hidden if self.decides_by_text and self.bypass is None else self._seen(hidden)
        return hidden, seen, self.decider(seen, ctx) if ctx.scored is None else ctx.scored[1]

    def _stages(self) -> tuple[list[Block], list[Block], list[Block]]:
        blocks, begin, end = blocks_of(self.blocks), self.span.start, self.span.stop
        return blocks[:begin], blocks[begin:end], blocks[end:]

    def _taken(self, states: Tensor, ctx: Context, rows: Rows | None = None) -> Tensor:
        """`states` after the span, which the tokens of `rows` take (None: all). Sparse execution may overwrite them."""
        (_, blocks, _), keys = self._stages(), "all" if rows is None else self.knobs.keys
        if self.enter is None or self.leave is None:
            return through(blocks, states, ctx, rows, keys)
        inner = self.enter(states).to(states.dtype)  # autocast rounds products, but not states
        return states + self.leave(through(blocks, ctx.spare(inner), ctx, rows, keys) - inner)

    def _seen(self, hidden: Tensor) -> Tensor:
        """What decider and bypass read."""
        _, (first, *_), _ = self._stages()
        return without_scale(first.norm_attention, hidden)

    def _ranked(self, score: Tensor, ctx: Context) -> Tensor:
        """What is compared with the threshold; if updates are carried, a sequence's first token is above any."""
        if self.knobs.carry == "none":
            return score.detach()
        assert ctx.positions is not None
        return torch.where(ctx.positions == 0, torch.inf, score.detach())

    def _bypassed(self, state: Tensor, passed_by: Tensor, active: Tensor) -> Tensor:
        return state if self.bypass is None else torch.where(active[..., None], state, passed_by)

    # -- evaluation

    def _execute(
        self,
        hidden: Tensor,
        passed_by: Tensor,
        ctx: Context,
        decision: Decision,
        score: Tensor,
        threshold: Tensor | float,
    ) -> tuple[Tensor, Tensor | None]:
        """The states after the span and, if it was packed, how many fewer keys were attended to."""
        (_, (first, *_), _), active = self._stages(), decision.active
        passing = Passing(self.knobs.carry, self.decider, active, score, threshold, ctx)
        if self.knobs.keys == "active":
            count = active.sum(1)
            earlier = torch.zeros_like(count) if ctx.cache is None else ctx.cache.state("span length", like=count[0])
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
                rows = self._taken(taken, inside)  # library calls do not overwrite `taken`
                if self.knobs.carry == "last" and ctx.cache is None:  # one gather; carry_on needs log2(time) passes
                    updates, weight = rows - taken, self.decider.weight(score)
                    updates = updates if weight is None else take(weight[..., None].to(rows.dtype), places) * updates
                    return hidden + last_active(updates, active), fewer_keys
                state = put_active(hidden, active, rows) if room else put(hidden, places, rows)
                return passing.updated(hidden, self._bypassed(state, passed_by, active)), fewer_keys
        state = self._taken(ctx.spare(hidden), ctx, Rows(active, decision))
        return passing.updated(hidden, self._bypassed(state, passed_by, active)), None

    @torch.no_grad()
    def calibrate(self, parts: list[Tensor], ctx: Context, share: float) -> Tensor:
        ranked = torch.cat([self._ranked(self._scored(part, ctx)[-1], ctx) for part in parts])
        self.threshold.copy_(_finite(threshold_for(ranked, share)))
        return (ranked > self.threshold).float().mean(1)

    @torch.no_grad()
    def fit(self, parts: Iterable[Tensor], ctx: Context) -> None:
        if self.bypass is None:
            return

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for part in parts:
                hidden = through(self._stages()[0], part, ctx)
                update = self._taken(hidden, ctx) - hidden
                yield self._seen(hidden).flatten(0, 1), (update / rms(hidden)).flatten(0, 1)

        self.bypass.fit(pairs())

    # -- training

    def _training_threshold(self, ranked: Tensor, ctx: Context) -> Tensor | float:
        if self.decider.statistic == QUANTILE:
            return _finite(quantile(ranked, self.skipping.view(1, 1), ctx.valid))
        return self.skipping if isinstance(self.decider, Dice) else self.decider.threshold

    def _train(
        self, hidden: Tensor, passed_by: Tensor, ctx: Context, ranked: Tensor, score: Tensor, threshold: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """The states after the span, and which tokens were active."""
        _, blocks, _ = self._stages()
        if self.knobs.replaced:
            return passed_by, torch.zeros_like(ranked, dtype=torch.bool)
        chosen = Selected.above(ranked, threshold, self._room, ctx.valid)
        active = chosen.as_mask(ranked).bool()
        passing = Passing(self.knobs.carry, self.decider, active, score, threshold, ctx)
        if self.knobs.keys == "active":
            # Active tokens come first, so causal attention already hides the filler behind them.
            taken = chosen.take(hidden)
            rows = self._taken(taken, replace(chosen.context(ctx), valid=None))
            if self.knobs.carry != "none":
                return passing.updated_by_rows(hidden, rows - taken, chosen.places), active
            state = chosen.put(hidden, rows)
        else:
            batch, time = active.shape
            places = (chosen.places + time * torch.arange(batch, device=active.device)[:, None]).flatten()
            packed, state = Rows(active, chosen=ChosenRows.at(places, batch * time)), hidden
            for block in blocks:
                state = block(state, ctx, packed, gate=active.to(hidden.dtype))
        return passing.updated(hidden, self._bypassed(state, passed_by, active)), active

    def _losses(
        self, hidden: Tensor, passed_by: Tensor, score: Tensor, ends: Tensor | None, ctx: Context
    ) -> dict[str, Tensor]:
        losses = self._decider_losses(hidden, passed_by, score, ctx)
        if ends is not None:
            losses["taught"] = self.told * taught_loss(score, ends, ctx)
        if self.knobs.draft and ctx.targets is not None:
            losses["draft"] = self.knobs.draft * self._draft_loss(hidden, passed_by, ctx.targets, ctx)
        return losses

    def _draft_loss(self, hidden: Tensor, passed_by: Tensor, targets: Tensor, ctx: Context) -> Tensor:
        """The divergence of predictions that skip the span from those that take it, which get no gradient.

        Half of the tokens skip at a time, since in a draft, too, tokens that skip attend to others that did not.
        """
        assert ctx.readout is not None
        _, _, after = self._stages()
        with torch.no_grad():
            taken = self._taken(hidden, ctx)
            full = ctx.readout(through(after, taken, ctx))
        skips = torch.rand(hidden.shape[:2], device=hidden.device) < 0.5
        drafted = ctx.readout(through(after, torch.where(skips[..., None], passed_by, taken), ctx))
        counted = skips & (targets >= 0)
        return (divergence(full, drafted) * counted).sum() / counted.sum().clamp(min=1)

    def _decider_losses(self, hidden: Tensor, passed_by: Tensor, score: Tensor, ctx: Context) -> dict[str, Tensor]:
        knobs = self.knobs
        if isinstance(self.decider, Boundary) and knobs.ratio_loss:
            ratio = ratio_loss(score, score > self.decider.threshold, knobs.budget, ctx)
            return {"ratio": knobs.ratio_loss * ratio * (1 - self.told)}
        if ctx.targets is None or not isinstance(self.decider, Gain | Entropy):
            return {}
        counted = ctx.targets >= 0  # positions with a loss
        if isinstance(self.decider, Gain):
            errors = (score - gain_target(self._skipping_costs(hidden, passed_by, ctx))).square()
        else:
            predicted = self.decider.predict(self._seen(hidden))
            errors = -predicted.gather(2, ctx.targets.clamp(min=0)[..., None])[..., 0]
        return {knobs.decide: (errors * counted).sum() / counted.sum().clamp(min=1)}

    @torch.no_grad()
    def _skipping_costs(self, hidden: Tensor, passed_by: Tensor, ctx: Context) -> Tensor:
        """`[batch, time]`: the cost for each token if no token takes the span.

        The increase in loss relative to a forward pass in which all do, or the divergence from it or from the teacher.
        """
        readout, targets = ctx.readout, ctx.targets
        assert readout is not None
        assert targets is not None
        _, _, after = self._stages()

        def read(state: Tensor) -> Tensor:
            return readout(through(after, state, ctx)).float()

        def loss(logits: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

        skipped = read(passed_by)
        if self.knobs.gain == "teacher" and ctx.teacher is not None:
            return divergence(ctx.teacher, skipped)
        taken = read(self._taken(hidden, ctx))
        return loss(skipped) - loss(taken) if self.knobs.gain == "loss" else divergence(taken, skipped)

    # -- sites, routers and operating points

    def sites(self, keys: int) -> tuple[Site, ...]:
        sites = []
        for n, block in enumerate(blocks_of(self.blocks)):
            name, router = f"block {n}", self._entry_flops if n == self.span.start else 0
            if n not in self.span:
                sites.append(block.site(name, keys, routed=False))
            elif self.knobs.keys == "all":
                sites.append(block.site(name, keys, routed=True, router=router))
            else:
                site = among_site(block, name, keys, router=router)
                mapped = self._width_flops if n == self.span.start else 0
                sites.append(replace(site, active=site.active + mapped, per_key=block.attention.key_flops))
        return tuple(sites)

    @property
    def _entry_flops(self) -> int:
        """Per token, before the span: the decider, and the bypass, computed for every token since that is no slower."""
        return self.decider.flops + (0 if self.bypass is None else self.bypass.flops)

    @property
    def _width_flops(self) -> int:
        """Per active token: into the span's width, and back."""
        return 2 * sum(part.weight.numel() for part in (self.enter, self.leave) if part is not None)

    def routers(self) -> list[nn.Module]:
        return self.decider.routers()

    def additions(self) -> list[nn.Module]:
        return [*self.routers(), *([] if self.bypass is None else [self.bypass])]

    def read_vocabulary(self, spellings: Sequence[bytes]) -> None:
        for rule in (self.decider, self.rule):
            if isinstance(rule, WordEnds):
                rule.read_vocabulary(spellings)

    @classmethod
    def dial(cls, model: ModelConfig, config: SpanConfig) -> Dial | None:
        if config.decide in ("rule", "dice"):
            return None
        return Dial("budget", CURVE, config.budget, calibrated=True, trained=False)

    def live_thresholds(self) -> Tensor:
        return self.threshold.expand(len(self.span))

    def set_thresholds(self, values: list[float]) -> None:
        self.threshold.fill_(values[0])


def _finite(threshold: Tensor) -> Tensor:
    """Finite, so that the infinite scores of tokens that are always active exceed it."""
    return threshold.clamp(max=torch.finfo(threshold.dtype).max)
