"""analyse: runs with the same config in; tables of which tokens get the depth, and a summary in words, out."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tokendepth.analysis.attributes import Spelled, frequencies
from tokendepth.analysis.lookup import lookups, token_share
from tokendepth.analysis.passes import Tokens, run_over
from tokendepth.analysis.summary import summarise
from tokendepth.analysis.table import named, tabulate
from tokendepth.analysis.windows import FEWEST, Windows
from tokendepth.config import method_name, to_dict
from tokendepth.data import TextDataset
from tokendepth.data.dataset import HeldOut
from tokendepth.data.of_run import dataset_of
from tokendepth.errors import UserError
from tokendepth.measure.evaluate import batches, load_model
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, environment
from tokendepth.runs.run import Run, first_difference

VERSION = 1


def analyse(
    runs: Sequence[Run | str | Path],
    *,
    split: HeldOut = "val",
    tokens: int | None = None,
    corpus: str | None = None,
    device: str = "auto",
    show: bool = False,
) -> dict[str, Any]:
    """Analyse which tokens get the depth in one or more finished runs. Several runs may differ only in their seeds.

    `tokens` limits the analysis to the first tokens of the split; `corpus` names a text other than the runs' own.
    `show` prints progress.

    | key of the result | value |
    |---|---|
    | `version`, `method`, `recipe`, `corpus`, `split`, `context` | what was analysed |
    | `summary` | the results in a few sentences |
    | `agreement` | for each pair of seeds and each site: how often they decide alike, and Cohen's kappa |
    | `runs` | a dictionary per run, with the keys below |
    | `run`, `seed`, `env`, `tokens`, `windows`, `sites` | which run, where, over how much text; names of the sites |
    | `token` | "character" if every token is one, else "token" |
    | `loss`, `depth`, `depth_per_site` | averages with sparse execution |
    | `by` | for each attribute, such as `kind`, a table as from `depth_by` |
    | `lookup` | for each site: how much of its decisions the token, and the one before it, explains |
    | `stability` | decisions that flip after one earlier token is replaced, by distance |
    | `skipped` | what skipping costs in loss, by kind of token; None if the method cannot run without skipping |

    Estimates are dictionaries with `value` and a 95% confidence interval, `low` and `high`.
    """
    if isinstance(runs, Run | str | Path):
        runs = [runs]
    if split not in ("val", "test"):
        raise UserError(f"split is {split!r}; expected val or test; set it with --split")
    if tokens is not None and tokens < 1:
        raise UserError(f"tokens is {tokens}; expected at least 1; set it with --tokens")
    opened = [run if isinstance(run, Run) else Run.open(run) for run in runs]
    check_seeds(opened)
    texts, found = [], []
    for run in opened:
        with Progress(f"analysing {run.path}", unit="tokens", show=show) as progress:
            text, row = _of_run(run, split, tokens, corpus, device, progress)
        texts.append(text)
        found.append(row)
    config = opened[0].config
    tree = {
        "version": VERSION,
        "method": method_name(config.method),
        "recipe": config.recipe,
        "corpus": corpus or config.data.corpus,
        "split": split,
        "context": config.model.context,
        "runs": found,
        "agreement": agreement(
            [text.decisions for text in texts], Windows(texts[0].window), [row["seed"] for row in found]
        ),
    }
    return {**tree, "summary": summarise(tree)}


def check_seeds(runs: Sequence[Run]) -> None:
    """A UserError unless there are runs, all finished, trained on text, with configs that differ only in the seed."""
    if not runs:
        raise UserError("analyse was given no run folder; name one, or several that differ only in their seeds")
    seeds: dict[int, Run] = {}
    for run in runs:
        run.verify()
        config = run.config
        if config.data.synthetic:
            raise UserError(f"{run.path} was trained on {config.data.corpus}, which is not text; use a run on text")
        alike = replace(config, train=replace(config.train, seed=runs[0].config.train.seed))
        if difference := first_difference(to_dict(alike), to_dict(runs[0].config)):
            told = f"{run.path} differs from {runs[0].path} in more than the seed: {difference}"
            raise UserError(f"{told}; analyse them one at a time")
        if twin := seeds.get(config.train.seed):
            raise UserError(f"{run.path} has the same seed as {twin.path}, {config.train.seed}; name each seed once")
        seeds[config.train.seed] = run


def _of_run(
    run: Run, split: HeldOut, tokens: int | None, corpus: str | None, device: str, progress: Progress
) -> tuple[Tokens, dict[str, Any]]:
    progress.update(note="reading the run and its corpus")
    where = choose_device(device)
    model = load_model(run, where)
    sites = [site.name for site in model.method.sites(keys=1) if site.routed]
    if not sites:
        raise UserError(f"{run.path} has no routers, so every token has the same depth; use a routed run")
    dataset = dataset_of(run, corpus)
    assert isinstance(dataset, TextDataset)
    context = model.config.context
    length = len(dataset.split_ids(split)) if tokens is None else min(tokens, len(dataset.split_ids(split)))
    if length < FEWEST * context:
        unit = f"{FEWEST} windows of {context} tokens"
        remedy = "raise --tokens, or name a longer text with --corpus text:PATH"
        raise UserError(f"{length:,} tokens of the {split} split are too few; expected at least {unit}; {remedy}")
    progress.update(total=length, note="running the model")
    text = run_over(model, dataset, batches(dataset, split, context, where, tokens), progress)
    progress.update(note="counting")
    facts = {"run": run.name, "seed": run.config.train.seed, "env": environment(where)}
    return text, {**facts, **describe(text, dataset, sites)}


def describe(text: Tokens, dataset: TextDataset, sites: list[str]) -> dict[str, Any]:
    """All tables of one run."""
    windows = Windows(text.window)
    spelled = Spelled(text.ids, dataset.tokenizer.spellings())
    kinds = spelled.kinds()
    attributes = {
        "kind": kinds,
        "position in word": spelled.positions(),
        "frequency": frequencies(text.ids, dataset.split_ids("train"), dataset.tokenizer.vocab_size),
        "surprisal of the token": text.surprisal,
        "surprisal of the next": text.loss,
        "entropy of the prediction": text.entropy,
        "position in context": text.position,
    }
    first = text.position == text.position.min()
    return {
        "tokens": len(text.ids),
        "windows": int(text.window.max()) + 1,
        "token": "character" if spelled.by_character else "token",
        "sites": sites,
        "loss": windows.mean(text.loss),
        "depth": windows.mean(text.work.mean(0)),
        "depth_per_site": [windows.mean(layer) for layer in text.work],
        "by": tabulate(text.work, windows, attributes),
        "lookup": [
            {**token_share(decision, text.ids, windows), **lookups(decision, text.ids, first, windows)}
            for decision in text.decisions
        ],
        "stability": stability(text, windows),
        "skipped": skipped(text, kinds, windows),
    }


def stability(text: Tokens, windows: Windows) -> list[dict[str, Any]]:
    """Share of decisions that flip after a token is replaced, by distance to it, over all sites and for each site."""
    rows = []
    longest = int(text.distance.max())
    edges = [1, *(2**n + 1 for n in range(longest.bit_length() + 1) if 2**n < longest), longest + 1]
    for low, end in pairwise(edges):
        there = (text.distance >= low) & (text.distance < end)
        per_site = [windows.mean(layer, there) for layer in text.flips]
        rows.append(
            {"from": low, "to": end - 1, "flips": windows.mean(text.flips.mean(0), there), "per_site": per_site}
        )
    return rows


def skipped(text: Tokens, kinds: np.ndarray, windows: Windows) -> list[dict[str, Any]] | None:
    """Loss of the next token with skipping minus without, by kind of token; None if the method cannot run without.

    Over all tokens of a kind, and over those of them that were skipped at some site.
    """
    if text.full_loss is None:
        return None
    more, passed = text.loss - text.full_loss, ~text.decisions.all(0)
    groups = {"all": np.ones(len(kinds), bool), **dict(named(kinds))}
    return [
        {
            "kind": name,
            "tokens": int(chosen.sum()),
            "skipped": windows.mean(passed.astype(float), chosen),
            "loss": windows.mean(more, chosen),
            "loss_where_skipped": windows.mean(more, chosen & passed),
        }
        for name, chosen in groups.items()
    ]


def agreement(decisions: Sequence[np.ndarray], windows: Windows, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """For each pair of seeds, at each site: how often they decide alike, the rate by chance, and Cohen's kappa."""
    rows = []
    for one, other in combinations(range(len(decisions)), 2):
        sites = []
        for a, b in zip(decisions[one], decisions[other], strict=True):
            parts = [(x & y).astype(float) for x in (a, ~a) for y in (b, ~b)]
            sums = [windows.sums(part) for part in parts]
            sites.append(
                {
                    "agree": windows.of_sums(sums, _agree),
                    "chance": windows.of_sums(sums, _chance),
                    "kappa": windows.of_sums(sums, _kappa),
                }
            )
        rows.append({"seeds": [seeds[one], seeds[other]], "per_site": sites})
    return rows


def _agree(both: Any, first: Any, second: Any, neither: Any) -> Any:
    return (both + neither) / (both + first + second + neither)


def _chance(both: Any, first: Any, second: Any, neither: Any) -> Any:
    """Agreement of independent decisions with the same shares."""
    total = both + first + second + neither
    a, b = (both + first) / total, (both + second) / total
    return a * b + (1 - a) * (1 - b)


def _kappa(*table: Any) -> Any:
    agree, chance = _agree(*table), _chance(*table)
    return (agree - chance) / (1 - chance)
