"""Continue a prompt with a trained run. Every token is computed from the last `context` ones, without a cache."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tokendepth import calibrate
from tokendepth.checks import check_range
from tokendepth.config import LARGEST_SEED, SYNTHETIC_CORPORA
from tokendepth.data import tokenizer_from_dict
from tokendepth.errors import UserError
from tokendepth.evaluate import load_model
from tokendepth.files import read_json
from tokendepth.machine import choose_device
from tokendepth.runs import Run
from tokendepth.trace import DepthTotals, Execution, add_up


@dataclass
class Spending:
    """What the generated tokens cost; filled in as they come."""

    depth: list[DepthTotals] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> str:
        totals = add_up(self.depth)
        rate = len(self.depth) / max(self.seconds, 1e-9)
        return (
            f"{len(self.depth)} tokens, {rate:.0f} tokens/s, active fraction {totals.active_fraction:.3f}, "
            f"FLOPs skipped {100 * totals.flops_skipped:.1f}%"
        )


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
    """Yield the continuation piece by piece. Temperature 0 takes the likeliest token."""
    if not 0 <= temperature <= 100:
        raise UserError(f"--temperature is {temperature}; expected a number from 0 to 100")
    if tokens < 1:
        raise UserError(f"--tokens is {tokens}; expected 1 or more")
    check_range("seed", seed, 0, LARGEST_SEED)
    if run.config.data.corpus in SYNTHETIC_CORPORA and not prompt:
        raise UserError("--prompt is empty; copy and sort continue a source such as '<bos>4a7<sep>'")
    tokenizer = tokenizer_from_dict(read_json(run.path / "tokenizer.json"))
    ids = tokenizer.encode(prompt) or [0]
    model = load_model(run, choose_device(device))
    if budget is not None:
        calibrate.set_budget(model, run, budget)
    where = next(model.parameters()).device
    dice = torch.Generator().manual_seed(seed)
    pending: list[int] = []
    with torch.no_grad():
        for _ in range(tokens):
            start = time.perf_counter()
            out = model(torch.tensor([ids[-model.config.context :]], device=where), execution=execution)
            logits = out.logits[0, -1].float().cpu()
            if temperature == 0:
                ids.append(int(logits.argmax()))
            else:
                ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=dice)))
            spending.depth.append(out.trace.totals())
            spending.seconds += time.perf_counter() - start
            pending.append(ids[-1])
            text = tokenizer.decode(pending)
            # One byte of a character that takes several is not text yet; no character takes more than four.
            if not text.endswith("\ufffd") or len(pending) == 4:
                pending.clear()
                yield text
    yield tokenizer.decode(pending)
