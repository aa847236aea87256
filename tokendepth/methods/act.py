"""Adaptive computation time (Graves 2016) on a shared block: the adaptive Universal Transformer (Dehghani et al. 2019).

    s^n = S(s^{n-1} + e_n),     h^n = sigmoid(W s^n + b),     b = 1 at first
    N = min {n : sum_{i<=n} h^i >= 1 - epsilon},  at most `max_steps`;       R = 1 - sum_{i<N} h^i
    p^n = h^n for n < N,   p^N = R;      s = sum_n p^n s^n;      loss = task + tau * mean(N + R)

The same block S is applied again and again, told the number of the step by a learned signal e_n. The output is the true
weighted sum, whose weights add up to 1; N is a constant to the gradient, so that the ponder cost N + R falls by what
any h before the last one rises. Positions that have halted are frozen: they are not transformed any more, and the
others keep attending to the state they halted with, through the block's key and value projections at each step.

Left open by the sources and decided here: the block is the pre-norm one of this project; positions enter once, with the
embedding, and the residual stream carries them on; h reads the state after the step, as in Graves (the other public
reading is before it). `max_steps` is the model's number of layers unless set, so that at full depth it costs the same.
There is no softer execution than this one: hard computes every step for every token, sparse only the running ones.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tokendepth.config import ACTConfig, ModelConfig
from tokendepth.methods.base import Method
from tokendepth.model import Block, Pass, Spent, block_site
from tokendepth.ops.gated_add import gated_add
from tokendepth.trace import DepthTrace, Site


class HaltingUnit(nn.Module):
    """W s + b, before the sigmoid."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.logit = nn.Linear(d_model, 1)
        nn.init.constant_(self.logit.bias, 1.0)  # halts early at first

    def forward(self, state: Tensor) -> Tensor:
        """`[batch, time, d] -> [batch, time]`, in float32."""
        with torch.autocast(state.device.type, enabled=False):
            return self.logit(state.float()).squeeze(-1)


class ACT(Method):
    has_soft = False
    decides_by_threshold = False

    def __init__(self, model: ModelConfig, config: ACTConfig) -> None:
        super().__init__(model, config)
        self.epsilon, self.ponder_cost = config.epsilon, config.ponder_cost
        self.steps = config.max_steps or model.n_layer
        self.block = Block(model, 0)
        self.signal = nn.Embedding(self.steps, model.d_model)
        nn.init.normal_(self.signal.weight, std=0.02)
        self.halting = HaltingUnit(model.d_model) if self.steps > 1 else None

    def forward(self, hidden: Tensor, run: Pass) -> Spent:
        sites = self.sites(run.keys(hidden.shape[1]))
        running = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        left = running.float()  # 1 - sum of the weights so far
        output, remainder, work = torch.zeros_like(hidden), torch.zeros_like(left), []
        for step in range(self.steps):
            hidden = self._step(step, hidden, run, running)
            work.append(running.float())
            weight, goes_on, again = left, torch.zeros_like(running), torch.zeros_like(running)
            if self.halting is not None and step < self.steps - 1:
                h = torch.sigmoid(self.halting(hidden))
                goes_on, again = self._goes_on(step, running, left - h, run)
                # By its own rule h is below what is left; where decisions are given it may not be.
                weight = torch.where(again, torch.minimum(h, left), left)
            remainder = remainder + left * (running & ~again)
            weight = weight * running
            output, left = gated_add(output, hidden, gate=weight), left - weight
            running = goes_on
        trace = DepthTrace(torch.stack(work), sites, run.execution)
        ponder = trace.work.sum(0) + remainder
        ponder = ponder.mean() if run.valid is None else (ponder * run.valid).sum() / run.valid.sum()
        return Spent(output, trace, {"ponder": self.ponder_cost * ponder})

    def _step(self, step: int, hidden: Tensor, run: Pass, running: Tensor) -> Tensor:
        """S for the running tokens; the state of the others stays as it is, for the others to attend to."""
        run = replace(run, layer=step)
        signalled = hidden + self.signal.weight[step]
        if run.execution == "sparse":
            stepped = self.block.forward_active(signalled, run, running)
        else:
            stepped = self.block(signalled, run)
        return torch.where(running[..., None], stepped, hidden)

    def _goes_on(self, step: int, running: Tensor, left: Tensor, run: Pass) -> tuple[Tensor, Tensor]:
        """Who runs the next step, and who runs any later one: the same, unless decisions are given."""
        own = running & (left > self.epsilon)
        later = own[None] if run.decisions is None else run.decisions[step:]
        later = later if run.valid is None else later & run.valid
        return later[0], later.any(0)

    def sites(self, keys: int) -> tuple[Site, ...]:
        decision = 2 * self.model.d_model
        first = block_site(self.model, "step 1", keys, routed=False)
        later = range(2, self.steps + 1)
        return (first, *(block_site(self.model, f"step {n}", keys, routed=True, router=decision) for n in later))

    @property
    def cache_layers(self) -> int:
        return self.steps

    def routers(self) -> list[nn.Module]:
        return [self.halting] if self.halting else []
