"""What every method is: it owns its blocks and routers and says how depth is spent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import MethodConfig, ModelConfig
from tokendepth.context import Context
from tokendepth.model import Block, MethodOutput
from tokendepth.trace import DepthTrace, Site


@dataclass(frozen=True)
class Dial:
    """How one trained model is executed at several costs."""

    name: str
    """What is set, as eval.json and tables call it."""
    points: tuple[float, ...]
    """The values of a quality-over-cost curve."""
    own: float
    """What it is executed at unless told otherwise."""
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
    """Whether soft execution weighs what hard execution skips; else soft is hard, and has no figures of its own."""
    decides_by_threshold = True
    """Whether every decision is a score above a threshold, so that thresholds can be given to a pass."""
    one_decision = False
    """Whether its routed sites are one decision: of what is given for each of them, the first is taken."""
    skips_on_device = False
    """Whether sparse execution asks nothing of the host where kernels serve."""
    wants_teacher = False
    """Whether its losses compare with a teacher's logits where there is one."""
    batch_statistic: str | None = None
    """What training takes over a micro-batch as a whole: then its gradient depends on accumulation and ranks."""
    controls: Mapping[str, Mapping[str, Any]] = {}
    """Other ways to execute the same weights under hard, for a control: by name, attributes to set meanwhile."""
    point_controls: Mapping[str, Mapping[str, Any]] = {}
    """The same, for every point of a curve."""

    def __init__(self, model: ModelConfig, config: MethodConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        raise NotImplementedError

    def sites(self, keys: int) -> tuple[Site, ...]:
        """Where this method can spend depth, and the cost there when a query attends over `keys` keys."""
        raise NotImplementedError

    @property
    def cache_layers(self) -> int:
        """How many sets of keys and values a `KVCache` for this method has to hold."""
        return self.model.n_layer

    def routers(self) -> Sequence[nn.Module]:
        """The modules that decide; none for a fixed depth."""
        return []

    def read_vocabulary(self, spellings: Sequence[bytes]) -> None:
        """What each token adds to a text, for a method that decides by it: told before training, kept as a buffer."""

    def set_progress(self, done: float) -> None:
        """Before each training step: which part of the steps is done. For a method that changes as it is trained."""

    # -- operating points

    @classmethod
    def dial(cls, model: ModelConfig, config: Any) -> Dial | None:
        """At which costs one model of these configs can be executed; None: at one."""
        return None

    def set_point(self, value: float) -> None:
        """Execute at this value of the dial; of one that is `calibrated`, `calibrate` does."""
        raise NotImplementedError

    def calibrate(self, parts: list[Tensor], ctx: Context, share: float) -> Tensor:
        """Set the thresholds so that `share` of the tokens of `parts`, each `[batch, time, d]` and used up, is active.

        Returns how much of every sequence was active, `[sequence]`, or `[decision, sequence]` where there are several.
        """
        raise NotImplementedError

    def live_thresholds(self) -> Tensor | None:
        """`[routed site]`: those that may be set after the model was compiled."""
        return None

    @property
    def thresholds(self) -> list[float]:
        """What `calibrate` has set, by number."""
        live = self.live_thresholds()
        return [] if live is None else live.tolist()

    def set_thresholds(self, values: list[float]) -> None:
        """Set again what `thresholds` was after `calibrate`."""
        raise NotImplementedError

    # -- for methods

    def traced(self, work: Sequence[Tensor] | Tensor, ctx: Context) -> DepthTrace:
        """The trace of `work`, `[batch, time]` for each site, bool or a number in [0, 1]."""
        stacked = work.detach() if isinstance(work, Tensor) else torch.stack([part.detach().float() for part in work])
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
    """The work of a site that takes every token."""
    return torch.ones(hidden.shape[:2], device=hidden.device)


def blocks_of(modules: nn.ModuleList) -> list[Block]:
    """The same blocks, as a type checker knows them."""
    return [block for block in modules if isinstance(block, Block)]
