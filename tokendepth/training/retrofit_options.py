"""Options of a retrofit, for the command line and for Python. Does not import torch."""

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
"""How the routers of each method can be trained, the best first."""
TRAIN = TrainConfig(steps=450, batch_size=8, lr=1e-4, eval_every=150, checkpoint_every=150, log_every=10)


@dataclass(frozen=True, kw_only=True)
class RetrofitOptions:
    """Which blocks are routed, at which budget, and what is trained."""

    corpus: str | None = None
    """Text to train on, such as text:PATH; by default the base's own."""
    budget: float = 0.85
    """Share of the block FLOPs to execute, above 0 and up to 1."""
    method: RetrofitMethod = "span"
    """span: one decision per token for several adjacent blocks; budget: one per block. Controls without decisions:
    replace (a linear map instead of adjacent blocks), drop (no such blocks) and dense (nothing is skipped)."""
    router: RouterChoice | None = None
    """What the router learns. span: what skipping costs a token, as divergence from the untouched model (teacher), as
    divergence from the same model skipping nothing (kl), or as loss; budget: the size of a block's update; both:
    gradients straight through the decision (straight), or nothing, with random decisions (dice)."""
    begin: int | None = None
    """First block of the span, counted from 0; chosen by measurement unless set."""
    length: int | None = None
    """Blocks in the span; by default as many as meet the budget if a quarter of the tokens takes them."""
    choose: Choice = "alike"
    """Which blocks: those that change the states least (alike), or whose removal raises the loss least (loss)."""
    bypass: bool = True
    """Give tokens that skip the span a linear map instead, initialised to fit the span best."""
    drop: int | None = None
    """How many blocks --method drop or replace leaves out; by default as many as the budget asks for."""
    trains: Literal["all", "lora", "routers"] = "all"
    """Train all weights, low-rank updates of them and the routers (lora), or only the routers."""
    rank: int = 8
    """Rank of the low-rank updates (lora)."""
    distill: float = 0.5
    """Weight of the divergence from the untouched model in the loss; the cross entropy has the rest."""
    draft: float = 0.0
    """For self-speculation: weight of a loss that teaches the pass that skips to predict what the same model predicts
    when it skips nothing. Use it with --budget 1, so that the model that verifies is left alone."""
    routers_first: float = 0.0
    """Share of the training during which only new parameters are trained: the routers and the linear map."""
    context: int | None = None
    """Tokens per training sequence, and the context of the result; only for models with rotary positions."""

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
            expected = "a number above 0 and up to 1, the share of the blocks' FLOPs to execute"
            raise UserError(f"--budget is {self.budget:g}; expected {expected}")
        check_range("rank", self.rank, 1, 100_000)
        check_range("distill", self.distill, 0, 1)
        check_range("draft", self.draft, 0)
        check_range("routers_first", self.routers_first, 0, 1)
        if not self.bypass and self.method != "span":
            raise UserError(f"--no-bypass is an option of --method span, but the method is {self.method}; drop it")
        if self.draft and not known:
            raise UserError(f"--draft is {self.draft:g}, but the method is {self.method}, which skips nothing; drop it")
        for name, methods in {"begin": ("span",), "length": ("span",), "drop": ("drop", "replace")}.items():
            if getattr(self, name) is not None and self.method not in methods:
                own = " and ".join(methods)
                raise UserError(f"--{name} is an option of --method {own}, but the method is {self.method}; drop it")
