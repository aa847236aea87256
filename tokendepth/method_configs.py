"""The options of each method, each in its own class: another method's option is an error. Standard library only."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tokendepth.checks import check, check_budget, check_positive, check_range
from tokendepth.config_base import MethodConfig
from tokendepth.span_config import SpanConfig

if TYPE_CHECKING:
    from tokendepth.config import ModelConfig


@dataclass(frozen=True)
class DenseConfig(MethodConfig):
    """The fixed-depth baseline: every token goes through every block. It has no options."""


@dataclass(frozen=True)
class TSAConfig(MethodConfig):
    """Token-Selective Attention: a learned gate per token and block."""

    depth_penalty: float = 0.001
    """Lambda of the TSA paper: weight of the mean active fraction in the loss."""
    threshold: float = 0.5
    """Hard and sparse execution skip tokens whose halting probability is above this."""
    skip: Literal["block", "ffn"] = "block"
    """What sparse execution skips: block = Q, attention rows, output projection, FFN; ffn = FFN only (TSA paper)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.depth_penalty", self.depth_penalty, 0, 1000)
        check_range("method.threshold", self.threshold, 0, 1)


@dataclass(frozen=True)
class BudgetConfig(MethodConfig):
    """Budget routing: routed blocks process a given share of the tokens, which training keeps in every micro-batch."""

    budget: float = 0.4
    """Share of the tokens that are active in the routed blocks, above 0 and up to 1."""
    dial: bool = True
    """Train every sequence at a random budget, so that one model works at all of them; off trains only at `budget`."""
    distill: float = 1.0
    """Weight of distillation from a forward pass at full budget, which doubles the work per step; 0 is off."""
    routing: Literal["learned", "random"] = "learned"
    """random replaces the router by random numbers, as a control."""
    learn: Literal["weight", "straight", "update"] = "weight"
    """How a router learns: by weighting the updates of the tokens it keeps (weight), by gradients straight through the
    decision (straight), or by predicting how much the block changes a token (update). The last two leave kept tokens
    unweighted, as a pretrained model needs."""
    shares: str = ""
    """Relative budgets of the routed blocks, such as 0.9,0.5,0.7, raised to the power at which their mean is `budget`;
    empty means equal budgets."""
    anneal: float = 0.0
    """First part of the training, from 0 to 1, in which the shares fall from 1 to their final values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("method.budget", self.budget)
        check_range("method.distill", self.distill, 0, 1000)
        check_range("method.anneal", self.anneal, 0, 1)
        if self.routing == "random":
            check(self.learn == "weight", "method.learn", self.learn, "weight, since random routing learns nothing")
        if self.dial:
            check(not self.anneal, "method.anneal", self.anneal, "0, since every sequence draws a budget of its own")
            check(not self.shares, "method.shares", self.shares, "none, since every sequence draws a budget of its own")
        if self.shares:
            numbers = re.fullmatch(r"(0|1)(\.\d+)?(,(0|1)(\.\d+)?)*", self.shares)
            expected = "numbers above 0 and up to 1 with commas between them, such as 0.9,0.5,0.7"
            check(numbers is not None, "method.shares", self.shares, expected)
            check(all(0 < share <= 1 for share in self.profile), "method.shares", self.shares, expected)

    @property
    def profile(self) -> list[float]:
        """The numbers of `shares`."""
        return [float(word) for word in self.shares.split(",")] if self.shares else []

    def check_model(self, model: "ModelConfig") -> None:
        routed = model.n_layer - 1
        fits = not self.shares or len(self.profile) == routed
        check(fits, "method.shares", self.shares, f"{routed} numbers, one for each block but the first")


@dataclass(frozen=True)
class MoDConfig(MethodConfig):
    """Mixture-of-Depths: every other block processes the tokens with the highest router weights; the others skip it."""

    capacity: float = 0.125
    """Share of a sequence's tokens that a routed block takes while training, above 0 and up to 1."""
    every: int = 2
    """Route every n-th block; 2 is every other."""
    decides: Literal["predictor", "router"] = "predictor"
    """Who decides without seeing the future: a separate predictor, or the router itself, trained for it."""
    decision_loss: float = 0.01
    """Weight of the cross-entropy that teaches the decision, above 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("method.capacity", self.capacity)
        check_range("method.every", self.every, 1, 1_000_000)
        check_positive("method.decision_loss", self.decision_loss)


PAPER_THRESHOLDS = (0.99, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.4, 0.3)
"""Confidence thresholds at which the TSA paper evaluates its early-exit model."""
HALTING_THRESHOLDS = (0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.92, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Thresholds at which a model with learned exits is evaluated; the Depth-Adaptive Transformer tunes one."""


@dataclass(frozen=True)
class EarlyExitConfig(MethodConfig):
    """Early exit: a token leaves after the first block at which the exit rule is confident enough."""

    exit: Literal["confidence", "learned"] = "confidence"
    """confidence applies the output head after every block (baseline of the TSA paper); learned: a halting unit."""
    threshold: float | None = None
    """Exit above this probability: of the most likely token (default 0.9) or of the halting unit (default 0.5)."""
    oracle: Literal["likelihood", "correctness"] = "correctness"
    """How the target exit is found: from the target's likelihood, or from whether the top prediction is correct."""
    oracle_penalty: float = 0.1
    """Lambda: the oracle's penalty for each further block."""
    oracle_smoothing: float = 0.0
    """Sigma of the kernel that smooths the oracle over neighbouring tokens; 0 is off."""
    halting_loss: float = 1.0
    """Alpha: weight of the loss of learned exits, above 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            expected = "a number above 0 and below 1"
            check(0 < self.threshold < 1, "method.threshold", self.threshold, expected)
        check_range("method.oracle_penalty", self.oracle_penalty, 0, 1000)
        check_range("method.oracle_smoothing", self.oracle_smoothing, 0, 1_000_000)
        check_positive("method.halting_loss", self.halting_loss)


@dataclass(frozen=True)
class SwitchConfig(MethodConfig):
    """Switch: experts replace every other feed-forward network; each token goes to one expert if it has room."""

    experts: int = 4
    """Number of experts, 2 or more."""
    capacity_factor: float = 1.25
    """Capacity of an expert, a multiple of an equal share of the tokens, above 0; tokens beyond it skip the expert."""
    every: int = 2
    """Every n-th block has experts; 2 is every other."""
    balance_loss: float = 0.01
    """Weight of the loss that spreads the tokens over the experts."""
    z_loss: float = 0.001
    """Weight of the loss that keeps the router's logits small."""
    jitter: float = 0.01
    """While training, the router's input is multiplied by random numbers between 1 - jitter and 1 + jitter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.experts", self.experts, 2, 1024)
        check_positive("method.capacity_factor", self.capacity_factor)
        check_range("method.every", self.every, 1, 1_000_000)
        check_range("method.balance_loss", self.balance_loss, 0, 1000)
        check_range("method.z_loss", self.z_loss, 0, 1000)
        check_range("method.jitter", self.jitter, 0, 1, below=True)


@dataclass(frozen=True)
class ACTConfig(MethodConfig):
    """Adaptive computation time: one shared block is applied to each token until its halting unit stops it."""

    max_steps: int | None = None
    """Maximum number of steps per token; by default the number of layers."""
    epsilon: float = 0.01
    """A token halts once its halting probabilities add up to 1 - epsilon."""
    ponder_cost: float = 0.01
    """Tau: weight of the number of steps in the loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_steps is not None:
            check_range("method.max_steps", self.max_steps, 1, 1000)
        check(0 < self.epsilon < 1, "method.epsilon", self.epsilon, "a number above 0 and below 1")
        check_range("method.ponder_cost", self.ponder_cost, 0, 1000)


@dataclass(frozen=True)
class MoRConfig(MethodConfig):
    """Mixture-of-Recursions: a shared block between the first and last layer recurs, for fewer tokens each time."""

    recursions: int = 2
    """How many times the shared block is applied, 2 or more; must divide the number of layers minus 2."""
    routing: Literal["expert", "token"] = "expert"
    """expert: each recursion chooses its tokens; token: each token chooses its depth before the first recursion."""
    kv: Literal["recursion", "shared"] = "recursion"
    """What later recursions attend to: only the tokens active at that depth (recursion), or all tokens, with keys and
    values of the first recursion (shared)."""
    alpha: float = 0.1
    """Factor on the router's weights in expert choice, above 0."""
    decision_loss: float = 0.001
    """Weight of the cross-entropy that teaches expert choice to decide without the future, above 0."""
    balance_loss: float = 0.1
    """Weight of the loss that spreads token choice over the depths."""
    z_loss: float = 1e-5
    """Weight of the loss that keeps token choice's logits small."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.recursions", self.recursions, 2, 1000)
        check_positive("method.alpha", self.alpha)
        check_positive("method.decision_loss", self.decision_loss)
        check_range("method.balance_loss", self.balance_loss, 0, 1000)
        check_range("method.z_loss", self.z_loss, 0, 1000)

    def check_model(self, model: "ModelConfig") -> None:
        n_layer = model.n_layer
        fits = n_layer > 2 and (n_layer - 2) % self.recursions == 0
        expected = f"2 and a multiple of method.recursions ({self.recursions}), such as {2 + 2 * self.recursions}"
        check(fits, "model.n_layer", n_layer, expected)


@dataclass(frozen=True)
class ITTConfig(MethodConfig):
    """Inner Thinking: every other layer is applied again to tokens that need more of it."""

    steps: int = 4
    """Maximum number of times that a thinking layer is applied, including the first, 2 or more."""
    capacity: float = 0.7
    """Share of a sequence's tokens that take a thinking step while training, above 0 and up to 1."""
    every: int = 2
    """Every n-th layer is a thinking layer; 2 is every other."""
    decides: Literal["predictor", "router"] = "predictor"
    """Who decides without seeing the future: a separate predictor, or the router itself, trained for it."""
    decision_loss: float = 0.01
    """Weight of the cross-entropy that teaches the decision, above 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.steps", self.steps, 2, 1000)
        check_budget("method.capacity", self.capacity)
        check_range("method.every", self.every, 1, 1_000_000)
        check_positive("method.decision_loss", self.decision_loss)


METHOD_CONFIGS: dict[str, type] = {
    "dense": DenseConfig,
    "tsa": TSAConfig,
    "budget": BudgetConfig,
    "mod": MoDConfig,
    "early_exit": EarlyExitConfig,
    "switch": SwitchConfig,
    "act": ACTConfig,
    "mor": MoRConfig,
    "itt": ITTConfig,
    "span": SpanConfig,
}


def method_name(config: MethodConfig) -> str:
    return next(name for name, cls in METHOD_CONFIGS.items() if type(config) is cls)
