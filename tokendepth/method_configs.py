"""The options of each method, each in its own class: another method's option is an error. Standard library only."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tokendepth.checks import check, check_range, check_types

if TYPE_CHECKING:
    from tokendepth.config import ModelConfig


@dataclass(frozen=True)
class MethodConfig:
    """Base of every method's config. To add one, write a frozen dataclass here and add it to METHOD_CONFIGS."""

    def __post_init__(self) -> None:
        check_types(self, "method")

    def check_model(self, model: "ModelConfig") -> None:
        """A UserError if this method does not work with that model."""

    def check_retrofit(self, is_one: bool) -> None:
        """A UserError if a retrofit cannot have this method and its options, or if only a retrofit can."""


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


@dataclass(frozen=True)
class SpanConfig(MethodConfig):
    """Span routing: one decision per token for several adjacent blocks, which a given share of the tokens takes."""

    begin: int = 1
    """Number of blocks before the span, which every token goes through."""
    length: int | None = None
    """Number of blocks in the span; by default, as many blocks follow the last span as precede the first."""
    budget: float = 0.25
    """Share of the tokens that take the span, above 0 and up to 1; 0 if a bypass replaces it for all tokens. For rule:
    about the share of word ends in your text, since training has room for 1.5 times as many in each sequence."""
    decide: Literal["score", "boundary", "gain", "entropy", "rule", "dice"] = "score"
    """Who takes the span, by: a learned score; boundary, learned as in H-Net; gain, a predicted cost of skipping;
    entropy of the next token as the state predicts it; rule, word ends; dice, random decisions."""
    keys: Literal["active", "all"] = "active"
    """What the span's blocks attend over: keys and values of the tokens that take it, or of all tokens."""
    carry: Literal["none", "last", "smooth"] = "last"
    """What a token that skips gets: nothing, the last update of a token that took the span, or a smoothed one."""
    ratio_loss: float = 0.03
    """For boundary: weight of the loss that keeps the share of tokens at the budget; 0 uses a quantile instead."""
    taught: float = 0.0
    """For boundary: first part of the training in which word ends decide, and boundaries learn to be there."""
    learn: Literal["weight", "straight"] = "weight"
    """For score: it learns by weighting the updates, or straight through the decision, which leaves them unweighted."""
    gain: Literal["loss", "kl", "teacher"] = "loss"
    """For gain: the cost of skipping that is predicted: loss, divergence from the same model with nothing skipped (kl),
    or divergence from the untouched model of a retrofit (teacher)."""
    anneal: float = 0.0
    """First part of the training, from 0 to 1, in which the share of tokens falls from 1 to the budget."""
    bypass: bool = False
    """Apply a linear map to tokens that skip the span; in a retrofit it is initialised to fit the span best."""
    draft: float = 0.0
    """For drafts: weight of teaching tokens that skip the span to predict what they predict with it; needs carry none
    and unweighted updates."""
    width: int | None = None
    """Width of the span's blocks; by default the model's."""
    spans: int = 1
    """Number of spans of this length, each with its own decisions."""
    between: int = 1
    """Number of blocks between two spans, which every token goes through."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("method.begin", self.begin, 0, 1000)
        check_range("method.spans", self.spans, 1, 1000)
        check_range("method.between", self.between, 0, 1000)
        if self.spans > 1:
            check(not self.bypass, "method.spans", self.spans, "1, since a bypass is fitted to one span")
        if self.bypass:
            check(self.carry == "none", "method.carry", self.carry, "none, since a bypass is itself an update")
        check_range("method.anneal", self.anneal, 0, 1)
        check_range("method.taught", self.taught, 0, 1)
        if self.decide != "boundary":
            check(not self.taught, "method.taught", self.taught, f"0, since decide is {self.decide}")
        elif not self.ratio_loss:
            check(not self.taught, "method.taught", self.taught, "0, since ratio_loss is 0")
        if self.decide != "score":
            check(self.learn == "weight", "method.learn", self.learn, f"weight, since decide is {self.decide}")
        if self.carry == "smooth":
            check(self.learn == "weight", "method.learn", self.learn, "weight, since smoothed updates are weighted")
        if self.decide != "gain":
            check(self.gain == "loss", "method.gain", self.gain, f"loss, since decide is {self.decide}")
        if self.length is not None:
            check_range("method.length", self.length, 1, 1000)
        if self.replaced:
            expected = "dice, with keys of the active tokens and no anneal, since the budget is 0"
            check(
                self.decide == "dice" and self.keys == "active" and not self.anneal,
                "method.decide",
                self.decide,
                expected,
            )
        else:
            check_budget("method.budget", self.budget)
        check_range("method.ratio_loss", self.ratio_loss, 0, 1000)
        check_range("method.draft", self.draft, 0, 1000)
        if self.draft:
            weighs = self.decide == "score" and self.learn == "weight"
            expected = "0, since updates are carried over or weighted"
            check(self.carry == "none" and not weighs, "method.draft", self.draft, expected)
        if self.decide not in ("score", "boundary"):
            expected = f"none or last, since decide is {self.decide}, which has no probability to smooth by"
            check(self.carry != "smooth", "method.carry", self.carry, expected)
        if self.decide == "boundary" and self.budget == 1:
            check(self.ratio_loss == 0, "method.ratio_loss", self.ratio_loss, "0, since the budget is 1")
        if self.width is not None:
            check_range("method.width", self.width, 1, 1_000_000)
            expected = "active, since the span has its own width, which only tokens that take it have"
            check(self.keys == "active", "method.keys", self.keys, expected)
            check(not self.replaced, "method.width", self.width, "None, since no token takes the span")

    @property
    def replaced(self) -> bool:
        """Whether no token takes the span because the bypass replaces it."""
        return self.bypass and self.budget == 0

    def ranges(self, n_layer: int) -> list[range]:
        """Which of the model's blocks are the spans, in order."""
        length = self.length or max(1, (n_layer - 2 * self.begin - (self.spans - 1) * self.between) // self.spans)
        begins = (self.begin + n * (length + self.between) for n in range(self.spans))
        return [range(begin, begin + length) for begin in begins]

    def inner(self, model: "ModelConfig") -> "ModelConfig":
        """The model config of the span's blocks: their width, with the same heads, so that one cache fits all."""
        if self.width is None:
            return model
        d_ff = max(16, 16 * round(model.d_ff * self.width / model.d_model / 16))
        return replace(model, d_model=self.width, d_ff=d_ff, head_width=model.width)

    def check_model(self, model: "ModelConfig") -> None:
        *_, last = self.ranges(model.n_layer)
        name = "the span" if self.spans == 1 else "the last span"
        expected = f"at least {last.stop}, since {name} has blocks {last.start} to {last.stop - 1}, counted from 0"
        check(last.stop <= model.n_layer, "model.n_layer", model.n_layer, expected)

    def check_retrofit(self, is_one: bool) -> None:
        teaches, widens = not is_one and self.gain == "teacher", is_one and self.width is not None
        check(not teaches, "method.gain", self.gain, "loss or kl, since only a retrofit has a teacher")
        check(not widens, "method.width", self.width, "None, since a retrofit starts from the base's blocks")


def check_positive(name: str, value: float) -> None:
    check(0 < value <= 1000, name, value, "a number above 0 and up to 1000")


def check_budget(name: str, budget: float) -> None:
    check(0 < budget <= 1, name, budget, "a number above 0 and up to 1, the share of tokens to process")


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
