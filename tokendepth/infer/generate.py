"""Continue a prompt with a trained run: the prompt is read once, then every token alone, the others from a cache."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tokendepth.cache import KVCache
from tokendepth.checks import check_range
from tokendepth.config import LARGEST_SEED, SYNTHETIC_CORPORA
from tokendepth.data import TextStream
from tokendepth.data.of_run import tokenizer_of
from tokendepth.errors import UserError
from tokendepth.measure import calibrate
from tokendepth.measure.evaluate import load_model
from tokendepth.model import LanguageModel, Output
from tokendepth.runs.machine import choose_device
from tokendepth.runs.run import Run
from tokendepth.trace import DepthTotals, Execution, add_up

LOWEST_TEMPERATURE = 0.001
"""Logits are divided by it, and far below they would not stay finite."""
MOST_TOKENS = 10**9


@dataclass
class Spending:
    """What the generated tokens cost; filled in as they come."""

    depth: list[DepthTotals] = field(default_factory=list)
    seconds: float = 0.0

    def off_budget(self, budget: float) -> str | None:
        totals = add_up(self.depth)
        return calibrate.off_budget(budget, totals.active_fraction, totals.tokens)

    def summary(self) -> str:
        totals = add_up(self.depth)
        rate = len(self.depth) / max(self.seconds, 1e-9)
        return (
            f"{len(self.depth)} tokens, {rate:.0f} tokens/s, active fraction {totals.active_fraction:.3f}, "
            f"FLOPs skipped {100 * totals.flops_skipped:.1f}%"
        )


class Decoder:
    """What a model says after a text that grows; only what is new of it is computed.

    A model has positions for `context` tokens. Once they are taken it begins again with the last half of them, so that
    a token is computed from half a context at least, and hardly any is computed twice.
    """

    def __init__(self, model: LanguageModel, execution: Execution) -> None:
        self.model, self.execution = model, execution
        self.cache: KVCache | None = None

    def __call__(self, ids: list[int]) -> Output:
        """Of `ids`, all but the last must be those of the call before."""
        model, context = self.model, self.model.config.context
        new = ids[-1:]
        if self.cache is None or self.cache.longest == context:
            new = ids[-context:] if self.cache is None else ids[-max(1, context // 2) :]
            like = model.embedding.weight
            self.cache = KVCache(model.config, 1, context, layers=model.method.cache_layers, like=like)
        return model(torch.tensor([new], device=self.cache.keys.device), execution=self.execution, cache=self.cache)


def generate(
    run: Run,
    prompt: str,
    spending: Spending,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    execution: Execution = "sparse",
    device: str = "auto",
    budget: float | None = None,
) -> Iterator[str]:
    """Yield the continuation piece by piece, up to `tokens` or where the model says that it ends.

    Temperature 0 takes the likeliest token.
    """
    if not (temperature == 0 or LOWEST_TEMPERATURE <= temperature <= 100):
        raise UserError(f"--temperature is {temperature}; expected 0, or a number from {LOWEST_TEMPERATURE} to 100")
    check_range("tokens", tokens, 1, MOST_TOKENS)
    check_range("seed", seed, 0, LARGEST_SEED)
    if run.config.data.corpus in SYNTHETIC_CORPORA and not prompt:
        raise UserError("--prompt is empty; copy and sort continue a source such as '<bos>4a7<sep>'")
    tokenizer = tokenizer_of(run)
    ids = tokenizer.encode_prompt(prompt) or [0]
    model = load_model(run, choose_device(device))
    if budget is not None:
        calibrate.set_budget(model, run, budget, show=True)
    decode = Decoder(model, execution)
    dice = torch.Generator().manual_seed(seed)
    text = TextStream(tokenizer)
    with torch.no_grad():
        for _ in range(tokens):
            start = time.perf_counter()
            out = decode(ids)
            logits = out.logits[0, -1, : tokenizer.vocab_size].float().cpu()  # a model may have more: padding
            if temperature == 0:
                ids.append(int(logits.argmax()))
            else:
                ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=dice)))
            spending.depth.append(out.trace.totals())
            spending.seconds += time.perf_counter() - start
            if ids[-1] in tokenizer.stops:
                break
            yield text.add(ids[-1])
    yield text.end()
