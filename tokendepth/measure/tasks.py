"""Score a run on multiple-choice tasks: is the right continuation of a text the most likely one?

    log p(choice | context) = sum of its tokens' log-probabilities

The model's answer is the choice with the highest sum or, since short choices have fewer factors, with the highest sum
per character. A choice without alternatives, as in LAMBADA, must be the model's own greedy continuation. These are the
conventions of lm-evaluation-harness (`acc`, `acc_norm`), so scores are comparable.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokendepth.config import method_name
from tokendepth.data.of_run import tokenizer_of
from tokendepth.data.tasks import Item, read_tasks
from tokendepth.data.tokenizer import Tokenizer
from tokendepth.errors import UserError
from tokendepth.measure import calibrate
from tokendepth.measure.evaluate import AT_ONCE, MOST_LOGITS, load_model
from tokendepth.model import LanguageModel, Output
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, environment
from tokendepth.runs.run import Run
from tokendepth.trace import EXECUTIONS, DepthTotals, DepthTrace, Execution, add_up


@dataclass(frozen=True)
class Score:
    """Results of one task. Right answers are recorded per item, so that two models can be compared item by item."""

    right: list[bool]
    right_per_character: list[bool]
    chance: float
    """Accuracy of guessing."""
    bits_per_byte: float
    """Of the right choices; more informative than accuracy if a task is too hard for a model."""
    shortened: int
    """Choices whose context was cut at its beginning to fit into the model's context."""
    depth: DepthTotals
    head_flops: int = field(repr=False)

    def figures(self) -> dict[str, Any]:
        """As written to JSON, without the individual items."""
        tokens = self.depth.tokens
        executed, dense = (flops / tokens - self.head_flops for flops in (self.depth.flops, self.depth.flops_dense))
        return {
            "items": len(self.right),
            "accuracy": _mean(self.right),
            "standard_error": _standard_error(self.right),
            "accuracy_per_character": _mean(self.right_per_character),
            "standard_error_per_character": _standard_error(self.right_per_character),
            "chance": self.chance,
            "bits_per_byte": self.bits_per_byte,
            "shortened": self.shortened,
            "tokens": tokens,
            "active_fraction": self.depth.active_fraction,
            "block_flops": executed / dense,
            "flops_per_token": self.depth.flops / tokens,
        }


def _mean(right: Sequence[bool]) -> float:
    return sum(right) / len(right)


def _standard_error(right: Sequence[bool]) -> float:
    return math.sqrt(_mean(right) * (1 - _mean(right)) / len(right))


def score_run(
    run: Run,
    source: Path,
    *,
    only: Sequence[str] = (),
    items: int | None = None,
    execution: Execution = "sparse",
    budget: float | None = None,
    device: str = "auto",
    show: bool = False,
) -> dict[str, Any]:
    """Score a finished run on the tasks in `source`; with a budget of 1 no token skips anything."""
    if execution not in EXECUTIONS:
        raise UserError(f"execution is {execution!r}; expected one of {', '.join(EXECUTIONS)}")
    if items is not None and items < 1:
        raise UserError(f"--items is {items}; expected 1 or more")
    if budget is not None:
        calibrate.check(run, budget)
    where = choose_device(device)
    with Progress(f"reading {source}", show=show):
        tasks = read_tasks(source, only, items)
        model, tokenizer = load_model(run, where), tokenizer_of(run)
    if budget is not None and budget < 1:
        calibrate.set_budget(model, run, budget, show=show)
    choices = sum(len(item.choices) for task in tasks.values() for item in task)
    with Progress(f"scoring {run.path}", choices, unit="choices", show=show) as progress:
        figures = {}
        for name, task in tasks.items():
            progress.update(note=name)
            everyone = budget == 1
            found = score(model, tokenizer, task, execution=execution, everyone=everyone, progress=progress)
            figures[name] = found.figures()
    told = {"method": method_name(run.config.method), "execution": execution, "budget": budget}
    return {**told, "tasks": figures, "env": environment(where)}


@dataclass
class _Choice:
    ids: list[int]
    length: int
    """How many ids at the end belong to the choice; the others are the context."""
    shortened: bool
    log_p: float = math.nan
    greedy: bool = False


@torch.no_grad()
def score(
    model: LanguageModel,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    *,
    execution: Execution = "sparse",
    everyone: bool = False,
    progress: Progress | None = None,
) -> Score:
    """Score a model that is in evaluation mode. With `everyone` no token skips anything, whatever the thresholds."""
    asked = [[_choice(tokenizer, item.context, text, model.config.context) for text in item.choices] for item in items]
    depth = []
    for batch in _batches([choice for choices in asked for choice in choices], model.config.vocab_size):
        ids, real = _padded(batch, model.norm.weight.device)
        out = _forward(model, ids[:, :-1], execution, everyone=everyone)
        _keep(batch, ids, out.logits)
        depth.append(_of_tokens(out.trace, real[:, 1:]).totals())
        if progress:
            progress.advance(len(batch))
    answers = [_is_right(item, choices) for item, choices in zip(items, asked, strict=True)]
    nats = -sum(choices[item.answer].log_p for item, choices in zip(items, asked, strict=True))
    size = sum(len(item.choices[item.answer].encode()) for item in items)
    return Score(
        right=[plain for plain, _ in answers],
        right_per_character=[scaled for _, scaled in answers],
        chance=sum(1 / len(item.choices) for item in items if len(item.choices) > 1) / len(items),
        bits_per_byte=nats / math.log(2) / size,
        shortened=sum(choice.shortened for choices in asked for choice in choices),
        depth=add_up(depth),
        head_flops=model.head_flops,
    )


def _is_right(item: Item, choices: list[_Choice]) -> tuple[bool, bool]:
    """Whether the most likely choice is right, and whether the most likely one per character is."""
    if len(choices) == 1:
        return choices[0].greedy, choices[0].greedy
    plain = [choice.log_p for choice in choices]
    scaled = [p / max(1, len(text.removeprefix(" "))) for p, text in zip(plain, item.choices, strict=True)]
    return plain.index(max(plain)) == item.answer, scaled.index(max(scaled)) == item.answer


def _choice(tokenizer: Tokenizer, context: str, text: str, longest: int) -> _Choice:
    """Encode context and choice as one text; the choice begins after as many tokens as the context alone has."""
    whole = tokenizer.encode_prompt(context + text)
    length = max(1, len(whole) - len(tokenizer.encode_prompt(context)))
    ids = whole[-longest - 1 :]  # the last token is predicted, not read
    if len(ids) < 2:
        raise UserError(f"{context + text!r:.60} is a single token, which follows nothing; give it a longer context")
    return _Choice(ids, min(length, len(ids) - 1), shortened=len(ids) < len(whole))


def _batches(choices: list[_Choice], vocabulary: int) -> Iterator[list[_Choice]]:
    """Batches of similar lengths, to reduce padding; the longest first."""
    ordered = sorted(choices, key=lambda choice: -len(choice.ids))
    at_once = min(AT_ONCE, MOST_LOGITS // vocabulary)
    while ordered:
        size = max(1, at_once // len(ordered[0].ids))
        yield ordered[:size]
        del ordered[:size]


def _padded(batch: list[_Choice], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids `[batch, time]` and a mask of those that are not padding. It is on the right, where causality hides it."""
    longest = len(batch[0].ids)
    ids = torch.tensor([choice.ids + [0] * (longest - len(choice.ids)) for choice in batch], device=device)
    lengths = torch.tensor([len(choice.ids) for choice in batch], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]


def _of_tokens(trace: DepthTrace, real: Tensor) -> DepthTrace:
    """The trace of the real tokens only, so that padding costs no FLOPs; attention counts over the full context."""
    return replace(trace, work=trace.work[:, real][:, None], fewer_keys=None)


def _forward(model: LanguageModel, ids: Tensor, execution: Execution, *, everyone: bool) -> Output:
    if not everyone:
        return model(ids, execution=execution)
    sites = sum(site.routed for site in model.method.sites(keys=1))
    decisions = torch.ones(sites, *ids.shape, dtype=torch.bool, device=ids.device)
    return model(ids, execution=execution, **(model.forcing(decisions) if sites else {}))


def _keep(batch: list[_Choice], ids: Tensor, logits: Tensor) -> None:
    """Set each choice's log-probability, and whether greedy decoding would produce it."""
    ends = torch.tensor([len(choice.ids) - 1 for choice in batch], device=ids.device)
    lengths = [choice.length for choice in batch]
    starts = ends - torch.tensor(lengths, device=ids.device)
    time = torch.arange(logits.shape[1], device=ids.device)
    places = (time >= starts[:, None]) & (time < ends[:, None])
    chosen, targets = logits[places].float(), ids[:, 1:][places]
    log_p = chosen.log_softmax(-1).gather(1, targets[:, None])[:, 0].double()
    hits = chosen.argmax(-1) == targets
    for choice, own, hit in zip(batch, log_p.cpu().split(lengths), hits.cpu().split(lengths), strict=True):
        choice.log_p, choice.greedy = float(own.sum()), bool(hit.all())
