"""The tuned part of docs/COMPARISON.md: who beats dense models on enwik8, in two tables, and how all were tuned."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from paper import contenders, search
from paper.comparison import table, verdicts, wrapped
from paper.contenders import DENSE, LONG, SHORT, Contender
from paper.depth import order, outcomes
from paper.depth_order import between_contenders, ranks, short_and_long
from paper.depth_tables import executed, trained
from paper.evidence import NOT_RUN
from paper.search import Search
from tokendepth.report.summary import DASH

ABOUT = (
    "Losses are on test text. All models have the same kind of block, optimiser, batches and number of steps "
    f"({LONG:,}), and about the executed FLOPs of six dense layers. "
    "[WHERE_DEPTH_PAYS.md](WHERE_DEPTH_PAYS.md#how-to-read-the-tables) explains the other columns, compares at equal "
    "training time and at equal loss, and has larger models and longer training. The rows come from "
    "`python -m paper search` and `depth`."
)
COLUMNS = """\
- **active**: the share of tokens that a routed block processes, averaged over routed blocks.
- **K/V bytes**: keys and values stored per token in float32, for the shares of tokens that the blocks processed; `of`
  gives the size reserved by the cache if that is more, since its shapes are fixed.
- **training FLOPs**: per token, forward and backward, counted as dispatched; all models train on as many tokens.
"""
CHANGED = (
    "**The rule was changed twice after results were known**, and everything that it concerns was run again. At first "
    "there was no warm-up, and deep models trained badly: twelve dense layers were worse than eight. In that search "
    "span at word ends was worse than dense models, and Mixture-of-Depths better. Then long runs had 100 steps of "
    "warm-up, and seeds of one dense model differed more than methods do, so long runs now warm up for an eighth of "
    "their steps, as short ones do. Two contenders, span with taught boundaries and span with entropy, were added "
    "after the first results on test text. The [log](LOG.md) has the numbers."
)
GAPS = """\
![Test loss of every method relative to dense models with the same FLOPs](figures/gaps-enwik8.png)

The first group has the models of this page; [WHERE_DEPTH_PAYS.md](WHERE_DEPTH_PAYS.md) explains all three.
"""
SELECTED = (
    f"Losses are on validation text after {SHORT:,} steps. The difference is relative to dense models with the same "
    "FLOPs; `second best` is that of the runner-up."
)


def section(results: Path, figures: Mapping[str, str], *, quick: bool = False) -> str:
    """`figures` are Markdown, by the name of their x axis."""
    (found, made), searched = outcomes(results, quick=quick), Search.read(results, quick=quick)
    if not (who := verdicts(found)):
        return f"{NOT_RUN}\n"
    parts = [
        GAPS,
        who,
        f"{wrapped(ABOUT)}\n",
        COLUMNS,
        f"### At equal executed FLOPs\n\n{executed(found, made)}",
        figures.get("", ""),
        f"### At equal training FLOPs\n\n{trained(found, made)}",
        figures.get("training", ""),
        f"### How models were tuned\n\n{rule()}\n{wrapped(_contenders())}\n\n{wrapped(CHANGED)}\n",
        f"### What was tuned\n\n{knobs()}",
        f"### Selected settings\n\n{wrapped(SELECTED)}\n\n{choices(searched)}",
        f"### Do short runs predict long ones?\n\n{short_and_long(order(results, quick=quick))}",
        between_contenders(ranks(found, made, searched)),
    ]
    return "\n".join(part for part in parts if part)


def _contenders() -> str:
    """Each of them has its own runs."""
    runs = sum(len(one.values) * len(contenders.RATES) for one in contenders.CONTENDERS if one.method == "span")
    return f"Every decider of span is a contender of its own, so span has {runs} runs."


def rule() -> str:
    """As search.py states it."""
    lines = (search.__doc__ or "").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("1. "))
    return "\n".join(lines[first : lines.index("", first)]) + "\n"


def knobs() -> str:
    rates = ", ".join(f"{rate:g}" for rate in sorted(contenders.RATES))
    rows = [[one.title, one.knob, "; ".join(one.values), one.why] for one in contenders.CONTENDERS]
    return f"Learning rates: {rates}.\n\n{table(['', 'knob', 'values', 'why this one'], rows, words=4)}"


def choices(found: Search) -> str:
    titles, rows = chosen(found, contenders.CONTENDERS)
    return table(titles, rows, words=2)


def chosen(found: Search, contended: Sequence[Contender]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of their table."""
    titles = [
        "",
        "chosen",
        "learning rate",
        "validation loss",
        "FLOPs",
        "dense, same FLOPs",
        "difference",
        "second best",
        "runs",
    ]
    rows = []
    for one in contended:
        count, lost = len(one.values) * len(contenders.RATES), found.lost[one]
        ended = f"{count - found.missing[one]} of {count}" + (f", {lost} lost" if lost else "")
        tried = found.tried[one]
        if not tried:
            rows.append([one.title, NOT_RUN, *[""] * 6, ended])
            continue
        # For dense models a rate is chosen at each number of layers; for all others one run.
        groups = [[t for t in tried if t.value == value] for value in one.values] if one is DENSE else [tried]
        for group in filter(None, groups):
            best, second = group[0], f"{group[1].difference:+.2%}" if len(group) > 1 else DASH
            rate = f"{best.rate:g}" + (" (the edge)" if best.at_the_edge else "")
            figures = [f"{best.loss:.4f}", f"{best.flops:,.0f}", f"{best.dense:.4f}", f"{best.difference:+.2%}"]
            rows.append([one.title, best.value, rate, *figures, second, ended])
    return titles, rows
