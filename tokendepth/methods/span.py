"""Span routing: one decision per token for several adjacent blocks. Ours, after Mixture-of-Depths and H-Net.

    active_t = s_t > tau,   u = f_n(... f_1(H~)) - H~,   h_t <- h_t + c_t

The score s_t is the decider's (`span_deciders.py`). H~ are the active tokens of a sequence in their order and at their
true positions: the blocks f_1 to f_n take them as a shorter sequence, gathered once and scattered once, and a token
that skips the span leaves no keys and values in it (`keys` active). With `keys` all, everybody's are projected in every
block, as a model that was trained without a span needs it; then rows are gathered in each block. Blocks of a `width` of
their own have a linear map before and after them, which only active tokens take, and the heads of the other blocks:
u = leave(f_n(... f_1(enter(H~))) - enter(H~)).

What a token gets of the updates, c_t, by `carry`: none, its own, or nothing where it skipped; last, the one of the last
active token; smooth, z of that token, with z_t = p_t u_t + (1 - p_t) z_{t-1} over active tokens, p_1 = 1 and p the
decider's. Where updates are carried the first token of a sequence is always active. With a `bypass`, a token that skips
takes a linear map instead, h <- h + rms(h) W norm(h), after the span: keys and values that its blocks project of such a
token are of the state with which it came.

`budget` names the share of tokens that take the span. While training tau is the batch's own quantile; in use it is one
number, calibrated on training text, so that a decision depends on the token's past alone. Training needs shapes that
are known beforehand: each sequence has `ROOM` times its share of rows, and the lowest scores that find none skip.

Left open and decided here: given thresholds, such as decisions to be obeyed, hold for the first token too. A score
weighs updates by sigmoid(s) unless they are smoothed, which weighs them already. On a GPU tokens are packed only where
`room` is given or blocks have another width: else each block works on listed rows, as in Mixture-of-Depths.
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
"""Rows that a sequence has in the span while training, as a multiple of its share of tokens."""


class Span(ExactBuffers, Method):
    has_soft = False
    one_decision = True
    skips_on_device = True
    draft_share = 0.0
    threshold: Tensor
    skipping: Tensor
    """The share of tokens that skips while training; with `anneal` it rises from 0."""
    told: Tensor
    """1 while the ends of words decide and boundaries are taught by them, then 0."""

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
            self.skips_on_device = False  # rows are packed before they are mapped, and the host must know how many
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
            listing = hidden if ctx.execution == "sparse" else None  # for kernels: once for all blocks
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
        """States of tokens that come to the span, what the decider sees of them, and their scores."""
        before, _, _ = self._stages()
        hidden = through(before, hidden, ctx) if ctx.scored is None else ctx.scored[0]
        seen = hidden if self.decides_by_text and self.bypass is None else self._seen(hidden)
        return hidden, seen, self.decider(seen, ctx) if ctx.scored is None else ctx.scored[1]

    def _stages(self) -> tuple[list[Block], list[Block], list[Block]]:
        blocks, begin, end = blocks_of(self.blocks), self.span.start, self.span.stop
        return blocks[:begin], blocks[begin:end], blocks[end:]

    def _taken(self, states: Tensor, ctx: Context, rows: Rows | None = None) -> Tensor:
        """`states` after the span, of the tokens of `rows` (None: all). Sparse execution may overwrite them."""
        (_, blocks, _), keys = self._stages(), "all" if rows is None else self.knobs.keys
        if self.enter is None or self.leave is None:
            return through(blocks, states, ctx, rows, keys)
        inner = self.enter(states).to(states.dtype)  # under autocast a product is rounded, and states are not
        return states + self.leave(through(blocks, ctx.spare(inner), ctx, rows, keys) - inner)

    def _seen(self, hidden: Tensor) -> Tensor:
        """What decider and bypass read."""
        _, (first, *_), _ = self._stages()
        return without_scale(first.norm_attention, hidden)

    def _ranked(self, score: Tensor, ctx: Context) -> Tensor:
        """What is compared with the threshold: a sequence's first token is above any where updates are carried."""
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
        """The states after the span; and how many keys fewer were attended over, if it was packed."""
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
                rows = self._taken(taken, inside)  # library calls overwrite nothing
                if self.knobs.carry == "last" and ctx.cache is None:  # without a pass over all tokens for each doubling
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
        """The states after the span, and who was active."""
        _, blocks, _ = self._stages()
        if self.knobs.replaced:
            return passed_by, torch.zeros_like(ranked, dtype=torch.bool)
        chosen = Selected.above(ranked, threshold, 1.0 if self.knobs.anneal else ROOM * self.knobs.budget, ctx.valid)
        active = chosen.as_mask(ranked).bool()
        passing = Passing(self.knobs.carry, self.decider, active, score, threshold, ctx)
        if self.knobs.keys == "active":
            # The active ones stand first, so that causal attention alone keeps from them what fills up the rows.
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
        """The divergence of tokens that skip the span from what they predict with it, which is left as it is.

        Half of the tokens skip at a time: in a draft, too, tokens that skip attend over others that did not.
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
        counted = ctx.targets >= 0  # elsewhere no loss is taken
        if isinstance(self.decider, Gain):
            errors = (score - gain_target(self._skipping_costs(hidden, passed_by, ctx))).square()
        else:
            predicted = self.decider.predict(self._seen(hidden))
            errors = -predicted.gather(2, ctx.targets.clamp(min=0)[..., None])[..., 0]
        return {knobs.decide: (errors * counted).sum() / counted.sum().clamp(min=1)}

    @torch.no_grad()
    def _skipping_costs(self, hidden: Tensor, passed_by: Tensor, ctx: Context) -> Tensor:
        """`[batch, time]`: what it costs each token that no token takes the span.

        In loss against a pass in which all do, or in divergence from it or from the teacher.
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

    # -- what others ask

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
        """Of one token, before the span: it decides, and takes the bypass, for every token since that is no slower."""
        return self.decider.flops + (0 if self.bypass is None else self.bypass.flops)

    @property
    def _width_flops(self) -> int:
        """Of one active token: into the width of the span, and back."""
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
    """Below infinity, so that tokens that are always active exceed it."""
    return threshold.clamp(max=torch.finfo(threshold.dtype).max)
