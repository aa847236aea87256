"""Sampling the next token from a model's logits.

The order is: repetition penalty, presence and frequency penalty, bias; then the most likely token (temperature 0), or
temperature, top-k, top-p and min-p, and a draw from the remaining tokens. Every request has its own random generator
and draws one number per token, so its text does not depend on other requests in the batch.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tokendepth.checks import check, check_range
from tokendepth.config import LARGEST_SEED
from tokendepth.errors import UserError

LOWEST_TEMPERATURE = 0.001
"""Logits are divided by the temperature; far smaller values would make them infinite."""
LOWEST_PENALTY = 0.01
"""Keeps logits finite, as above."""
MOST_LOGPROBS = 20
LARGEST_BIAS = 100


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Those that the OpenAI API has are named and defined as there."""

    temperature: float = 1.0
    """0 always picks the most likely token."""
    top_k: int = 0
    """Only this many of the most likely tokens; 0: all."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Only tokens at least this probable, relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that already occurred, including the prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token generated before."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was generated before."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    seed: int = 0
    """Fixes the draws."""
    logprobs: int | None = None
    """Return log-probabilities of the chosen token and of this many of the most likely ones; None: of none.

    They are the model's own, before any of the above is applied.
    """

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature <= 100):
            expected = f"expected 0, or a number from {LOWEST_TEMPERATURE} to 100"
            raise UserError(f"--temperature is {self.temperature}; {expected}")
        check_range("top_k", self.top_k, 0)
        check(0 < self.top_p <= 1, "top_p", self.top_p, "a number above 0, at most 1")
        check_range("min_p", self.min_p, 0, 1)
        check_range("repetition_penalty", self.repetition_penalty, LOWEST_PENALTY, 100)
        check_range("presence_penalty", self.presence_penalty, -2, 2)
        check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        for bias in self.logit_bias.values():
            check_range("logit_bias", bias, -LARGEST_BIAS, LARGEST_BIAS)
        check_range("seed", self.seed, 0, LARGEST_SEED)
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, MOST_LOGPROBS)


@dataclass(frozen=True)
class Choice:
    """A chosen token and its log-probability."""

    token: int
    """Its id."""
    logprob: float | None = None
    """Its log-probability; None without `logprobs`."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely token ids with their log-probabilities; empty without `logprobs`."""


class Sampler:
    """A request's sampling state: its parameters, random generator and the tokens so far."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.sampling = sampling
        self._dice = torch.Generator().manual_seed(sampling.seed)
        self._seen = self._counts = self._bias = None
        if sampling.repetition_penalty != 1:
            self._seen = _zeros(vocab_size, np.bool_, device)
            self._seen[list(prompt)] = True
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = _zeros(vocab_size, np.float32, device)
        if sampling.logit_bias:
            self._bias = _zeros(vocab_size, np.float32, device)
            values = [float(bias) for bias in sampling.logit_bias.values()]
            self._bias[[*sampling.logit_bias]] = torch.tensor(values, device=device)

    def imagined(self) -> "Sampler":
        """A copy that can note drafted tokens without changing the original; it shares the random generator."""
        other = copy.copy(self)
        other._seen, other._counts = (part if part is None else part.clone() for part in (self._seen, self._counts))
        return other

    def draw(self) -> float:
        """The next random number in [0, 1)."""
        return float(torch.rand((), generator=self._dice, dtype=torch.float64))

    def note(self, token: int | Tensor) -> None:
        """Record a generated token; a tensor `[1]` avoids a device synchronisation."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1

    def adjusted(self, logits: Tensor) -> Tensor:
        """The logits `[vocabulary]` with penalties and bias applied."""
        ask = self.sampling
        if self._seen is not None:
            scaled = torch.where(logits > 0, logits / ask.repetition_penalty, logits * ask.repetition_penalty)
            logits = torch.where(self._seen, scaled, logits)
        if self._counts is not None:
            logits = logits - ask.frequency_penalty * self._counts - ask.presence_penalty * (self._counts > 0)
        return logits if self._bias is None else logits + self._bias


def _zeros(size: int, dtype: type[np.generic], device: torch.device) -> Tensor:
    """Made by numpy: torch fills long tensors on several cores, which only one thread of a server may (worker.py)."""
    return torch.from_numpy(np.zeros(size, dtype)).to(device)


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[Choice]:
    """Choose the next token for each row of `logits` `[n, vocabulary]` with that row's sampler, which records it."""
    logits = logits.float()
    tokens, _ = pick(logits, samplers)
    chosen = tokens.tolist()
    for sampler, token in zip(samplers, chosen, strict=True):
        sampler.note(token)
    return with_logprobs(logits, chosen, [sampler.sampling for sampler in samplers])


def pick(logits: Tensor, samplers: Sequence[Sampler]) -> tuple[Tensor, Tensor | None]:
    """As `choose`, but not recorded, and left on the device: tokens `[n]`, and their distributions if any was drawn."""
    asks = [sampler.sampling for sampler in samplers]
    adjusted = torch.stack([sampler.adjusted(row) for sampler, row in zip(samplers, logits.float(), strict=True)])
    tokens = adjusted.argmax(-1)
    if not any(ask.temperature for ask in asks):
        return tokens, None
    draws = [sampler.draw() if sampler.sampling.temperature else 0.0 for sampler in samplers]
    odds = probabilities(adjusted, asks)
    drawn = draw(odds, torch.tensor(draws, dtype=torch.float64, device=logits.device))
    return torch.where(_column(logits, [ask.temperature > 0 for ask in asks])[:, 0], drawn, tokens), odds


def probabilities(logits: Tensor, asks: Sequence[Sampling]) -> Tensor:
    """Probabilities `[n, vocabulary]` after temperature, top-k, top-p and min-p."""
    found = (logits / _column(logits, [ask.temperature or 1.0 for ask in asks])).softmax(-1)
    size = logits.shape[-1]
    if any(ask.top_k or ask.top_p < 1 for ask in asks):
        index = logits.argsort(descending=True, stable=True)  # rounding makes some probabilities equal
        ordered = found.gather(1, index)
        most = _column(logits, [ask.top_k or size for ask in asks])
        rank = torch.arange(size, device=logits.device)
        ordered = ordered * (rank < most)
        ordered = ordered / ordered.sum(-1, keepdim=True)
        mass = _column(logits, [ask.top_p if ask.top_p < 1 else math.inf for ask in asks])
        before = ordered.cumsum(-1) - ordered  # keep a token while those before it sum to less than top_p
        found = torch.zeros_like(found).scatter(1, index, ordered * ((before < mass) | (rank == 0)))
    if any(ask.min_p for ask in asks):
        least = _column(logits, [ask.min_p for ask in asks]) * found.amax(-1, keepdim=True)
        found = found * (found >= least)
    return found / found.sum(-1, keepdim=True)


def draw(probability: Tensor, numbers: Tensor) -> Tensor:
    """`[n]`: the token at which the cumulative `probability` `[n, vocabulary]` exceeds each of `numbers`, in [0, 1)."""
    sums = probability.double().cumsum(-1)
    total = sums[:, -1:].contiguous()
    found = torch.searchsorted(sums, numbers[:, None] * total, right=True)
    last = torch.searchsorted(sums, total)  # rounding must not select a token of probability 0 at the end
    return torch.minimum(found, last)[:, 0]


def with_logprobs(logits: Tensor, chosen: list[int], asks: Sequence[Sampling]) -> list[Choice]:
    """The `chosen` token of each row with the requested log-probabilities."""
    if all(ask.logprobs is None for ask in asks):
        return [Choice(token) for token in chosen]
    logprobs = logits.log_softmax(-1)
    most = min(logits.shape[-1], max(ask.logprobs or 0 for ask in asks))
    values, tokens = (part.tolist() for part in logprobs.topk(most))
    own = logprobs.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0].tolist()
    choices = []
    for row, (token, ask) in enumerate(zip(chosen, asks, strict=True)):
        likeliest = tuple(zip(tokens[row], values[row], strict=True))[: ask.logprobs or 0]
        choices.append(Choice(token) if ask.logprobs is None else Choice(token, own[row], likeliest))
    return choices


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    """`[n, 1]`: one number per row."""
    return torch.tensor(values, device=like.device)[:, None]
