"""The same small search for every method: eight short runs each, judged on validation text by a rule written first.

1. Every contender in `contenders.py` gets eight runs: four learning rates times two values of its main knob. Dense
   models, which all others are compared with, get the four rates at 4, 6 and 8 layers. Seed 0, 800 steps: 100 of
   warm-up, then a cosine.
2. Each run is evaluated with tokens really skipped, on the first 262,144 bytes of the validation split.
3. Each loss is compared with dense models with the same executed FLOPs: linear interpolation between the best of four
   rates at 4, 6 and 8 layers, constant beyond the ends. Each contender gets the setting with the lowest loss relative
   to dense models. Dense models get the rate with the lowest loss at each number of layers. Attention within a packed
   sequence is counted over that sequence.
4. A model that can run at several costs is judged where its FLOPs are closest to those of six dense layers.
5. A run whose loss or gradient stops being finite has lost.

Nothing else is chosen, and nothing on the test split. The choices are read from the rows; none of them is written in
the code.

    from paper.search import search
    search(max_minutes=9)                   # repeat until nothing is left
"""

from dataclasses import dataclass
from pathlib import Path

from paper import contenders, grid, tables
from paper.contenders import DENSE, SHORT, Contender, miniature
from paper.grid import Deadline, Progress, same
from paper.outcomes import interpolate
from tokendepth.config import RunConfig, from_dict, to_dict
from tokendepth.errors import UserError
from tokendepth.runs.results import Row, add_rows, rows_so_far
from tokendepth.runs.run import Run

ROWS = "search.json"
TOKENS = 2**18
NOT_FINITE = "not finite"


def runs(*, quick: bool = False) -> dict[str, RunConfig]:
    """Every run of the search by name, one learning rate after the other."""
    found = {
        one.run_name(value, rate, SHORT): one.config(value, rate, SHORT)
        for rate in contenders.RATES
        for one in contenders.CONTENDERS
        for value in one.values
    }
    return {name: miniature(config) for name, config in found.items()} if quick else found


def search(
    *,
    quick: bool = False,
    max_minutes: float | None = None,
    out: Path = Path("runs/search"),
    results: Path = Path("results"),
    workers: int | None = None,
    show: bool = True,
) -> Progress:
    """Give every run of the search a row in `results`; run folders go to `out`.

    `quick` runs a miniature of everything on this CPU, so give it its own `results`.
    """
    if max_minutes is not None and not max_minutes > 0:
        raise UserError(f"--max-minutes is {max_minutes:g}; expected a number above 0")
    configs, path = runs(quick=quick), results / ROWS
    tokens = tables.MINIATURE_TOKENS if quick else TOKENS
    how = {"workers": workers, "tokens": tokens, "here": quick, "show": show, "also": wall_clock}
    done = grid.fill(configs, out, path, Deadline.after(max_minutes), **how)
    lost = {name: words for name, words in done.failed.items() if NOT_FINITE in words}
    add_rows(path, [{"name": n, "config": to_dict(configs[n]), "failed": w} for n, w in lost.items()], ("config",))
    return Progress({name: words for name, words in done.failed.items() if name not in lost}, done.left)


def wall_clock(run: Run) -> Row:
    """Seconds from the first file of a run to its evaluation, with other runs on the device and all pauses."""
    first, last = (run.path / name for name in ("config.json", "eval.json"))
    return {"wall_seconds": last.stat().st_mtime - first.stat().st_mtime}


# --- the rule ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """One run of the search, compared with dense models of the same cost."""

    contender: Contender
    value: str
    rate: float
    row: Row
    loss: float
    """With real skipping, on validation text."""
    flops: float
    """Executed, per token."""
    dense: float
    """Loss of dense models with the same FLOPs."""

    @property
    def difference(self) -> float:
        return self.loss / self.dense - 1

    @property
    def at_the_edge(self) -> bool:
        """Whether its rate is the highest or lowest that was tried, so that a better one may lie beyond."""
        return self.rate in (min(contenders.RATES), max(contenders.RATES))


@dataclass(frozen=True)
class Search:
    """The rows of each contender, ranked."""

    tried: dict[Contender, list[Tried]]
    """The best first, without runs that diverged."""
    lost: dict[Contender, int]
    missing: dict[Contender, int]
    target: float | None
    """FLOPs of the dense models with six layers; None before they ran."""

    @classmethod
    def read(cls, results: Path, *, quick: bool = False) -> "Search":
        path = results / ROWS
        rows = {same(from_dict(row["config"])): row for row in rows_so_far(path)}
        found: dict[Contender, list[tuple[str, float, Row]]] = {}
        lost, missing = dict.fromkeys(contenders.CONTENDERS, 0), dict.fromkeys(contenders.CONTENDERS, 0)
        for one in contenders.CONTENDERS:
            found[one] = []
            for value in one.values:
                for rate in contenders.RATES:
                    config = one.config(value, rate, SHORT)
                    row = rows.get(same(miniature(config) if quick else config))
                    lost[one] += row is not None and "failed" in row
                    missing[one] += row is None
                    if row is not None and "failed" not in row:
                        found[one].append((value, rate, row))
        line = _dense_line(found[DENSE])
        target = line[len(line) // 2][0] if line else None
        tried = {one: _judged(one, tries, line, target) for one, tries in found.items()}
        return cls(tried, lost, missing, target)

    def choice(self, contender: Contender) -> Tried | None:
        """The best of all its runs; None before all have finished."""
        tried = self.tried[contender]
        return tried[0] if tried and not self.missing[contender] else None

    def rate_of_dense(self, layers: int) -> float | None:
        """The best rate at the nearest number of layers in the search."""
        if self.missing[DENSE]:
            return None
        nearest = min(self.tried[DENSE], key=lambda one: (abs(_layers(one.row) - layers), one.loss))
        return nearest.rate


def _dense_line(tries: list[tuple[str, float, Row]]) -> list[tuple[float, float]]:
    """FLOPs and loss at each number of layers, with the best rate."""
    best: dict[str, tuple[float, float]] = {}
    for value, _, row in tries:
        place = row["evaluation"]["flops_per_token"], row["evaluation"]["sparse"]["loss"]
        best[value] = min(best.get(value, place), place, key=lambda one: one[1])
    return sorted(best.values())


def _judged(
    one: Contender, tries: list[tuple[str, float, Row]], line: list[tuple[float, float]], target: float | None
) -> list[Tried]:
    if target is None:
        return []
    judged = []
    for value, rate, row in tries:
        point = nearest_point(row, target)
        loss, flops = point["sparse"]["loss"], point["flops_per_token"]
        on_the_line = min(max(flops, line[0][0]), line[-1][0])
        judged.append(Tried(one, value, rate, row, loss, flops, float(interpolate(line, on_the_line))))
    return sorted(judged, key=lambda tried: tried.difference)


def nearest_point(row: Row, flops: float) -> Row:
    """The evaluation of a row; for a model that ran at several costs, the one closest to `flops`."""
    points = row["evaluation"]["curve"] or [row["evaluation"]]
    return min(points, key=lambda point: abs(point["flops_per_token"] - flops))


def _layers(row: Row) -> int:
    return row["config"]["model"]["n_layer"]
