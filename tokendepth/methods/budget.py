"""Budget routing: TSA's router, trained so that the decision is a decision.

    s_l = -r_l(norm(h)),   active_l = s_l > tau_l,   h <- h + active_l * sigmoid(s_l) * f_{l+1}(h)

`budget` names the share of tokens that each routed block works on. While training, tau is the batch's own quantile, so
the budget is held at every step and a skipped token is skipped: what the model learns is what will be executed. In
evaluation tau is a fixed number per block, calibrated on training text, so a decision depends on its own token's past
and on nothing else. Three things make it work (docs/LOG.md has what did not):

- The router reads the normalised state; on the raw one it first has to learn how long the states of its layer are.
- `dial`: every sequence draws a budget of its own, so that one model serves them all.
- `distill`: every sequence also passes at full budget, and the pass at its own budget is drawn to what that predicts.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import BudgetConfig, ModelConfig
from tokendepth.methods.base import Method
from tokendepth.methods.tsa import Router
from tokendepth.model import Block, Pass, Spent, block_site
from tokendepth.ops.choose import choose
from tokendepth.ops.chosen_rows import ChosenRows, take
from tokendepth.ops.enter_block import Entered
from tokendepth.trace import DepthTrace, Site

SMALLEST_DRAW = 0.15
"""Below the smallest budget that the dial promises, so that it is not at the edge of what was trained."""


class BudgetBlock(Block):
    """A block, the router that guards it, and the score above which a token is active."""

    threshold: Tensor

    def __init__(self, model: ModelConfig, layer: int, config: BudgetConfig) -> None:
        super().__init__(model, layer)
        self.router = Router(model.d_model) if config.routing == "learned" else None
        self.register_buffer("threshold", torch.tensor(0.0 if self.router else 1 - config.budget))

    def _apply(self, fn, recurse=True):
        """As every module does it, but the threshold keeps its precision: rounded, it would let others in."""
        exact = self.threshold
        super()._apply(fn, recurse)
        if self.threshold.dtype != exact.dtype:
            self.threshold = exact.to(self.threshold.device)
        return self

    def enter_and_ask(self, hidden: Tensor) -> Entered:
        return self.enter(hidden, self.router and self.router.weights(normed=True))

    def halt(self, hidden: Tensor, dice: Callable[[], Tensor], entered: Entered | None = None) -> Tensor:
        """`[batch, time]`, the lower the sooner active."""
        if self.router is None:
            return -dice()
        return self.router(F.layer_norm(hidden, hidden.shape[-1:])) if entered is None else entered.logit

    def weight(self, halt: Tensor) -> Tensor:
        """What an active token keeps of its updates: the router's only way to learn what its decisions are worth."""
        return torch.ones_like(halt) if self.router is None else torch.sigmoid(-halt)


class Budget(Method):
    has_soft = False
    skips_on_device = True

    def __init__(self, model: ModelConfig, config: BudgetConfig) -> None:
        super().__init__(model, config)
        self.budget, self.dial, self.distill = config.budget, config.dial, config.distill
        routed = [BudgetBlock(model, layer, config) for layer in range(1, model.n_layer)]
        self.blocks = nn.ModuleList([Block(model, 0), *routed])

    def forward(self, hidden: Tensor, run: Pass) -> Spent:
        return self._train(hidden, run) if self.training else self._execute(hidden, run)

    # -- evaluation

    def _execute(self, hidden: Tensor, run: Pass) -> Spent:
        """With fixed thresholds. Soft is hard here: there is no execution in which a skipped token counts."""
        sites, entering = self.sites(run.keys(hidden.shape[1])), hidden
        stem = self.blocks[0]
        assert isinstance(stem, Block)
        hidden = stem.forward_all(hidden, run) if self.routers() else stem(hidden, run)  # dice need what enters
        work = [torch.ones(hidden.shape[:2], device=hidden.device)]
        routed = self._routed()
        for number, (block, given) in enumerate(
            zip(routed, run.thresholds([b.threshold for b in routed]), strict=True)
        ):
            entered = block.enter_and_ask(hidden) if run.execution == "sparse" else None
            halt = block.halt(hidden, partial(_dice, entering, number), entered)
            if entered is not None:
                gate = halt if block.router else None
                hidden, active = block.forward_chosen(hidden, run, entered, halt, given, halt=gate)
            else:
                active, _ = choose(halt, given, run.valid)
                hidden = block(hidden, run, gate=block.weight(halt) * active)
            work.append(active.float())
        return Spent(hidden, DepthTrace(torch.stack(work), sites, run.execution), {})

    @torch.no_grad()
    def calibrate(self, parts: list[Tensor], share: float) -> Tensor:
        """Set the thresholds so that `share` of the tokens of `parts`, each `[batch, time, d]` and used up, is active.

        Block by block, since who is active in one decides what the next one sees. Returns how much of every sequence
        was active, over the routed blocks.
        """
        run, active = Pass("hard"), []
        entering = list(parts) if not self.routers() else parts  # what dice are thrown with
        for n, part in enumerate(parts):  # one in the place of the other: together they may fill a machine
            parts[n] = self.blocks[0](part, run)
        for number, block in enumerate(self._routed()):
            halts = [block.halt(p, partial(_dice, e, number)) for p, e in zip(parts, entering, strict=True)]
            block.threshold.copy_(_between(-torch.cat(halts), 1 - share))
            chosen = [choose(halt, block.threshold).active for halt in halts]
            active.append(torch.cat(chosen).float().mean(1))
            for n, part in enumerate(parts):
                parts[n] = block(part, run, gate=block.weight(halts[n]) * chosen[n])
        return torch.stack(active).mean(0) if active else torch.ones(sum(map(len, parts)))

    # -- training

    def _train(self, hidden: Tensor, run: Pass) -> Spent:
        sites, batch = self.sites(run.keys(hidden.shape[1])), len(hidden)
        budgets = self._draw(batch, hidden.device) if self.dial else None
        if self.distill:  # the same sequences once more, at full budget
            hidden = torch.cat([hidden, hidden])
        hidden = self.blocks[0](hidden, run)
        work = [torch.ones(batch, hidden.shape[1], device=hidden.device)]
        for block in self._routed():
            halt = block.halt(hidden, partial(torch.rand, hidden.shape[:2], device=hidden.device))
            own, weight = -halt[:batch].detach(), block.weight(halt)
            if budgets is None:
                full = torch.arange(own.numel(), halt.numel(), device=own.device)
                rows = ChosenRows.at(torch.cat([self._at_budget(own), full]), halt.numel())
                active = rows.chosen[: own.numel()].view_as(own).float()
                hidden = block.forward_rows(hidden, run, rows, take(weight.flatten(), rows))
            else:
                active = (own > _quantile(own, 1 - budgets)).float()
                hidden = block(hidden, run, gate=torch.cat([active, torch.ones_like(halt[batch:])]) * weight)
            work.append(active)
        trace = DepthTrace(torch.stack(work), sites, run.execution)
        if not self.distill:
            return Spent(hidden, trace, {})
        assert run.readout is not None
        logits, full_logits = run.readout(hidden).split(batch)
        return Spent(hidden[:batch], trace, self._full_budget_losses(logits, full_logits, run.targets), logits)

    def _at_budget(self, scores: Tensor) -> Tensor:
        """The tokens above the batch's quantile: always as many, so that training can skip the others."""
        count = scores.numel() - round((1 - self.budget) * scores.numel())
        return scores.flatten().argsort(descending=True, stable=True)[:count]

    def _draw(self, batch: int, device: torch.device) -> Tensor:
        """The budget of each sequence, `[batch, 1]`: small ones more often, since they are harder."""
        return SMALLEST_DRAW + (1 - SMALLEST_DRAW) * torch.rand(batch, 1, device=device) ** 2

    def _full_budget_losses(self, logits: Tensor, full_logits: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
        """The pass at full budget learns the task, and the other learns from it."""
        own, full = (F.log_softmax(x.flatten(0, 1).float(), dim=-1) for x in (logits, full_logits))
        divergence = F.kl_div(own, full.detach(), log_target=True, reduction="none").sum(-1)
        if targets is None:
            return {"distillation": self.distill * divergence.mean()}
        counted = (targets.flatten() >= 0).float()  # elsewhere no loss is taken
        distillation = self.distill * (divergence * counted).sum() / counted.sum()
        return {"distillation": distillation, "full_budget": F.nll_loss(full, targets.flatten())}

    # -- what others ask

    def sites(self, keys: int) -> tuple[Site, ...]:
        stem = block_site(self.model, "block 0", keys, routed=False)
        router = sum(router.flops for router in self.routers()[:1])
        layers = range(1, self.model.n_layer)
        return (stem, *(block_site(self.model, f"block {n}", keys, routed=True, router=router) for n in layers))

    def routers(self) -> list[Router]:
        return [block.router for block in self._routed() if block.router]

    def live_thresholds(self) -> Tensor | None:
        own = [block.threshold for block in self._routed()]
        return torch.stack(own) if own else None

    @property
    def thresholds(self) -> list[float]:
        return [float(block.threshold) for block in self._routed()]

    @thresholds.setter
    def thresholds(self, values: list[float]) -> None:
        for block, value in zip(self._routed(), values, strict=True):
            block.threshold.fill_(value)

    def _routed(self) -> list[BudgetBlock]:
        return [block for block in self.blocks if isinstance(block, BudgetBlock)]


def _quantile(scores: Tensor, level: float | Tensor) -> Tensor:
    """The number that the share `level` of all `scores` does not exceed; `level` may be a column, one a sequence."""
    ordered = scores.flatten().sort().values
    below = (torch.as_tensor(level, device=scores.device) * len(ordered)).round().long()
    bounded = torch.cat([ordered[:1] - 1, ordered])  # at level 0 every score is above
    return bounded[below.clamp(0, len(ordered))]


def _between(scores: Tensor, level: float) -> Tensor:
    """As `_quantile`, but midway to the next score: no token is so near that another rounding decides about it."""
    lower = _quantile(scores, level)
    upper = torch.where(scores > lower, scores, torch.inf).min()
    middle = torch.where(upper.isinf(), lower, (lower + upper) / 2)
    return torch.where(middle < upper, middle, lower)  # neighbours among the numbers have no middle


def _dice(entering: Tensor, decision: int) -> Tensor:
    """Pseudo-random numbers in [0, 1) that say nothing of use, yet are the same however the sequence is batched."""
    digits = entering[..., decision % entering.shape[-1]].float().abs() * 1e4
    return digits - digits.floor()
