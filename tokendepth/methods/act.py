"""Adaptive computation time (Graves 2016) on a shared block: the adaptive Universal Transformer (Dehghani et al. 2019).

    s^n = S(s^{n-1} + e_n),     h^n = sigmoid(W s^n + b),     b = 1 at first
    N = min {n : sum_{i<=n} h^i >= 1 - epsilon},  at most `max_steps`;       R = 1 - sum_{i<N} h^i
    p^n = h^n for n < N,   p^N = R;      s = sum_n p^n s^n;      loss = task + tau * mean(N + R)

The same block S is applied repeatedly, with a learned signal e_n for each step. The output is the exact weighted sum,
whose weights add up to 1. The gradient treats N as a constant, so the ponder cost N + R has gradient -1 with respect to
every h before the last. Halted positions are frozen: they are not transformed any more, and the others keep attending
to the state they halted with, through the block's key and value projections at each step.

The Universal Transformer adds positions at every step, together with the step's signal. Rotary positions act at every
step here, too; learned positions are added once, to the embedding. This is a deviation, kept so that saved models do
not change.
Left open by the sources and decided here: the block is this project's pre-norm block; h reads the state after the step,
as in Graves (other public code reads it before). `max_steps` defaults to the model's number of layers, so that the cost
at full depth is the same. Soft execution equals hard: every step is computed for every token; sparse execution computes
only running tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tokendepth.config import ACTConfig, ModelConfig
from tokendepth.context import Context, Rows
from tokendepth.layers.routers import HaltingUnit
from tokendepth.methods.base import Method
from tokendepth.model import Block, MethodOutput
from tokendepth.ops.gated_add import gated_add
from tokendepth.trace import Site


class ACT(Method):
    has_soft = False
    decides_by_threshold = False
    skips_on_device = True

    def __init__(self, model: ModelConfig, config: ACTConfig) -> None:
        super().__init__(model, config)
        self.epsilon, self.ponder_cost = config.epsilon, config.ponder_cost
        self.steps = config.max_steps or model.n_layer
        self.block = Block(model, 0)
        self.signal = nn.Embedding(self.steps, model.d_model)
        nn.init.normal_(self.signal.weight, std=0.02)
        self.halting = HaltingUnit(model.d_model) if self.steps > 1 else None
        if self.halting is not None:
            nn.init.constant_(self.halting.logit.bias, 1.0)  # halts early at first

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        running = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        left = running.float()  # 1 - sum of the weights so far
        output, remainder, work = torch.zeros_like(hidden), torch.zeros_like(left), []
        for step in range(self.steps):
            hidden = self._step(step, hidden, ctx, running)
            work.append(running)
            weight, goes_on, again = left, torch.zeros_like(running), torch.zeros_like(running)
            if self.halting is not None and step < self.steps - 1:
                h = torch.sigmoid(self.halting(hidden))
                goes_on, again = self._goes_on(step, running, left - h, ctx)
                # The halting rule keeps h below what is left; given decisions may not.
                weight = torch.where(again, torch.minimum(h, left), left)
            remainder = remainder + left * (running & ~again)
            weight = weight * running
            output, left = gated_add(output, hidden, gate=weight), left - weight
            running = goes_on
        trace = self.traced(work, ctx)
        ponder = ctx.mean(trace.work.sum(0) + remainder)
        return MethodOutput(output, trace, {"ponder": self.ponder_cost * ponder})

    def _step(self, step: int, hidden: Tensor, ctx: Context, running: Tensor) -> Tensor:
        """S for the running tokens. Halted tokens keep their state, and others still attend to it."""
        signalled = hidden + self.signal.weight[step]
        rows = Rows(running) if ctx.execution == "sparse" else None  # otherwise torch.where below selects
        stepped = self.block(signalled, replace(ctx, layer=step), rows)
        return torch.where(running[..., None], stepped, hidden)

    def _goes_on(self, step: int, running: Tensor, left: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Which tokens run the next step, and which run any later one; they differ only if decisions are given."""
        own = running & (left > self.epsilon)
        later = ctx.real(own[None] if ctx.decisions is None else ctx.decisions[step:])
        return later[0], later.any(0)

    def sites(self, keys: int) -> tuple[Site, ...]:
        decision = self.halting.flops if self.halting else 0
        return tuple(
            self.block.site(f"step {n + 1}", keys, routed=n > 0, router=decision if n else 0) for n in range(self.steps)
        )

    @property
    def cache_layers(self) -> int:
        return self.steps

    def routers(self) -> list[nn.Module]:
        return [self.halting] if self.halting else []
