"""A served run: its engine, name, available budgets and limits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokendepth.config import LARGEST_SEED
from tokendepth.errors import UserError
from tokendepth.infer.engine import Engine, Request
from tokendepth.infer.generate import tokenizer_of
from tokendepth.infer.speculation import engine_for
from tokendepth.measure import calibrate
from tokendepth.measure.evaluate import load_model
from tokendepth.methods import dial_of
from tokendepth.runs.machine import choose_device
from tokendepth.runs.run import Run
from tokendepth.serve.asked import Asked
from tokendepth.serve.chat import prompt_ids
from tokendepth.serve.errors import Refusal
from tokendepth.serve.metrics import Metrics
from tokendepth.serve.worker import Worker
from tokendepth.trace import Execution

DEFAULT_TOKENS = 16
"""Default `max_tokens` of completions in the OpenAI API."""


@dataclass(frozen=True)
class Limits:
    """Limits of the server; requests beyond them are rejected."""

    slots: int = 8
    """Requests that run at once."""
    queue: int = 16
    """Requests that wait for a slot."""
    tokens: int = 4096
    """Maximum tokens per request."""
    seconds: float = 120.0
    """Time limit per request; it then ends as if it had reached `max_tokens`."""
    body: int = 2**20
    """Maximum size of a request body in bytes."""


class Service:
    def __init__(
        self,
        make: Callable[[], Engine],
        name: str,
        limits: Limits,
        budgets: dict[float, list[float] | None] | None = None,
    ) -> None:
        """make: called in the worker's thread. budgets: available budgets and their thresholds, None for the model's
        own.
        """
        self.name, self.limits, self.budgets = name, limits, budgets or {}
        self.metrics = Metrics(limits.slots)
        self.worker = Worker(make, queue=limits.queue, seconds=limits.seconds, metrics=self.metrics)
        self.engine = self.worker.engine
        self.sites = [site.name for site in self.engine.model.method.sites(keys=1)]

    @classmethod
    def of(
        cls,
        run: Run,
        device: str,
        limits: Limits,
        name: str | None = None,
        speculate: bool | float = False,
        execution: Execution = "sparse",
    ) -> "Service":
        """speculate: as in `td.generate`, for all requests."""

        def make() -> Engine:
            tokenizer, model = tokenizer_of(run), load_model(run, choose_device(device))
            return engine_for(model, tokenizer, run, speculate, slots=limits.slots, execution=execution)

        return cls(make, name or _name(run.path), limits, _budgets(run))

    def prepared(self, asked: Asked) -> list[Request]:
        """The engine requests, one per choice and prompt; raises Refusal if they do not fit the model."""
        most, texts = self.limits.slots + self.limits.queue, max(1, len(asked.prompts)) * asked.choices
        if texts > most:
            raise Refusal(
                400,
                f"the request needs {texts} completions; expected at most {most}, the server's --slots plus --queue",
                param="n",
            )
        size = self.engine.tokenizer.vocab_size
        if outside := [token for token in asked.sampling.logit_bias if token >= size]:
            raise Refusal(400, f"logit_bias has token id {outside[0]}; expected 0 to {size - 1}", param="logit_bias")
        thresholds = self._thresholds(asked.budget)
        try:
            return [
                self.engine.prepare(
                    prompt,
                    replace(asked.sampling, seed=(asked.sampling.seed + number) % (LARGEST_SEED + 1)),
                    max_tokens=self._most(len(prompt), asked),
                    stop=asked.stop,
                    thresholds=thresholds,
                )
                for prompt in self._prompts(asked)
                for number in range(asked.choices)
            ]
        except UserError as error:
            raise Refusal(400, str(error), param=_source(asked)) from None

    def _prompts(self, asked: Asked) -> list[list[int]]:
        tokenizer = self.engine.tokenizer
        if asked.messages:
            return [prompt_ids(tokenizer, asked.messages)]
        return [tokenizer.encode_prompt(text) if isinstance(text, str) else list(text) for text in asked.prompts]

    def _most(self, prompt: int, asked: Asked) -> int:
        """The token limit of a request whose prompt has `prompt` tokens."""
        context, limit, tokens = self.engine.model.config.context, self.limits.tokens, asked.max_tokens
        room = context - prompt
        if room < 1:
            message = f"the prompt has {prompt} tokens; expected fewer than this model's context of {context}"
            raise Refusal(400, message, param=_source(asked), code="context_length_exceeded")
        if tokens is None:
            return min(room, limit, limit if asked.messages else DEFAULT_TOKENS)
        if tokens > limit:
            raise Refusal(400, f"max_tokens is {tokens}; expected at most {limit} on this server", param="max_tokens")
        if tokens > room:
            message = f"max_tokens is {tokens}, but the context of {context} has room for {room} after the prompt"
            raise Refusal(400, message, param="max_tokens", code="context_length_exceeded")
        return tokens

    def _thresholds(self, budget: float | None) -> list[float] | None:
        if budget is None:
            return None
        if not self.budgets:
            raise Refusal(400, "budget was given, but this model has no budget to set; leave it out", param="budget")
        if budget not in self.budgets:
            there = ", ".join(f"{each:g}" for each in sorted(self.budgets))
            message = f"budget is {budget:g}; expected one of {there}; tokendepth calibrate adds more"
            raise Refusal(400, message, param="budget")
        return self.budgets[budget]


def _source(asked: Asked) -> str:
    return "messages" if asked.messages else "prompt"


def _name(path: Path) -> str:
    return path.resolve().name or "model"


def _budgets(run: Run) -> dict[float, list[float] | None]:
    """The run's own budget and those that `tokendepth calibrate` stored; empty if the method has no such budget."""
    dial = dial_of(run.config)
    if dial is None or not dial.calibrated:
        return {}
    kept = {float(budget): values for budget, values in calibrate.kept_thresholds(run).items()}
    return {**kept, dial.own: None}
