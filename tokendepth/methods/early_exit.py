"""Early exit: a token exits after the first block whose prediction is good enough, and skips the remaining blocks.

Two papers in one file. The baseline in the TSA paper exits by *confidence*: the head is read after every block, and a
token whose largest probability exceeds the threshold keeps that prediction. The Depth-Adaptive Transformer (Elbayad
et al. 2020) also *learns* when to exit: a token that has not exited yet exits after block n with probability
chi_n = sigmoid(w h_n + b):

    q(n) = chi_n * prod_{i<n} (1 - chi_i)   for n < N,      q(N) = prod_{i<N} (1 - chi_i)

This is trained by cross-entropy to the exit that an oracle picks from the targets: the n that maximises LL_n - lambda n
(`likelihood`), or C_n - lambda n with C_n = 1 if the most likely token is correct (`correctness`).

Both use aligned training: one forward pass through all blocks, the head read at every exit, and the uniform mean of
their losses. The Depth-Adaptive Transformer leaves the exit loss out of its first updates; here the exit loss has no
gradient into the states, so that it never disturbs what they learn.

A token that has exited still costs keys and values, which each later block projects from the carried state, as in the
Depth-Adaptive Transformer; the TSA paper does not say what it did. Confidence costs one read of the head for each block
that a token goes through, and the last of these reads is its answer; learned halting costs one product per block, and
the head once. The stem is a site of its own and is not part of the active fraction.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import HALTING_THRESHOLDS, PAPER_THRESHOLDS, EarlyExitConfig, ModelConfig
from tokendepth.context import Context, Rows
from tokendepth.layers.head import head_flops
from tokendepth.layers.routers import HaltingUnit
from tokendepth.methods.base import Dial, Method, blocks_of, everyone
from tokendepth.model import Block, MethodOutput
from tokendepth.trace import Site

NEVER = 1.0
"""A threshold that no probability exceeds."""


class Confidence(nn.Module):
    """The largest probability; no parameters."""

    def forward(self, logits: Tensor) -> Tensor:
        """`[batch, time, vocabulary] -> [batch, time]`"""
        return logits.float().softmax(-1).amax(-1)


class EarlyExit(Method):
    has_soft = False

    def __init__(self, model: ModelConfig, config: EarlyExitConfig) -> None:
        super().__init__(model, config)
        self.knobs, self.by_confidence = config, config.exit == "confidence"
        self.skips_on_device = not self.by_confidence  # reading the head needs the number of active tokens on the host
        self.blocks = nn.ModuleList(Block(model, layer) for layer in range(model.n_layer))
        # If off, tokens that exited are still computed and only their answer is kept, as the TSA paper may have done.
        # For confidence only: a halting unit would read the states computed after the exit.
        self.freezes = True
        self.point_controls = {"read_early": {"freezes": False}} if self.by_confidence else {}
        self.exit: Confidence | HaltingUnit | None = None
        if model.n_layer > 1:  # a single block has nothing to skip
            self.exit = Confidence() if self.by_confidence else HaltingUnit(model.d_model)
        self.threshold = _threshold(config)

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        return self._train(hidden, ctx) if self.training else self._execute(hidden, ctx)

    # -- evaluation

    def _execute(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        first, *later = self.blocks
        hidden = first(hidden, ctx)
        logits = self._read(hidden, ctx) if self.by_confidence else None
        work = [everyone(hidden)]
        for block, threshold in zip(later, ctx.thresholds([0.0] * len(later)), strict=True):
            assert self.exit is not None
            # A token that exited keeps its state and answer, so every later block decides the same about it.
            certainty = self.exit(hidden).sigmoid() if logits is None else self.exit(logits)
            active = ctx.real(self.threshold - certainty >= threshold)
            # If tokens that exited are not frozen, all tokens are computed.
            hidden = block(hidden, ctx, Rows(active) if self.freezes or ctx.execution == "sparse" else None)
            if logits is not None and ctx.execution == "sparse":
                logits = logits.masked_scatter(active[..., None], self._read(hidden[active], ctx))
            elif logits is not None:
                logits = torch.where(active[..., None], self._read(hidden, ctx), logits)
            work.append(active)
        return MethodOutput(hidden, self.traced(work, ctx), {}, logits)

    def _read(self, hidden: Tensor, ctx: Context) -> Tensor:
        assert ctx.readout is not None, "exits are read by the language model's head"
        return ctx.readout(hidden)

    # -- training

    def _train(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        states = []
        for block in self.blocks:
            hidden = block(hidden, ctx)
            states.append(hidden)
        trace = self.traced([everyone(hidden)] * len(states), ctx)
        if ctx.targets is None or self.exit is None:
            return MethodOutput(hidden, trace, {})
        logits = torch.stack([self._read(state, ctx) for state in states])
        likelihood = _log_likelihood(logits, ctx.targets)
        counted = (ctx.targets >= 0).float()  # positions with a loss
        count = counted.sum().clamp(min=1)
        per_exit = -(likelihood * counted).sum((1, 2)) / count
        # The task loss is that of the last exit; this makes it the mean over all exits.
        losses = {"exits": per_exit.mean() - per_exit[-1]}
        if isinstance(self.exit, HaltingUnit):
            correct = (logits.argmax(-1) == ctx.targets).float()
            scores = likelihood.detach() if self.knobs.oracle == "likelihood" else correct
            best = oracle_exit(scores, self.knobs.oracle_penalty, self.knobs.oracle_smoothing)
            halting = torch.stack([self.exit(state.detach()) for state in states[:-1]])
            cross_entropy = -exit_distribution(halting).gather(0, best[None])[0]
            losses["halting"] = self.knobs.halting_loss * (cross_entropy * counted).sum() / count
        return MethodOutput(hidden, trace, losses, logits[-1])

    # -- sites, routers and operating points

    def sites(self, keys: int) -> tuple[Site, ...]:
        # The read after the stem, which every token needs, is the one that the model counts as its head.
        read = head_flops(self.model) if self.by_confidence else 0
        router = self.exit.flops if isinstance(self.exit, HaltingUnit) else 0
        sites = []
        for n, block in enumerate(blocks_of(self.blocks)):
            site = block.site(f"block {n}", keys, routed=n > 0)
            sites.append(Site(site.name, True, site.always, site.active + read, router) if n else site)
        return tuple(sites)

    def routers(self) -> list[nn.Module]:
        return [self.exit] if self.exit else []

    @classmethod
    def dial(cls, model: ModelConfig, config: EarlyExitConfig) -> Dial | None:
        if model.n_layer < 2:  # a single block has nothing to skip
            return None
        points = PAPER_THRESHOLDS if config.exit == "confidence" else HALTING_THRESHOLDS
        return Dial("threshold", (NEVER, *points), _threshold(config))

    def set_point(self, value: float) -> None:
        self.threshold = value


def _threshold(config: EarlyExitConfig) -> float:
    return config.threshold or (0.9 if config.exit == "confidence" else 0.5)


def oracle_exit(scores: Tensor, penalty: float, smoothing: float) -> Tensor:
    """`[exit, batch, time] -> [batch, time]`: the exit n with the highest score - penalty * n, the earliest on ties.

    `smoothing` is the sigma of the kernel exp(-|t - t'|^2 / sigma) that sums the scores of neighbours; 0: off.
    """
    if smoothing:
        place = torch.arange(scores.shape[2], device=scores.device, dtype=scores.dtype)
        scores = scores @ torch.exp(-((place[:, None] - place) ** 2) / smoothing)
    number = torch.arange(1, len(scores) + 1, device=scores.device)
    return (scores - penalty * number[:, None, None]).argmax(0)


def exit_distribution(halting: Tensor) -> Tensor:
    """log q `[exit, ...]` from the halting logits `[exit - 1, ...]`; the last exit takes the remaining probability."""
    certain = torch.zeros_like(halting[:1])
    stayed = torch.cat([certain, F.logsigmoid(-halting).cumsum(0)])
    return stayed + torch.cat([F.logsigmoid(halting), certain])


def _log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """`[exit, batch, time]`; 0 at positions without a target."""
    targets = targets.expand(len(logits), -1, -1)
    return -F.cross_entropy(logits.flatten(0, 2).float(), targets.flatten(), reduction="none").view_as(targets)
