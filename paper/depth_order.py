"""Do short runs predict long ones? Settings of one contender, and contenders among each other, in both."""

import itertools
from collections.abc import Callable, Sequence

from paper import contenders
from paper.comparison import table, wrapped
from paper.contenders import DENSE, LONG, SHORT
from paper.depth import Entry, Order
from paper.evidence import NOT_RUN
from paper.outcomes import Outcomes
from paper.search import Search

Rank = tuple[float, float, str]
"""Relative difference to dense models after a short and after a long run, and the title of the contender."""


def kept(one: Order) -> bool | None:
    """Whether two settings keep their order; None if the long run is missing."""
    return None if one.long is None else one.short * one.long > 0


def short_and_long(found: list[Order]) -> str:
    words = (
        f"The two best settings of some contenders after {SHORT:,} and {LONG:,} steps, seed 0, on validation text: by "
        "how much the second's difference to dense models with the same FLOPs is above the first's."
    )
    rows = []
    for one in found:
        long = NOT_RUN if one.long is None else f"{one.long:+.2%}"
        shown = {None: "", True: "yes", False: "no"}[kept(one)]
        rows.append([one.contender.title, one.first, one.second, f"{one.short:+.2%}", long, shown])
    titles = ["", "first", "second", f"{SHORT:,} steps", f"{LONG:,} steps", "order kept"]
    return f"{wrapped(words)}\n\n{table(titles, rows, words=3)}"


def ranks(found: Outcomes, made: list[Entry], search: Search) -> list[Rank]:
    """The chosen setting of each contender besides dense models, the best after a short run first."""
    ran = {one.name: choice for one in contenders.CONTENDERS if one is not DENSE and (choice := search.choice(one))}
    rows = []
    for entry in made:
        choice, against = ran.get(entry.setting.method), found.beside(entry.setting)
        if choice is not None and isinstance(against, tuple):
            rows.append((choice.difference, against[1].mean, choice.contender.title))
    return sorted(rows)


def pairs_kept(rows: Sequence[Rank]) -> tuple[int, int]:
    """How many pairs keep their order, and how many there are."""
    pairs = list(itertools.combinations(rows, 2))
    return sum(first[1] < second[1] for first, second in pairs), len(pairs)


def between_contenders(rows: list[Rank]) -> str:
    """Whether those who lead after a short run lead after a long one."""
    if len(rows) < 2:
        return ""
    same, pairs = pairs_kept(rows)
    words = (
        f"The chosen setting of each contender, relative to dense models with the same executed FLOPs: after {SHORT:,} "
        f"steps (validation text, one seed) and after {LONG:,} (test text, mean over seeds). {same} of {pairs} pairs "
        "of contenders keep their order, so the settings chosen with short runs may not be the best for long ones. "
        f"Longer training helped {_moved(min, rows)} most and hurt {_moved(max, rows)} most."
    )
    lines = [[title, f"{short:+.2%}", f"{long:+.2%}"] for short, long, title in rows]
    return f"{wrapped(words)}\n\n{table(['', f'{SHORT:,} steps', f'{LONG:,} steps'], lines)}"


def _moved(most: Callable[..., Rank], rows: list[Rank]) -> str:
    return most(rows, key=lambda row: row[1] - row[0])[-1]
