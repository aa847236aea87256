"""Which tokens take a span: each decider is a class that computes a causal score for every token.

`Score`, `Boundary`, `Gain` and `Entropy` are learned, and read the output of the span's first norm before scale and
shift. `WordEnds` is a rule on the token, `Dice` the random control. `Entropy` is how BLT splits bytes into patches
(Pagnoni et al. 2024), from the state instead of a separate model. `Boundary` is H-Net's (Hwang et al. 2025):

    p_t = (1 - cos(W_q h_t, W_k h_{t-1})) / 2,   p_1 = 1;   a token is active where p_t > 0.5
    ratio loss = N / (N - 1) ((N - 1) F G + (1 - F)(1 - G)),   N = 1 / budget, F the mean of active_t, G that of p_t

H-Net's encoder, linear residual and loss weight are not used: here the model's blocks, the span and an option take
their place. By themselves, boundaries do not settle at word ends, where a rule does better. So they can be `taught` the
rule first: for a part of the training, word ends decide, and p_t learns them by cross-entropy.
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
"""The loss of taught boundaries clamps p to [SURE, 1 - SURE]."""
QUANTILE = "the quantile of the scores, which is the threshold while training"


RAREST, COMMONEST = 0.02, 0.9
"""Shares of word ends beyond which a text hardly consists of words with spaces or signs."""
WITHOUT_ROOM = 0.05
"""Share of word ends that may find no room in training before the user is told."""


class Decider(nn.Module):
    statistic: str | None = QUANTILE
    """What training takes over a whole micro-batch, as in `Method.batch_statistic`."""
    threshold = 0.0
    """Used until it is calibrated, and in training unless that uses the quantile."""
    flops = 0
    """Per token."""
    reads_states = True
    """Whether scores depend on states; otherwise only on tokens and their positions."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """`[batch, time, d] -> [batch, time]`; the highest scores become active first."""
        raise NotImplementedError

    def weight(self, score: Tensor) -> Tensor | None:
        """The weight of an active token's update; None: 1."""
        return None

    def probability(self, score: Tensor, threshold: Tensor | float) -> Tensor:
        """The probability of being active, which weights an active token's own update in smoothing."""
        raise NotImplementedError

    def routers(self) -> list[nn.Module]:
        return [self]


class Score(Decider):
    """s = -r(norm(h)). The router learns because its score weights the updates.

    With `straight` they are unweighted, and straight-through gradients reach the router through the active tokens; the
    loss is higher.
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
    """The same router, trained by regression on the cost of skipping; its gradient does not reach the state."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return -self.router(x.detach())

    def weight(self, score: Tensor) -> None:
        return None


class Entropy(Decider):
    """The entropy of a next-token head on the state; its gradient does not reach the state."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head = nn.Linear(model.d_model, model.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        self.flops, self.threshold = 2 * self.head.weight.numel(), math.log(model.vocab_size) / 2

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        predicted = self.predict(x)
        return -(predicted.exp() * predicted).sum(-1)

    def predict(self, x: Tensor) -> Tensor:
        """Log-probabilities of the next token, `[batch, time, vocabulary]`."""
        logits = self.head(x.detach())
        return logits.log_softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))


class Boundary(Decider):
    threshold = 0.5

    def __init__(self, model: ModelConfig, config: SpanConfig) -> None:
        super().__init__()
        if config.ratio_loss:
            self.statistic = "the share of boundaries, which the ratio loss compares with the wanted one"
        self.query, self.key = (nn.Linear(model.d_model, model.d_model, bias=False) for _ in range(2))
        for projection in (self.query, self.key):  # near the identity: at first, boundaries are where states differ
            nn.init.normal_(projection.weight, std=0.02)
            projection.weight.data += torch.eye(model.d_model)
        self.flops = 2 * (self.query.weight.numel() + self.key.weight.numel())

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.positions is not None
        exact = torch.promote_types(x.dtype, torch.float32)
        q, k = self.query(x).to(exact), self.key(x).to(exact)
        before = torch.zeros_like(k[:, 0]) if ctx.cache is None else ctx.state("boundary key", like=k[0, 0])
        latest = k if ctx.valid is None else carry_on(k * ctx.valid[..., None], ~ctx.valid, before)
        previous = torch.cat([before[:, None], latest[:, :-1]], 1)
        ctx.remember("boundary key", latest)
        p = (1 - F.cosine_similarity(q, previous, dim=-1)) / 2
        return torch.where(ctx.positions == 0, 1.0, p)

    def probability(self, score: Tensor, threshold: Tensor | float) -> Tensor:
        return score

    def confidence(self, p: Tensor, active: Tensor) -> Tensor:
        """1, with the gradient of the decision's probability (straight-through)."""
        probability = torch.where(active, p, 1 - p)
        return 1 + probability - probability.detach()


class WordEnds(Decider):
    """All tokens are active except those that consist only of letters and digits.

    With characters and bytes, the active tokens end words. With BPE, where a word includes the space before it, they
    begin words, since the end is not known before the next token. A part of a multi-byte character counts as a letter.
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

    def warning(self, ids: Tensor, budget: float, room: float) -> str | None:
        """Of text like `ids`, in whose sequences a share `room` of the tokens can take the span in training."""
        ends = self.ends[ids.to(self.ends.device)]
        share = float(ends.float().mean())
        if not RAREST < share < COMMONEST:
            return (
                f"word ends are {share:.1%} of the tokens of this text, which should have words with spaces or signs "
                "after them (a byte of a character beyond ASCII counts as a letter); choose another --method.decide"
            )
        without = (ends.sum(1) - math.ceil(room * ends.shape[1])).clamp(min=0).sum() / ends.sum()
        if without <= WITHOUT_ROOM:
            return None
        return (
            f"word ends are {share:.1%} of the tokens of this text, but method.budget is {budget:g}: training has room "
            f"for {room:.1%} of a sequence, so {without:.0%} of word ends skip the span there, and none at inference; "
            f"set --method.budget {share:.2f}"
        )


class Dice(Decider):
    """Random numbers between 0 and 1: a hash of the token, its position and the span's number, whatever the batch."""

    statistic, reads_states = None, False

    def __init__(self, config: SpanConfig, number: int) -> None:
        super().__init__()
        self.threshold, self.number = 1 - config.budget, number

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.ids is not None
        assert ctx.positions is not None
        number = ctx.ids * 40_503 + ctx.positions * 2_654_435_761 + self.number * 97_531
        number = (number ^ (number >> 15)) * 2_246_822_519
        return ((number ^ (number >> 13)) % 2**16 + 0.5) / 2**16

    def routers(self) -> list[nn.Module]:
        return []


def make_decider(model: ModelConfig, config: SpanConfig, number: int) -> Decider:
    """number: of the span, counted from 0."""
    if config.decide == "boundary":
        return Boundary(model, config)
    if config.decide == "entropy":
        return Entropy(model)
    if config.decide == "rule":
        return WordEnds(model)
    if config.decide == "dice":
        return Dice(config, number)
    return Score(model, straight=config.learn == "straight") if config.decide == "score" else Gain(model)


def ends_word(spelling: bytes) -> bool:
    try:
        return not spelling.decode().isalnum()
    except UnicodeDecodeError:
        return False


def ratio_loss(p: Tensor, active: Tensor, budget: float, ctx: Context) -> Tensor:
    """1 if the active share and the mean of `p` both equal the budget; larger if both are above or below it."""
    n, f, g = 1 / budget, ctx.mean(active.to(p.dtype)), ctx.mean(p)
    return n / (n - 1) * ((n - 1) * f * g + (1 - f) * (1 - g))


def taught_loss(p: Tensor, ends: Tensor, ctx: Context) -> Tensor:
    """Cross-entropy of boundaries `p` to word ends; a sequence's first token is always a boundary."""
    assert ctx.positions is not None
    wanted, bounded = torch.where(ctx.positions == 0, 1.0, ends), p.clamp(SURE, 1 - SURE)
    return ctx.mean(-(wanted * bounded.log() + (1 - wanted) * (1 - bounded).log()))
