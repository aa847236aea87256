"""The base class of all methods. A method owns its blocks and routers and decides how depth is spent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import MethodConfig, ModelConfig
from tokendepth.context import Context, Rows
from tokendepth.model import Block, MethodOutput
from tokendepth.trace import DepthTrace, Site


@dataclass(frozen=True)
class Dial:
    """The setting by which one trained model can be executed at several costs."""

    name: str
    """Its name in eval.json and in tables."""
    points: tuple[float, ...]
    """The values at which a curve of quality over cost is measured."""
    own: float
    """The default value."""
    calibrated: bool = False
    """Whether the value is a share of tokens, for which thresholds are calibrated on training text."""
    trained: bool = True
    """Whether the model was trained for every value, so that the curve is measured by default."""


class Method(nn.Module):
    """Hidden states and a `Context` in; hidden states, a `DepthTrace` and auxiliary losses out.

    The contract tests check the guarantees of every method: it is causal in evaluation; cached decoding equals the full
    forward; padding and ragged lengths change nothing; sparse equals hard execution; every parameter is trained, also
    with padding; the trace's FLOPs are those executed; a saved and loaded model computes the same; the same seed gives
    the same weights; it runs in every precision; its gradient does not depend on how a batch is split, unless it has a
    `batch_statistic`.
    """

    has_soft = True
    """Whether soft execution weights what hard execution skips; if not, soft equals hard."""
    decides_by_threshold = True
    """Whether every decision compares a score with a threshold, so that `forward` can be given thresholds."""
    sites_per_decision = 1
    """How many adjacent routed sites share a decision; if decisions are given for each site, the first one is used."""
    skips_on_device = False
    """Whether sparse execution with kernels needs no host synchronisation."""
    packs = False
    """Whether sparse execution packs the active tokens once for several blocks."""
    decides_by_text = False
    """For methods that pack: whether decisions depend only on the tokens, not on states."""
    draft_share = 0.2
    """Default share of tokens, or of routed blocks, that are active in a draft."""
    wants_teacher = False
    """Whether its losses use a teacher's logits, if there is a teacher."""
    batch_statistic: str | None = None
    """A statistic that training takes over a whole micro-batch; the gradient then depends on accumulation and ranks."""
    controls: Mapping[str, Mapping[str, Any]] = {}
    """Controls with the same weights in hard execution: for each name, the attributes to override temporarily."""
    point_controls: Mapping[str, Mapping[str, Any]] = {}
    """The same, for every point of a curve."""

    def __init__(self, model: ModelConfig, config: MethodConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        raise NotImplementedError

    def until_decided(self, hidden: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """For methods that pack, the first part of a forward pass: states and scores, for `Context.scored`.

        Also returns how many tokens will be packed; None if `active_count_by_text` gives that earlier.
        """
        raise NotImplementedError

    def active_count_by_text(self, ctx: Context) -> Tensor:
        """For methods that pack and decide by the text: how many tokens will be packed."""
        raise NotImplementedError

    def sites(self, keys: int) -> tuple[Site, ...]:
        """Where this method can spend depth, and the cost there when a query attends to `keys` keys."""
        raise NotImplementedError

    @property
    def cache_layers(self) -> int:
        """Number of layers that a `KVCache` for this method needs."""
        return self.model.n_layer

    def routers(self) -> Sequence[nn.Module]:
        """The modules that decide; empty for a fixed depth."""
        return []

    def additions(self) -> Sequence[nn.Module]:
        """The modules that a retrofit adds to a dense model: the routers, and any others."""
        return self.routers()

    def fit(self, parts: Iterable[Tensor], ctx: Context) -> None:
        """Before a retrofit is trained: initialise the added modules from the states of some text.

        parts: embedded tokens, each `[batch, time, d]`.
        """

    def read_vocabulary(self, spellings: Sequence[bytes]) -> None:
        """Receives the text of each token before training, for methods that decide by it; kept as a buffer."""

    def warning(self, ids: Tensor) -> str | None:
        """One line if the method's options do not suit training text like `ids`, `[batch, time]`."""
        return None

    def set_progress(self, done: float) -> None:
        """Called before each training step with the share of steps done, for methods that change during training."""

    # -- operating points

    @classmethod
    def dial(cls, model: ModelConfig, config: Any) -> Dial | None:
        """The dial of a model with these configs; None if it can be executed at one cost only."""
        return None

    def set_point(self, value: float) -> None:
        """Set the dial to this value; a `calibrated` dial is set by `calibrate` instead."""
        raise NotImplementedError

    def calibrate(self, parts: list[Tensor], ctx: Context, share: float) -> Tensor:
        """Set the thresholds so that `share` of the tokens in `parts`, each `[batch, time, d]`, are active.

        May overwrite `parts`. Returns the active share of every sequence, `[sequence]`, or `[decision, sequence]` if
        there are several decisions.
        """
        raise NotImplementedError

    def live_thresholds(self) -> Tensor | None:
        """`[routed site]`: thresholds that may change after the model is compiled."""
        return None

    @property
    def thresholds(self) -> list[float]:
        """The thresholds that `calibrate` has set."""
        live = self.live_thresholds()
        return [] if live is None else live.tolist()

    def set_thresholds(self, values: list[float]) -> None:
        """Restore thresholds that `thresholds` returned."""
        raise NotImplementedError

    # -- for methods

    def traced(self, work: Sequence[Tensor] | Tensor, ctx: Context) -> DepthTrace:
        """The trace of `work`, `[batch, time]` for each site, bool or a number in [0, 1]."""
        # Decisions are stacked before they are converted: one kernel instead of one per site.
        stacked = work.detach() if isinstance(work, Tensor) else torch.stack([part.detach() for part in work]).float()
        return DepthTrace(stacked, self.sites(ctx.key_count(stacked.shape[2])), ctx.execution)


def balance_and_z(logits: Tensor, choice: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """The balance loss n * sum_i f_i P_i and the z-loss, mean logsumexp^2, of `[batch, time, n]` logits.

    f_i is the share of tokens whose `choice` is i, P_i its mean probability, both over the micro-batch.
    """
    n = logits.shape[-1]
    share = ctx.mean(F.one_hot(choice, n).float().movedim(-1, 0))
    balance = n * (share * ctx.mean(logits.softmax(-1).movedim(-1, 0))).sum()
    return balance, ctx.mean(logits.logsumexp(-1).square())


def divergence(told: Tensor, logits: Tensor) -> Tensor:
    """KL(told || logits) per token, in nats, for logits `[..., vocabulary]`."""
    told, own = (F.log_softmax(x.float(), dim=-1) for x in (told, logits))
    return F.kl_div(own, told, log_target=True, reduction="none").sum(-1)


def annealed(done: float, anneal: float) -> float:
    """How far a budget has moved from 1 to its final value, from 0 to 1, after the share `done` of the training."""
    return min(1.0, done / anneal) if anneal else 1.0


def everyone(hidden: Tensor) -> Tensor:
    """The work at a site where every token is active."""
    return torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)


def through(
    blocks: Iterable[Block],
    hidden: Tensor,
    ctx: Context,
    rows: Rows | None = None,
    keys: Literal["all", "active"] = "all",
) -> Tensor:
    for block in blocks:
        hidden = block(hidden, ctx, rows, keys)
    return hidden


def blocks_of(modules: nn.ModuleList) -> list[Block]:
    """The same blocks, typed as `Block`."""
    return [block for block in modules if isinstance(block, Block)]
