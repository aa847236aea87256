"""Who takes a span: a score for every token, from what has been read of its text. One class a way to decide.

`Score`, `Boundary`, `Gain` and `Entropy` are learned, and read what the span's first norm makes of the state before
scale and shift. `WordEnds` is a rule on the token, `Dice` the control. `Entropy` is what BLT cuts bytes into patches by
(Pagnoni et al. 2024), of the state instead of another model. `Boundary` is H-Net's (Hwang et al. 2025):

    p_t = (1 - cos(W_q h_t, W_k h_{t-1})) / 2,   p_1 = 1;   a token is active where p_t > 0.5
    ratio loss = N / (N - 1) ((N - 1) F G + (1 - F)(1 - G)),   N = 1 / budget, F the mean of active_t, G that of p_t

Its encoder, its linear residual and its loss's weight apart, which are the model's, the span's and a knob's here. Left
alone, boundaries settle elsewhere than at the ends of words, where a rule does better; so they can be `taught` the rule
first: for a part of the training words decide, and p_t learns them by cross entropy.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import ModelConfig, SpanConfig
from tokendepth.context import Context
from tokendepth.layers.routers import Router
from tokendepth.ops.carry_on import carry_on

SURE = 1e-3
"""Boundaries that are taught need not be surer than by this much."""
QUANTILE = "the quantile of the scores, which is the threshold while training"


class Decider(nn.Module):
    statistic: str | None = QUANTILE
    """What training takes over a micro-batch as a whole, as `Method.batch_statistic`."""
    threshold = 0.0
    """Until it is calibrated, and while training unless that takes the quantile."""
    flops = 0
    """Of one token."""
    reads_states = True
    """Whether scores depend on states; else on tokens and their positions alone."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """`[batch, time, d] -> [batch, time]`, the higher the sooner active."""
        raise NotImplementedError

    def weight(self, score: Tensor) -> Tensor | None:
        """What an active token keeps of its update; None: all of it."""
        return None

    def probability(self, score: Tensor, threshold: Tensor | float) -> Tensor:
        """Of being active; what of a smoothed update is an active token's own."""
        raise NotImplementedError

    def routers(self) -> list[nn.Module]:
        return [self]


class Score(Decider):
    """s = -r(norm(h)). Weighing the update by it is how the router learns; straight-through gradients lose more.

    Those leave the updates unweighted, and reach the router through the tokens that are active.
    """

    def __init__(self, model: ModelConfig, *, straight: bool = False) -> None:
        super().__init__()
        self.router, self.straight = Router(model.d_model), straight
        self.flops = self.router.flops

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return -self.router(x)

    def weight(self, score: Tensor) -> Tensor | None:
        probability = torch.sigmoid(score)
        if not self.straight:
            return probability
        return 1 + probability - probability.detach() if self.training else None

    def probability(self, score: Tensor, threshold: Tensor | float) -> Tensor:
        return torch.sigmoid(score - threshold)

    def routers(self) -> list[nn.Module]:
        return [self.router]


class Gain(Score):
    """The same router, trained by regression on what skipping costs a token; no gradient of it reaches the state."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return -self.router(x.detach())

    def weight(self, score: Tensor) -> None:
        return None


class Entropy(Decider):
    """How unsure of the next token a head is that reads the state; no gradient of it reaches the state."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head = nn.Linear(model.d_model, model.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        self.flops, self.threshold = 2 * self.head.weight.numel(), math.log(model.vocab_size) / 2

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        predicted = self.predict(x)
        return -(predicted.exp() * predicted).sum(-1)

    def predict(self, x: Tensor) -> Tensor:
        """Logarithms of the next token's probabilities, `[batch, time, vocabulary]`."""
        logits = self.head(x.detach())
        return logits.log_softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))


class Boundary(Decider):
    threshold = 0.5

    def __init__(self, model: ModelConfig, config: SpanConfig) -> None:
        super().__init__()
        if config.ratio_loss:
            self.statistic = "the share of boundaries, which the ratio loss compares with the wanted one"
        self.query, self.key = (nn.Linear(model.d_model, model.d_model, bias=False) for _ in range(2))
        for projection in (self.query, self.key):  # nearly the identity: at first a boundary is where states differ
            nn.init.normal_(projection.weight, std=0.02)
            projection.weight.data += torch.eye(model.d_model)
        self.flops = 2 * (self.query.weight.numel() + self.key.weight.numel())

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.positions is not None
        exact = torch.promote_types(x.dtype, torch.float32)
        q, k = self.query(x).to(exact), self.key(x).to(exact)
        before = torch.zeros_like(k[:, 0]) if ctx.cache is None else ctx.cache.state("boundary key", like=k[0, 0])
        latest = k if ctx.valid is None else carry_on(k * ctx.valid[..., None], ~ctx.valid, before)
        previous = torch.cat([before[:, None], latest[:, :-1]], 1)
        ctx.remember("boundary key", latest)
        p = (1 - F.cosine_similarity(q, previous, dim=-1)) / 2
        return torch.where(ctx.positions == 0, 1.0, p)

    def probability(self, score: Tensor, threshold: Tensor | float) -> Tensor:
        return score

    def confidence(self, p: Tensor, active: Tensor) -> Tensor:
        """1, with the gradient of the probability of what was decided."""
        probability = torch.where(active, p, 1 - p)
        return 1 + probability - probability.detach()


class WordEnds(Decider):
    """Active are all tokens but those of letters and digits alone.

    Of characters and bytes these end words. Of BPE, whose words begin with the space before them, they begin words:
    where one ends is not known before the next token. A byte that is only a part of a character counts as a letter.
    """

    statistic, threshold, reads_states = None, 0.5, False
    ends: Tensor

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.register_buffer("ends", torch.zeros(model.vocab_size, dtype=torch.bool))

    def read_vocabulary(self, spellings: Sequence[bytes]) -> None:
        self.ends.copy_(torch.tensor([ends_word(spelling) for spelling in spellings]))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.ids is not None
        return self.ends[ctx.ids].float()


class Dice(Decider):
    """Numbers between 0 and 1 that say nothing of use: a hash of the token and its position, however it is batched."""

    statistic, reads_states = None, False

    def __init__(self, config: SpanConfig) -> None:
        super().__init__()
        self.threshold = 1 - config.budget

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.ids is not None
        assert ctx.positions is not None
        number = ctx.ids * 40_503 + ctx.positions * 2_654_435_761
        number = (number ^ (number >> 15)) * 2_246_822_519
        return ((number ^ (number >> 13)) % 2**16 + 0.5) / 2**16

    def routers(self) -> list[nn.Module]:
        return []


def make_decider(model: ModelConfig, config: SpanConfig) -> Decider:
    if config.decide == "boundary":
        return Boundary(model, config)
    if config.decide == "entropy":
        return Entropy(model)
    if config.decide == "rule":
        return WordEnds(model)
    if config.decide == "dice":
        return Dice(config)
    return Score(model, straight=config.learn == "straight") if config.decide == "score" else Gain(model)


def ends_word(spelling: bytes) -> bool:
    try:
        return not spelling.decode().isalnum()
    except UnicodeDecodeError:
        return False


def ratio_loss(p: Tensor, active: Tensor, budget: float, ctx: Context) -> Tensor:
    """1 where as many tokens as wanted are active and probable; more where more are, or fewer."""
    n, f, g = 1 / budget, ctx.mean(active.to(p.dtype)), ctx.mean(p)
    return n / (n - 1) * ((n - 1) * f * g + (1 - f) * (1 - g))


def taught_loss(p: Tensor, ends: Tensor, ctx: Context) -> Tensor:
    """Cross entropy of boundaries `p` to where words end; a sequence's first token is a boundary in any case."""
    assert ctx.positions is not None
    wanted, bounded = torch.where(ctx.positions == 0, 1.0, ends), p.clamp(SURE, 1 - SURE)
    return ctx.mean(-(wanted * bounded.log() + (1 - wanted) * (1 - bounded).log()))
