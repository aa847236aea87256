"""The options of span routing. Standard library only."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tokendepth.checks import check, check_budget, check_range
from tokendepth.config_base import MethodConfig

if TYPE_CHECKING:
    from tokendepth.config import ModelConfig


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
