"""Generate text with a trained run: the engine reads the prompts once, then writes all texts token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokendepth.checks import check_range
from tokendepth.config import SYNTHETIC_CORPORA
from tokendepth.data.of_run import tokenizer_of
from tokendepth.errors import UserError
from tokendepth.infer.drafting import Speculation
from tokendepth.infer.engine import MOST_TOKENS, Engine, Request, Token
from tokendepth.infer.sampling import Sampling
from tokendepth.infer.speculation import engine_for
from tokendepth.measure import calibrate
from tokendepth.measure.evaluate import load_model
from tokendepth.runs.machine import choose_device
from tokendepth.runs.run import Run
from tokendepth.trace import EXECUTIONS, DepthTotals, Execution, add_up

MOST_AT_ONCE = 16
"""Prompts that are continued at the same time; further ones wait."""


@dataclass
class Spending:
    """What the generated tokens cost; updated with each token."""

    depth: list[DepthTotals] = field(default_factory=list)
    """For each token, the `DepthTotals` of the positions computed for it."""
    seconds: float = 0.0
    """Time for all tokens."""
    extra_flops: float = 0.0
    """FLOPs of drafts, and of drafted tokens that were rejected."""

    def off_budget(self, budget: float) -> str | None:
        """A sentence if the share of tokens processed is far from `budget`, else None."""
        totals = add_up(self.depth)
        return calibrate.off_budget(budget, totals.active_fraction, totals.tokens)

    def summary(self) -> str:
        """Tokens, tokens per second, active fraction and FLOPs skipped, in one line."""
        totals = add_up(self.depth)
        rate = len(self.depth) / max(self.seconds, 1e-9)
        skipped = totals.flops_skipped - self.extra_flops / totals.flops_dense
        return (
            f"{len(self.depth)} tokens, {rate:.0f} tokens/s, active fraction {totals.active_fraction:.3f}, "
            f"FLOPs skipped {100 * skipped:.1f}%"
        )


class Generation:
    """Text being generated. Iterate over it to stream, or read `.text` for all of it.

    >>> generation = td.generate("runs/tsa", "def ", tokens=5, temperature=0)
    >>> "".join(generation) == generation.text
    True
    >>> len(generation.spending.depth)
    5
    >>> generation.reason
    'length'
    >>> [len(token.depth) for token in generation.tokens()] == [len(generation.sites)] * 5
    True
    """

    def __init__(self, engine: Engine, request: Request, left_out: int = 0) -> None:
        self._engine, self._request = engine, request
        self.left_out = left_out
        """Number of tokens at the start of the prompt that were not read because the context is shorter."""
        self.spending = Spending()
        """Cost of the tokens so far, a `Spending`."""

    def __iter__(self) -> Iterator[str]:
        return (token.text for token in self.tokens())

    def tokens(self) -> Iterator[Token]:
        """Iterate over the tokens, each a `Token` with its text, depth and, if asked for, log-probability."""
        for number, token in enumerate(self._engine.stream(self._request)):
            if number == len(self.spending.depth):
                self.spending.depth.append(token.trace.totals())
                self.spending.seconds += token.seconds
                self.spending.extra_flops += token.extra_flops
            yield token

    @property
    def text(self) -> str:
        """The whole generated text; the rest of it is generated now."""
        return "".join(self)

    @property
    def reason(self) -> str | None:
        """Why generation ended: `stop` (stop string) or `length` (number of tokens); None before its end."""
        return self._request.reason

    @property
    def speculation(self) -> Speculation | None:
        """Acceptance and cost of the drafts so far; None without `speculate`."""
        return self._request.speculation

    @property
    def sites(self) -> list[str]:
        """Names of the sites, in the order of `Token.depth`."""
        return [site.name for site in self._engine.model.method.sites(keys=1)]


def generate(
    run: Run,
    prompts: Sequence[str],
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    stop: str | Sequence[str] = (),
    execution: Execution = "sparse",
    device: str = "auto",
    budget: float | None = None,
    speculate: bool | float = False,
    **sampling: Any,
) -> list[Generation]:
    """One continuation for each prompt; `sampling` are fields of `Sampling`, `speculate` is as in `td.generate`."""
    ask = Sampling(temperature, **sampling)
    check_range("tokens", tokens, 1, MOST_TOKENS)
    if execution not in EXECUTIONS:
        raise UserError(f"execution is {execution!r}; expected one of {', '.join(EXECUTIONS)}")
    if not prompts:
        raise UserError("there is no prompt; give a text, or a list of at least one")
    if run.config.data.corpus in SYNTHETIC_CORPORA and not all(prompts):
        raise UserError("--prompt is empty; copy and sort continue a source such as '<bos>4a7<sep>'")
    tokenizer = tokenizer_of(run)
    encoded = [tokenizer.encode_prompt(prompt) or [0] for prompt in prompts]
    model = load_model(run, choose_device(device))
    if budget is not None:
        calibrate.set_budget(model, run, budget, show=True)
    slots = min(len(prompts), MOST_AT_ONCE)
    engine = engine_for(model, tokenizer, run, speculate, budget=budget, slots=slots, execution=execution)
    strings = [stop] if isinstance(stop, str) else list(stop)
    context = model.config.context
    requests = [engine.submit(ids[-context:], ask, max_tokens=tokens, stop=strings, rolls=True) for ids in encoded]
    left_out = [max(0, len(ids) - context) for ids in encoded]
    return [Generation(engine, *each) for each in zip(requests, left_out, strict=True)]
