"""What every method is: it owns its blocks and routers and says how depth is spent."""

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
    """How one trained model is executed at several costs."""

    name: str
    """Its name in eval.json and in tables."""
    points: tuple[float, ...]
    """The values at which a curve of quality over cost is drawn."""
    own: float
    """The default value."""
    calibrated: bool = False
    """Whether a value is a share of tokens, reached by thresholds that are found on training text."""
    trained: bool = True
    """Whether the model was trained to serve every value, so that a curve is drawn without being asked for."""


class Method(nn.Module):
    """Hidden states and a `Context` in; hidden states, a `DepthTrace` and auxiliary losses out.

    The contract suite checks what every method promises: causal in evaluation; cached decoding equals the full forward,
    padding and ragged lengths change nothing; sparse equals hard; every parameter is trained, also with padding; the
    trace's FLOPs are those executed; saved and loaded it computes the same; the same seed gives the same weights; it
    runs in every precision; its gradient does not depend on how a batch is cut, or it says so.
    """

    has_soft = True
    """Whether soft execution weights what hard execution skips; if not, soft is the same as hard."""
    decides_by_threshold = True
    """Whether every decision compares a score with a threshold, so that a pass can be given thresholds."""
    one_decision = False
    """Whether all routed sites share one decision; of decisions given for each, the first is used."""
    skips_on_device = False
    """Whether sparse execution needs no host synchronisation where kernels run."""
    packs = False
    """Whether sparse execution packs the tokens of several blocks once."""
    decides_by_text = False
    """Of a method that packs: whether its decisions depend on the tokens alone, and on no state."""
    draft_share = 0.2
    """The share of tokens, or of routed blocks, that works in a draft, unless another is named."""
    wants_teacher = False
    """Whether its losses compare with a teacher's logits where there is one."""
    batch_statistic: str | None = None
    """A statistic that training takes over a whole micro-batch; the gradient then depends on accumulation and ranks."""
    controls: Mapping[str, Mapping[str, Any]] = {}
    """Controls that execute the same weights under hard: by name, the attributes to override meanwhile."""
    point_controls: Mapping[str, Mapping[str, Any]] = {}
    """The same, for every point of a curve."""

    def __init__(self, model: ModelConfig, config: MethodConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        raise NotImplementedError

    def until_decided(self, hidden: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of a method that packs, the first part of a pass: states and scores, for `Context.scored`.

        And how many tokens will be packed, unless `active_count_by_text` tells that sooner.
        """
        raise NotImplementedError

    def active_count_by_text(self, ctx: Context) -> Tensor:
        """Of a method that packs and decides by the text: how many tokens will be packed."""
        raise NotImplementedError

    def sites(self, keys: int) -> tuple[Site, ...]:
        """Where this method can spend depth, and the cost there when a query attends over `keys` keys."""
        raise NotImplementedError

    @property
    def cache_layers(self) -> int:
        """Number of layers of keys and values that a `KVCache` for this method needs."""
        return self.model.n_layer

    def routers(self) -> Sequence[nn.Module]:
        """The modules that decide; none for a fixed depth."""
        return []

    def additions(self) -> Sequence[nn.Module]:
        """What a retrofit puts into a dense model: the routers, and what else is new in it."""
        return self.routers()

    def fit(self, parts: Iterable[Tensor], ctx: Context) -> None:
        """Before a retrofit is trained: give what is new in the model its first weights, by states of some text.

        parts: embedded tokens, each `[batch, time, d]`.
        """

    def read_vocabulary(self, spellings: Sequence[bytes]) -> None:
        """Receive the text of each token before training, for methods that decide by it; kept as a buffer."""

    def set_progress(self, done: float) -> None:
        """Before each training step: which part of the steps is done. For a method that changes as it is trained."""

    # -- operating points

    @classmethod
    def dial(cls, model: ModelConfig, config: Any) -> Dial | None:
        """The costs at which a model of these configs can be executed; None if there is only one."""
        return None

    def set_point(self, value: float) -> None:
        """Set the dial to this value; a `calibrated` dial is set by `calibrate` instead."""
        raise NotImplementedError

    def calibrate(self, parts: list[Tensor], ctx: Context, share: float) -> Tensor:
        """Set the thresholds so that `share` of the tokens of `parts`, each `[batch, time, d]`, is active.

        May overwrite `parts`. Returns the active share of every sequence, `[sequence]`, or `[decision, sequence]` where
        there are several decisions.
        """
        raise NotImplementedError

    def live_thresholds(self) -> Tensor | None:
        """`[routed site]`: thresholds that may change after the model was compiled."""
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
        # Decisions are stacked before they become numbers: one kernel instead of one a site.
        stacked = work.detach() if isinstance(work, Tensor) else torch.stack([part.detach() for part in work]).float()
        return DepthTrace(stacked, self.sites(ctx.key_count(stacked.shape[2])), ctx.execution)


def balance_and_z(logits: Tensor, choice: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """Of `[batch, time, n]` logits and the `choice` they led to: n * sum_i f_i P_i, and the mean logsumexp squared.

    f_i is the share of tokens that chose i, P_i its mean probability; both are of the micro-batch.
    """
    n = logits.shape[-1]
    share = ctx.mean(F.one_hot(choice, n).float().movedim(-1, 0))
    balance = n * (share * ctx.mean(logits.softmax(-1).movedim(-1, 0))).sum()
    return balance, ctx.mean(logits.logsumexp(-1).square())


def divergence(told: Tensor, logits: Tensor) -> Tensor:
    """KL(told || logits) of each token, in nats, for logits `[..., vocabulary]`."""
    told, own = (F.log_softmax(x.float(), dim=-1) for x in (told, logits))
    return F.kl_div(own, told, log_target=True, reduction="none").sum(-1)


def annealed(done: float, anneal: float) -> float:
    """How far a budget has fallen from 1 to its value, from 0 to 1, when `done` of the training is."""
    return min(1.0, done / anneal) if anneal else 1.0


def everyone(hidden: Tensor) -> Tensor:
    """The work of a site where every token is active."""
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
    """The same blocks, as a type checker knows them."""
    return [block for block in modules if isinstance(block, Block)]
