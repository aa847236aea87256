"""docs/WHERE_DEPTH_PAYS.md, made from results/: how all were tuned, then test losses in two tables and a figure."""

from pathlib import Path

from paper import contenders, search
from paper.comparison import judge, table, verdicts, wrapped
from paper.contenders import LONG, SHORT
from paper.depth import TOKENS, Entry, Order, order, outcomes
from paper.evidence import NOT_RUN, needs_report_extra, show
from paper.outcomes import OUTSIDE, Cost, Outcomes
from paper.search import Search
from tokendepth.report.summary import DASH
from tokendepth.runs.files import disk_faults, write_bytes

HEAD = f"""\
# Where depth pays

Every method on the bytes of enwik8, tuned alike, and judged by dense models of the same cost. All have the same block
(width 256, RMSNorm, rotary positions, SwiGLU, queries and keys normed), optimiser, batches (64 sequences of 256 bytes)
and length ({LONG:,} steps); they differ in what they do with depth. Choices were made on validation text; every loss in
the tables of results is of the **test** split, its first {TOKENS:,} bytes, executed sparsely. Nobody trains by two
passes: only budget routing has them, and on this text they cost it quality. This page is generated from
[search.json](../results/search.json) and [depth.json](../results/depth.json) by `make readme`; the rows come from
`python -m paper search` and `python -m paper depth`. What has no row yet is `not run`. The older comparison, in which
only budget routing was tuned, is [COMPARISON.md](COMPARISON.md).
"""
NOTES = """\
- **loss**: nats per byte, executed; mean ± standard deviation over n seeds.
- **dense, same FLOPs**: on the straight line between dense models with 3, 4, 6, 8 and 12 layers of the same seeds. Up
  to 3% beyond the ends the last one stands for it; further off it is `outside`.
- **FLOPs**: executed, per token, with routers and output head. Rows of attention are counted as wide as the context,
  also where a method packs its tokens into a shorter sequence.
- **training FLOPs**: per token, forward and backward, counted as they are dispatched; all train on as many tokens.
- **K/V bytes**: keys and values per token in float32, in the cache after reading test text; first seed.
- `random routing` has the budget, layers and rate that the search chose for budget routing, and throws dice.
"""


def document(results: Path, figure: str, *, quick: bool = False) -> str:
    found, made = outcomes(results, quick=quick)
    parts = [
        HEAD,
        f"## The rule of tuning\n\n{rule()}",
        f"### Who is tuned, and by what\n\n{knobs()}",
        f"### What was chosen\n\n{choices(Search.read(results, quick=quick))}",
        f"### Whether short runs tell\n\n{short_and_long(order(results, quick=quick))}",
        f"## At equal executed FLOPs\n\n{executed(found, made)}",
        verdicts(found) if made else "",
        figure,
        f"## At equal training FLOPs\n\n{trained(found, made)}",
        f"## How to read the tables\n\n{NOTES}",
    ]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


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
    titles = [
        "",
        "chosen",
        "rate",
        "validation loss",
        "FLOPs",
        "dense, same FLOPs",
        "difference",
        "second best",
        "runs",
    ]
    rows = []
    for one in contenders.CONTENDERS:
        count, lost = len(one.values) * len(contenders.RATES), found.lost[one]
        ended = f"{count - found.missing[one]} of {count}" + (f", {lost} lost" if lost else "")
        tried = found.tried[one]
        if not tried:
            rows.append([one.title, NOT_RUN, *[""] * 6, ended])
            continue
        best, second = tried[0], f"{tried[1].difference:+.2%}" if len(tried) > 1 else DASH
        rate = f"{best.rate:g}" + (" (the edge)" if best.at_the_edge else "")
        figures = [f"{best.loss:.4f}", f"{best.flops:,.0f}", f"{best.dense:.4f}", f"{best.difference:+.2%}"]
        rows.append([one.title, best.value, rate, *figures, second, ended])
    return table(titles, rows, words=2)


def short_and_long(found: list[Order]) -> str:
    words = (
        f"The two best settings of some contenders at {SHORT:,} steps and at {LONG:,}, seed 0: how far the second's "
        "validation loss is from the first's."
    )
    rows = []
    for one in found:
        long = NOT_RUN if one.long is None else f"{one.long:+.2%}"
        kept = "" if one.long is None else "yes" if one.short * one.long > 0 else "no"
        rows.append([one.contender.title, one.first, one.second, f"{one.short:+.2%}", long, kept])
    titles = ["", "first", "second", f"{SHORT:,} steps", f"{LONG:,} steps", "order kept"]
    return f"{wrapped(words)}\n\n{table(titles, rows, words=3)}"


def executed(found: Outcomes, made: list[Entry]) -> str:
    titles = ["setting", "rate", "loss", "dense, same FLOPs", "difference", "", "FLOPs", "active", "parameters"]
    rows = []
    for entry in made:
        setting, loss = entry.setting, found.stat(entry.setting, "loss")
        cells = [setting.title, f"{entry.rate:g}", show(loss)]
        if loss is None:
            rows.append([*cells, *[""] * (len(titles) + 1 - len(cells))])
            continue
        flops, active, parameters = (
            found.stat(setting, name) for name in ("flops_per_token", "active_fraction", "parameters")
        )
        assert flops is not None
        assert active is not None
        assert parameters is not None
        row = found.first_row(setting) or {}
        kept = f"{row['kv_bytes_per_token']:,.0f}" if "kv_bytes_per_token" in row else DASH
        figures = [f"{flops.mean:,.0f}", f"{active.mean:.3f}", f"{parameters.mean:,.0f}", kept]
        rows.append([*cells, *_beside(found, entry, "flops_per_token"), *figures])
    return table([*titles, "K/V bytes"], rows)


def trained(found: Outcomes, made: list[Entry]) -> str:
    rows = []
    for entry in made:
        loss, flops = found.stat(entry.setting, "loss"), found.stat(entry.setting, "training_flops")
        cells = _beside(found, entry, "training_flops") if loss else ["", "", ""]
        rows.append([entry.setting.title, show(loss), *cells, f"{flops.mean:,.0f}" if flops else ""])
    return table(["setting", "loss", "dense, same training FLOPs", "difference", "", "training FLOPs"], rows)


def _beside(found: Outcomes, entry: Entry, by: Cost) -> list[str]:
    """The loss of dense models at the same cost, how far from it this one is, and the verdict."""
    if entry.setting.method == "dense":
        return [DASH, DASH, ""]
    against = found.beside(entry.setting, by=by)
    if against is None:
        return [NOT_RUN, "", ""]
    if against == OUTSIDE:
        return [OUTSIDE, DASH, ""]
    dense, difference = against
    return [f"{dense.mean:.4f}", difference.text("+.2%"), judge(difference)]


def write(results: Path, path: Path, *, quick: bool = False) -> Path:
    """The page at `path` and its figure in `figures/` beside it."""
    with needs_report_extra(results):
        from paper.tradeoffs import draw

    folder, figure = path.parent / "figures", ""
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found, made = outcomes(results, quick=quick)
    if made and (drawing := draw(found, split="test")):
        write_bytes(folder / f"{drawing.name}.svg", drawing.svg)
        write_bytes(folder / f"{drawing.name}.png", drawing.png)
        figure = f"![](figures/{drawing.name}.png)\n\n{wrapped(drawing.caption)}\n"
    write_bytes(path, document(results, figure, quick=quick).encode())
    return path
