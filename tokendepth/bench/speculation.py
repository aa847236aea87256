"""Self-speculation compared with plain decoding of the same model at the same budget, one request at a time.

`measure` continues passages of the run's test text, greedily, in the fastest precision of its device.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from tokendepth.config import method_name
from tokendepth.data import Dataset
from tokendepth.data.of_run import dataset_of, tokenizer_of
from tokendepth.errors import UserError
from tokendepth.infer.differences import greedy_differences
from tokendepth.infer.drafting import speedup
from tokendepth.infer.engine import Engine
from tokendepth.infer.requests import Request
from tokendepth.infer.sampling import Sampling
from tokendepth.infer.speculation import SpeculativeEngine, draft_thresholds
from tokendepth.measure import calibrate
from tokendepth.measure.clock import quartiles
from tokendepth.measure.evaluate import load_model
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, environment
from tokendepth.runs.results import Row, add_rows
from tokendepth.runs.run import Run

Result = TypeVar("Result")

PASSAGES, PROMPT_TOKENS, TOKENS = 8, 64, 128
"""Number of passages, tokens per prompt, and tokens generated after each prompt."""
IDENTITY = ("benchmark", "run", "checkpoint", "dtype", "device", "budget", "share", "temperature")


def measure(path: Path, device_name: str, results: Path, corpus: str | None = None) -> Row:
    """The row for a run, written to `results`/speculation.json: in bfloat16 on a GPU, in float32 on a CPU."""
    run, device = Run.open(path), choose_device(device_name)
    with Progress(f"reading {path} and its corpus"):
        dataset = dataset_of(run, corpus)
    context = run.config.model.context
    prompts, tokens = passages(dataset, context), min(TOKENS, context - _prompt_tokens(context))
    if tokens < 2:
        raise UserError(f"{path} has a context of {context}; expected 3 or more, for a token to read and two to write")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    row = speculative_timing(run, prompts, tokens=tokens, device=device_name, dtype=dtype)
    row |= {"checkpoint": run.fingerprint, "method": method_name(run.config.method)}
    # The text is identified by its content, since its name may be a path on this machine.
    row |= {"prompt_tokens": max(map(len, prompts)), "corpus_sha256": dataset.fingerprint}
    add_rows(results / "speculation.json", [row], identity=IDENTITY)
    return row


def passages(dataset: Dataset, context: int) -> list[list[int]]:
    """Passages of the test text, as tokens, that do not directly follow each other; fewer if the text is short."""
    size, apart, found = _prompt_tokens(context), min(context, PROMPT_TOKENS + TOKENS), []
    for windows, _ in dataset.windows("test", apart, PASSAGES):
        found += windows[:, :size].tolist()
        if len(found) >= PASSAGES:
            break
    return [passage for passage in found if len(passage) == size][:PASSAGES] or found


def _prompt_tokens(context: int) -> int:
    """At most a third of the context, which leaves room to generate twice as many."""
    return max(1, min(PROMPT_TOKENS, context // 3))


def in_words(row: Row) -> str:
    plain, drafting = row["plain_tokens_per_s"][0], row["speculation_tokens_per_s"][0]
    words = (
        f"{row['run']} on {row['device']} in {row['dtype']}: {row['speedup'][0]:.2f}x "
        f"({row['speedup'][1]:.2f} to {row['speedup'][2]:.2f}), from {plain:.1f} to {drafting:.1f} tokens/s; "
    )
    if not row["drafted"]:
        return f"{words}nothing was drafted"
    draft, verify = (row[name] / row["plain_step_ms"] for name in ("draft_ms", "verify_ms"))
    return (
        f"{words}acceptance {row['acceptance']:.3f}, {row['draft_length']:.1f} tokens per draft; cost in plain steps: "
        f"{draft:.2f} per drafted token by time ({row['draft_cost_by_weights']:.2f} by weights), {verify:.2f} per "
        f"verification ({row['verify_cost_by_weights']:.2f}); predicted speedup {row['formula_by_time']:.2f}x by time, "
        f"{row['formula_by_weights']:.2f}x by weights; {row['tokens_that_differ']} of {row['tokens']} tokens differ, "
        f"{row['unexplained']} unexplained"
    )


def speculative_timing(
    run: Run,
    prompts: Sequence[str | Sequence[int]],
    *,
    share: float | None = None,
    budget: float | None = None,
    tokens: int = 128,
    temperature: float = 0.0,
    repeats: int = 5,
    device: str = "auto",
    dtype: torch.dtype | None = None,
) -> Row:
    """Tokens per second of plain decoding at `budget` and of speculation, in turns, and the formula's prediction.

    prompts: texts or their tokens, continued one after the other; reading them is not timed. share: share of tokens
    that the draft works on, as in `draft_thresholds`.
    Costs are given twice: by the weights that passes read, and by the time they took in a separate run.
    """
    place = choose_device(device)
    tokenizer, model = tokenizer_of(run), load_model(run, place)
    if budget is not None:
        calibrate.set_budget(model, run, budget, show=True)
    draft = draft_thresholds(model, run, share, budget=budget, show=True)
    model = model if dtype is None else model.to(dtype)
    plain, drafting = (Engine(model, tokenizer, slots=1), SpeculativeEngine(model, tokenizer, draft, slots=1))
    drafting.take_pace(show=True)
    ids = [(tokenizer.encode_prompt(each) if isinstance(each, str) else each) or [0] for each in prompts]

    def written(engine: Engine) -> list[Request]:
        requests = []
        for number, prompt in enumerate(ids):
            request = engine.submit(prompt, Sampling(temperature, seed=number), max_tokens=tokens)
            requests.append(request)
            for _ in engine.stream(request):
                pass
        return requests

    rates: dict[str, list[float]] = {"plain": [], "speculation": []}
    with Progress("timing plain decoding and speculation", repeats + 1, unit="rounds") as progress:
        for repeat in range(repeats + 1):
            for name, engine in (("plain", plain), ("speculation", drafting)):
                rate = _rate(written(engine))
                if repeat:  # the first round warms up
                    rates[name].append(rate)
            progress.advance()
        clocked = _Clocked(model, tokenizer, draft, slots=1)
        clocked.pace = drafting.pace
        requests = written(clocked)
    step_ms = 1000 / statistics.median(rates["plain"])
    ratios = [a / b for a, b in zip(rates["speculation"], rates["plain"], strict=True)]
    greedy = [] if temperature else requests
    differences = [each for request in greedy for each in greedy_differences(drafting, request)]
    return {
        "benchmark": "speculation", "run": run.path.name, "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "prompts": len(prompts), "tokens": sum(len(request.tokens) for request in requests),
        "budget": budget, "share": share, "temperature": temperature, "repeats": repeats, "pace": asdict(drafting.pace),
        "plain_tokens_per_s": _spread(rates["plain"]), "speculation_tokens_per_s": _spread(rates["speculation"]),
        "speedup": _spread(ratios), **_expected(requests, clocked, step_ms),
        "tokens_that_differ": len(differences), "unexplained": sum(not each.explained for each in differences),
        **environment(place),
    }  # fmt: skip


def _rate(requests: list[Request]) -> float:
    """Tokens per second, without the first token of each request, which comes from reading the prompt."""
    written = [token.seconds for request in requests for token in request.tokens[1:]]
    return len(written) / sum(written)


def _spread(values: list[float]) -> list[float]:
    return quartiles(values) if len(values) > 1 else [values[0]] * 3


def _expected(requests: list[Request], clocked: "_Clocked", step_ms: float) -> dict[str, Any]:
    """Acceptance and costs over all requests, and the speedups that the formula predicts from them."""
    found = [request.speculation for request in requests if request.speculation and request.speculation.passes]
    drafted, passes = sum(each.drafted for each in found), sum(each.passes for each in found)
    if not passes:
        return {"drafted": 0}
    acceptance, length = sum(each.accepted for each in found) / sum(each.judged for each in found), drafted / passes
    by_weights = [
        sum(each.drafted * cost for each, cost in zip(found, costs, strict=True)) / drafted
        for costs in ([each.draft_cost for each in found], [each.verify_cost(length) for each in found])
    ]
    draft_ms, verify_ms = 1000 * clocked.drafting / drafted, 1000 * clocked.verifying / passes
    by_time = [draft_ms / step_ms, verify_ms / step_ms]
    return {
        "drafted": drafted, "acceptance": acceptance, "draft_length": length,
        "draft_cost_by_weights": by_weights[0], "verify_cost_by_weights": by_weights[1],
        "formula_by_weights": speedup(acceptance, length, *by_weights),
        "plain_step_ms": step_ms, "draft_ms": draft_ms, "verify_ms": verify_ms,
        "formula_by_time": speedup(acceptance, length, *by_time),
    }  # fmt: skip


class _Clocked(SpeculativeEngine):
    """Adds up the seconds spent on drafts and on verification, waiting for the device."""

    drafting = verifying = 0.0

    def _drafted(self, drafts):
        found, seconds = self._clocked(lambda: super(_Clocked, self)._drafted(drafts))
        self.drafting += seconds
        return found

    def _verified(self, drafts, tokens):
        found, seconds = self._clocked(lambda: super(_Clocked, self)._verified(drafts, tokens))
        self.verifying += seconds
        return found

    def _clocked(self, function: Callable[[], Result]) -> tuple[Result, float]:
        self._wait()
        start = time.perf_counter()
        result = function()
        self._wait()
        return result, time.perf_counter() - start

    def _wait(self) -> None:
        if self.cache.lengths.is_cuda:
            torch.cuda.synchronize()
