"""What can be options of a retrofit, by a command or by Python. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from tokendepth.checks import check_range
from tokendepth.config import TrainConfig
from tokendepth.errors import UserError, did_you_mean

RetrofitMethod = Literal["span", "budget", "replace", "drop", "dense"]
RouterChoice = Literal["kl", "teacher", "loss", "update", "straight", "dice"]
Choice = Literal["alike", "loss"]
ROUTERS: dict[str, tuple[RouterChoice, ...]] = {
    "span": ("teacher", "kl", "loss", "straight", "dice"),
    "budget": ("update", "straight", "dice"),
}
"""How routers of a method can be trained; the best first."""
TRAIN = TrainConfig(steps=450, batch_size=8, lr=1e-4, eval_every=150, checkpoint_every=150, log_every=10)


@dataclass(frozen=True, kw_only=True)
class RetrofitOptions:
    """Which blocks are routed, at what budget, and what is trained."""

    corpus: str | None = None
    """Text to train on, such as text:FILE; by default the model's own."""
    budget: float = 0.85
    """Share of the blocks' FLOPs that is executed, above 0 and up to 1."""
    method: RetrofitMethod = "span"
    """span: one decision for adjacent blocks; budget: one for each block; for every token alike: replace, a linear map
    in the place of adjacent blocks, drop, which leaves them out, and dense, where nothing is skipped."""
    router: RouterChoice | None = None
    """How it learns. Span: what skipping costs a token, in divergence from the untouched model (teacher) or from this
    one when it skips nothing (kl), or in loss; budget: the size of a block's update; either: straight through the
    decision, or dice instead."""
    begin: int | None = None
    """First block of the span, counted from 0; measured unless set."""
    length: int | None = None
    """Blocks in the span; unless set, as many as it takes when a quarter of the tokens takes them."""
    choose: Choice = "alike"
    """Which blocks: those whose states before and after are most alike, or without which the loss rises least."""
    bypass: bool = True
    """Tokens that skip the span take one linear map instead, at first the one that fits it best."""
    drop: int | None = None
    """Blocks that --method drop or replace leaves out; by the budget unless set."""
    trains: Literal["all", "lora", "routers"] = "all"
    """All weights, low-rank changes of them and the routers, or the routers alone."""
    rank: int = 8
    """Of lora."""
    distill: float = 0.5
    """Weight of the divergence from the untouched model; the cross entropy has the rest."""
    draft: float = 0.0
    """For self-speculation: weight of teaching the pass that skips what the same model predicts with nothing skipped.
    Take it with --budget 1, which leaves what is verified undisturbed."""
    routers_first: float = 0.0
    """Part of the training in which only what is new moves: the routers and the linear map."""
    context: int | None = None
    """Tokens of a training sequence, and what the result can read; of a model with rotary positions."""

    def __post_init__(self) -> None:
        if self.method not in get_args(RetrofitMethod):
            raise UserError(f"--method is {self.method!r}; {did_you_mean(self.method, get_args(RetrofitMethod))}")
        if self.choose not in get_args(Choice):
            raise UserError(f"--choose is {self.choose!r}; expected one of {', '.join(get_args(Choice))}")
        known = ROUTERS.get(self.method, ())
        if self.router is not None and self.router not in known:
            remedy = f"expected one of {', '.join(known)}" if known else "it has no router; drop it"
            raise UserError(f"--router is {self.router!r}, but the method is {self.method}; {remedy}")
        if not 0 < self.budget <= 1:
            expected = "a number above 0 and up to 1, the share of the blocks' FLOPs that is to be executed"
            raise UserError(f"--budget is {self.budget:g}; expected {expected}")
        check_range("rank", self.rank, 1, 100_000)
        check_range("distill", self.distill, 0, 1)
        check_range("draft", self.draft, 0)
        check_range("routers_first", self.routers_first, 0, 1)
        if not self.bypass and self.method != "span":
            raise UserError(f"--no-bypass is of --method span, but the method is {self.method}; drop it")
        if self.draft and not known:
            raise UserError(f"--draft is {self.draft:g}, but the method is {self.method}, which skips nothing; drop it")
        for name, methods in {"begin": ("span",), "length": ("span",), "drop": ("drop", "replace")}.items():
            if getattr(self, name) is not None and self.method not in methods:
                own = " and ".join(methods)
                raise UserError(f"--{name} is of --method {own}, but the method is {self.method}; drop it")
