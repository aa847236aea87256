"""Budget routing: TSA's router, trained with the hard decisions that are executed later.

    s_l = -r_l(norm(h)),   active_l = s_l > tau_l,   h <- h + active_l * sigmoid(s_l) * f_{l+1}(h)

`budget` is the share of tokens that each routed block processes. In training, tau is the quantile of the batch's
scores, so the budget is met at every step and skipped tokens really are skipped: training matches execution. In
evaluation tau is a fixed number per block, calibrated on training text, so a decision depends only on the token and its
past. Three things make it work (docs/LOG.md lists what did not):

- The router reads the normalised state; from the raw one it would first have to learn the norms of its layer's states.
- `dial`: every sequence draws its own budget, so that one model serves all budgets.
- `distill`: every sequence also gets a forward pass at full budget, whose predictions are the target at its own budget.

Weighting the updates ruins a model that was trained without weights. For such a model, `learn` leaves active tokens
unweighted, so that with every token active the model is unchanged. `straight`: the decision gets the gradient of the
weight. `update`: the router is trained to predict how much the block changes a token, |f(h)| / |h|.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import BudgetConfig, ModelConfig
from tokendepth.context import Context, Rows
from tokendepth.layers.exact_buffers import ExactBuffers
from tokendepth.layers.norm import without_scale
from tokendepth.layers.routers import Router
from tokendepth.methods.base import Dial, Method, annealed, blocks_of, everyone
from tokendepth.model import Block, MethodOutput
from tokendepth.ops.decide import decide
from tokendepth.ops.rows import ChosenRows
from tokendepth.trace import Site

CURVE = (0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
GOLDEN_RATIO = 0.6180339887
"""The fractional parts of its multiples spread evenly over [0, 1)."""
SMALLEST_DRAW = 0.15
"""Below the smallest budget of the dial, so that no budget is at the edge of the trained range."""


class BudgetBlock(ExactBuffers, Block):
    """A block, its router, and the score above which a token is active."""

    threshold: Tensor

    def __init__(self, model: ModelConfig, layer: int, config: BudgetConfig) -> None:
        super().__init__(model, layer)
        self.router = Router(model.d_model) if config.routing == "learned" else None
        self.weighs = self.router is not None and config.learn == "weight"
        self.register_buffer("threshold", torch.tensor(0.0 if self.router else 1 - config.budget))

    def halt(self, hidden: Tensor) -> Tensor:
        """`[batch, time]`: halting logits; the lowest become active first."""
        assert self.router is not None
        return self.router(without_scale(self.norm_attention, hidden))

    def pick(self, hidden: Tensor, ctx: Context, threshold: Tensor | float, dice: Tensor | None) -> Rows:
        """The active tokens, chosen by the router or, without one, by the random numbers `dice` `[batch, time]`."""
        if self.router is not None:
            return self.decide(hidden, ctx, self.router, threshold, normed=True)
        assert dice is not None
        return Rows(decide(-dice, threshold, ctx.valid).active)

    def execute(self, hidden: Tensor, ctx: Context, rows: Rows) -> Tensor:
        # With `learn` = weight the router learned by weighting the updates, so they are weighted here, too.
        return self(hidden, ctx, rows, gate=rows.keep if self.weighs else None)


class Budget(ExactBuffers, Method):
    has_soft = False
    skips_on_device = True
    batch_statistic = "the quantile of the routers' scores, which is the threshold while training"
    skipping: Tensor
    """`[routed block]`: the share of tokens that skip in training; with `anneal` it rises from 0."""

    def __init__(self, model: ModelConfig, config: BudgetConfig) -> None:
        super().__init__(model, config)
        self.knobs, self.budget, self.draws, self.distill = config, config.budget, config.dial, config.distill
        self.learned = config.routing == "learned"
        routed = [BudgetBlock(model, layer, config) for layer in range(1, model.n_layer)]
        self.blocks = nn.ModuleList([Block(model, 0), *routed])
        self.shares = self.shares_at(config.budget)
        self.register_buffer("skipping", 1 - torch.tensor(self.shares), persistent=False)
        self.set_progress(0.0)

    def shares_at(self, budget: float) -> list[float]:
        """The share of active tokens in each routed block."""
        profile = self.knobs.profile
        return spread(profile, budget) if profile else [budget] * len(self._routed())

    def set_progress(self, done: float) -> None:
        wanted = 1 - torch.tensor(self.shares)
        self.skipping.copy_(wanted * annealed(done, self.knobs.anneal))

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        return self._train(hidden, ctx) if self.training else self._execute(hidden, ctx)

    # -- evaluation

    def _execute(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        """With fixed thresholds. Soft equals hard: skipped tokens contribute nothing."""
        entering = None if self.learned else ctx.spare(hidden)  # random decisions are derived from it
        hidden = self.blocks[0](hidden, ctx)
        work, routed = [everyone(hidden)], self._routed()
        thresholds = ctx.thresholds([block.threshold for block in routed])
        for number, (block, threshold) in enumerate(zip(routed, thresholds, strict=True)):
            rows = block.pick(hidden, ctx, threshold, None if entering is None else _dice(entering, number, ctx))
            hidden = block.execute(hidden, ctx, rows)
            work.append(rows.active)
        return MethodOutput(hidden, self.traced(work, ctx), {})

    @torch.no_grad()
    def calibrate(self, parts: list[Tensor], ctx: Context, share: float) -> Tensor:
        """Block by block, since decisions in one block change the input of the next."""
        active, shares = [], self.shares_at(share)
        entering = None if self.learned else list(parts)
        for n, part in enumerate(parts):  # in place: two copies may not fit in memory
            parts[n] = self.blocks[0](part, ctx)
        for number, block in enumerate(self._routed()):
            if entering is None:
                halts = [block.halt(part) for part in parts]
            else:
                halts = [-_dice(part, number, ctx) for part in entering]
            block.threshold.copy_(threshold_for(-torch.cat(halts), shares[number]))
            decisions = [decide(halt, block.threshold) for halt in halts]
            active.append(torch.cat([decision.active for decision in decisions]).float().mean(1))
            for n, decision in enumerate(decisions):
                parts[n] = block.execute(parts[n], ctx, Rows(decision.active, decision))
        return torch.stack(active) if active else torch.ones(sum(map(len, parts)))

    # -- training

    def _train(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        batch = len(hidden)
        budgets = self._draw(batch, hidden.device) if self.draws else None
        # Only if the number of active tokens is known beforehand and nothing is learned from the others.
        counted = budgets is None and self.knobs.learn == "weight" and not self.knobs.anneal
        if self.distill:  # the same sequences once more, at full budget
            hidden, passes = torch.cat([hidden, hidden]), ctx.twice()
        else:
            passes = ctx
        hidden = self.blocks[0](hidden, passes)
        work, errors = [torch.ones(batch, hidden.shape[1], device=hidden.device)], []
        for number, block in enumerate(self._routed()):
            if self.learned:
                halt = block.halt(hidden.detach() if self.knobs.learn == "update" else hidden)
                weight = torch.sigmoid(-halt)
            else:
                halt = -torch.rand(hidden.shape[:2], device=hidden.device)
                weight = torch.ones_like(halt)
            own = -halt[:batch].detach()
            if counted:
                own_rows, active = self._at_budget(own, ctx.valid, self.shares[number])
                full = torch.arange(own.numel(), halt.numel(), device=own.device)
                rows = ChosenRows.at(torch.cat([own_rows, full]), halt.numel())
                taken = rows.chosen.view(hidden.shape[:2])
                if ctx.valid is not None:  # rows beyond the real tokens' share change nothing
                    weight = weight * torch.cat([active, torch.ones_like(halt[batch:])])
                hidden = block(hidden, passes, Rows(taken, chosen=rows), gate=weight)
            else:
                level = self.skipping[number].view(1, 1) if budgets is None else 1 - budgets
                active = (own > quantile(own, level, ctx.valid)).float()
                active = active if ctx.valid is None else active * ctx.valid
                gate = torch.cat([active, torch.ones_like(halt[batch:])])
                if self.knobs.learn == "weight":
                    hidden = block(hidden, passes, gate=gate * weight)
                else:
                    new = block(hidden, passes)
                    if self.knobs.learn == "update":
                        errors.append(ctx.mean((-halt - _relative_update(hidden, new))[:batch].square()))
                        hidden = torch.where(gate[..., None] > 0, new, hidden)
                    else:
                        hidden = hidden + (gate + weight - weight.detach())[..., None].to(new.dtype) * (new - hidden)
            work.append(active)
        trace = self.traced(work, ctx)
        losses = {"update": torch.stack(errors).mean()} if errors else {}
        if not self.distill:
            return MethodOutput(hidden, trace, losses)
        assert ctx.readout is not None
        logits, full_logits = ctx.readout(hidden).split(batch)
        losses |= self._full_budget_losses(logits, full_logits, ctx)
        return MethodOutput(hidden[:batch], trace, losses, logits)

    def _at_budget(self, scores: Tensor, valid: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
        """The tokens above the batch's quantile: as a fixed number of places, and as a 0/1 mask `[batch, time]`.

        With padding there are more places than active tokens; tokens at the remaining places are inactive.
        """
        count = scores.numel() - round((1 - share) * scores.numel())
        if valid is not None:
            scores = torch.where(valid, scores, -torch.inf)
        places = scores.flatten().argsort(descending=True, stable=True)[:count]
        taken = torch.ones(count, device=scores.device)
        if valid is not None:
            real = valid.sum()
            taken = (torch.arange(count, device=scores.device) < real - ((1 - share) * real).round()).float()
        active = torch.zeros(scores.numel(), device=scores.device).scatter(0, places, taken)
        return places, active.view_as(scores)

    def _draw(self, batch: int, device: torch.device) -> Tensor:
        """A budget for each sequence, `[batch, 1]`; small ones are drawn more often, since they are harder."""
        return SMALLEST_DRAW + (1 - SMALLEST_DRAW) * torch.rand(batch, 1, device=device) ** 2

    def _full_budget_losses(self, logits: Tensor, full_logits: Tensor, ctx: Context) -> dict[str, Tensor]:
        """The pass at full budget learns the task, and the other is distilled from it."""
        own, full = (F.log_softmax(x.flatten(0, 1).float(), dim=-1) for x in (logits, full_logits))
        divergence = F.kl_div(own, full.detach(), log_target=True, reduction="none").sum(-1)
        if ctx.targets is None:
            return {"distillation": self.distill * ctx.mean(divergence.view(logits.shape[:2]))}
        counted = (ctx.targets.flatten() >= 0).float()  # positions with a loss
        count = counted.sum().clamp(min=1)
        distillation = self.distill * (divergence * counted).sum() / count
        task = F.nll_loss(full, ctx.targets.flatten(), reduction="sum") / count
        return {"distillation": distillation, "full_budget": task}

    # -- sites, routers and operating points

    def sites(self, keys: int) -> tuple[Site, ...]:
        router = sum(router.flops for router in self.routers()[:1])
        return tuple(
            block.site(f"block {n}", keys, routed=n > 0, router=router if n else 0)
            for n, block in enumerate(blocks_of(self.blocks))
        )

    def routers(self) -> list[Router]:
        return [block.router for block in self._routed() if block.router]

    @classmethod
    def dial(cls, model: ModelConfig, config: BudgetConfig) -> Dial:
        return Dial("budget", CURVE, config.budget, calibrated=True, trained=config.dial)

    def live_thresholds(self) -> Tensor | None:
        own = [block.threshold for block in self._routed()]
        return torch.stack(own) if own else None

    def set_thresholds(self, values: list[float]) -> None:
        for block, value in zip(self._routed(), values, strict=True):
            block.threshold.fill_(value)

    def _routed(self) -> list[BudgetBlock]:
        return [block for block in self.blocks if isinstance(block, BudgetBlock)]


# --- thresholds, for the methods that build on this one ---------------------------------------------------------------


def quantile(scores: Tensor, level: float | Tensor, valid: Tensor | None = None) -> Tensor:
    """The value that the share `level` of all `scores` does not exceed; `level` may be `[batch, 1]`, one per sequence.

    Scores that are not `valid` are ignored.
    """
    level, count = torch.as_tensor(level, device=scores.device), scores.numel()
    if valid is not None:
        scores, count = torch.where(valid, scores, torch.inf), valid.sum()
    ordered = scores.flatten().sort().values
    bounded = torch.cat([ordered[:1] - 1, ordered])  # at level 0, every score is above it
    return bounded[(level * count).round().long().clamp(0, len(ordered))]


def between(scores: Tensor, level: float) -> Tensor:
    """As `quantile`, but midway to the next higher score, so that rounding does not change decisions."""
    lower = quantile(scores, level)
    upper = torch.where(scores > lower, scores, torch.inf).min()
    middle = torch.where(upper.isinf(), lower, (lower + upper) / 2)
    return torch.where(middle < upper, middle, lower)  # adjacent floats have no number between them


def threshold_for(scores: Tensor, share: float) -> Tensor:
    """The threshold that `share` of the scores exceed; at share 1 below any score, in this text or another."""
    if share >= 1:
        return torch.full((), torch.finfo(scores.dtype).min, device=scores.device)
    return between(scores, 1 - share)


def spread(shares: list[float], budget: float) -> list[float]:
    """`shares` raised to the power for which their mean is `budget`; at full budget, 1 for all."""
    low, high = 0.0, 64.0
    for _ in range(60):
        power = (low + high) / 2
        too_many = sum(share**power for share in shares) / len(shares) > budget
        low, high = (power, high) if too_many else (low, power)
    return [1.0 if budget >= 1 else share**low for share in shares]


def gain_target(cost: Tensor) -> Tensor:
    """The cost of skipping a token, on a log scale, so that rare large costs do not dominate."""
    return cost.sign() * torch.log1p(10 * cost.abs())


@torch.no_grad()
def _relative_update(before: Tensor, after: Tensor) -> Tensor:
    """`[batch, time]`: how much a block changes each token, as the router's target."""
    before, after = before.float(), after.float()
    return gain_target((after - before).norm(dim=-1) / before.norm(dim=-1))


def _dice(entering: Tensor, decision: int, ctx: Context) -> Tensor:
    """Pseudo-random numbers in [0, 1) without useful signal, independent of how sequences are batched.

    They are digits of the embedded token. Rotary positions are not part of the embedding, so they are added here.
    """
    digits = entering[..., decision % entering.shape[-1]].float().abs() * 1e4
    if ctx.rotation is not None and ctx.positions is not None:
        digits = digits + ctx.positions * GOLDEN_RATIO
    return digits - digits.floor()
