"""docs/COMPARISON.md and its figures, made from results/: all methods tuned alike, and two older tables, untuned.

A setting without a row is `not run`.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paper.evidence import NOT_RUN, needs_report_extra, show
from paper.outcomes import OUTSIDE, Outcomes
from paper.settings import LAYERS, SAME_FLOPS, SAME_PARAMETERS, SHAKESPEARE, Setting
from paper.shares import off, older
from tokendepth.report.summary import DASH, Stat
from tokendepth.report.tables import piped
from tokendepth.runs.files import disk_faults, write_bytes

if TYPE_CHECKING:
    from tokendepth.report.figures import Drawing

HEAD = """\
# Every method, compared

Every method with tokens really skipped, compared with dense models with the same executed FLOPs. The methods are
described in [methods/](methods/). `not run`: no result yet. This page is generated from [results/](../results/) by
`make readme`.

## enwik8 by bytes, all tuned with the same search
"""
UNTUNED = f"""\
## Tiny-Shakespeare, not tuned

All methods were trained with the same optimiser, learning rate (3e-4), batches and number of steps, with the exceptions
in [the notes](#notes); losses are on validation text. **Only budget routing was tuned**, on this same text; the others
ran at one or two settings. The rows come from `python -m paper compare`.

**Matched parameters** has the models whose parameters are within {SAME_PARAMETERS:.0%} of the dense model's. For this,
methods that share weights between layers get a wider feed-forward network; Switch, whose experts multiply the
parameters, gets a narrower one.

**Matched FLOPs** has all models. The FLOPs of a method cannot always be set, so each loss is compared with dense models
at the same executed FLOPs: linear interpolation between those with {min(LAYERS)} to {max(LAYERS)} layers and the same
seeds. Up to {SAME_FLOPS:.0%} beyond the ends the last one is used, since routers cost a little more than the layers
they control; further off it is `outside`.

- **loss**: nats per character on validation text, with tokens really skipped; mean ± standard deviation over n seeds.
- **active**: the share of tokens that a routed block processes, averaged over routed blocks.
- **work skipped**: share of the method's own token-layer operations that were not executed.
- **FLOPs**: executed, per token, with routers and output head.
- **training PFLOPs**: for the whole run, forward and backward, counted as dispatched, in 10^15.
- **K/V bytes**: keys and values per token in float32, for the shares of tokens that the blocks processed on validation
  text; `of` gives the size reserved by the cache if that is more, since its shapes are fixed.
- **speed**: of a forward pass on a CPU without compiling, relative to the dense model with six layers; above 1 is
  faster. It depends on the number of threads and on compiling: [SPEED.md](SPEED.md) has two cores and a GPU.
"""
NOTES = """\
- Switch chooses among experts with the same cost: it skips a token only if its expert is full, and saves no depth by
  design.
- TSA and ACT take no budget, so two prices of depth are tried instead of two budgets.
- Early exits are shown at the threshold whose work is closest to the budget for the first seed, whatever its loss.
- Budget and random routing are trained with two forward passes per step at random budgets, so that one model serves
  every budget. On enwik8 no method is: there random budgets cost quality and the second pass gained nothing
  ([log](LOG.md)).
- `two passes` skips nothing: routers keep and weigh all tokens. Training takes two forward passes per step, whose
  predictions are drawn together, as for budget routing. `half the batch` is budget routing at the training cost of a
  dense step.
"""
TITLES = ["setting", "loss", "active", "work skipped", "FLOPs", "training PFLOPs", "parameters", "K/V bytes", "speed"]


def document(outcomes: Outcomes, figure: str, tuned: str) -> str:
    """The whole page; `figure` and `tuned`, the part about enwik8, are Markdown."""
    parts = [HEAD, tuned, UNTUNED]
    shares = outcomes.shares()
    if note := older(shares):
        parts.append(wrapped(f"{note} Their shares are {off(shares)}.") + "\n")
    parts.append(f"### Matched parameters\n\n{matched_parameters(outcomes)}")
    parts.append(f"### Matched FLOPs\n\n{matched_flops(outcomes)}")
    parts.append(verdicts(outcomes))
    parts.append(trained_alike(outcomes))
    if timed := _timed(outcomes):
        parts.append(f"Speeds were measured on {timed}.\n")
    parts += [figure, f"## Notes\n\n{NOTES}"]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def wrapped(text: str) -> str:
    """Lines of at most 120 characters; those of a list item are indented."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def picture(name: str, caption: str, folder: str = "figures") -> str:
    """A figure and its caption, whose first sentence is also the alternative text."""
    first = caption.split(". ")[0].removesuffix(".")
    return f"![{first}]({folder}/{name}.png)\n\n{wrapped(caption)}\n"


# --- the tables -------------------------------------------------------------------------------------------------------


def matched_parameters(outcomes: Outcomes) -> str:
    rows = []
    for setting in outcomes.comparison.settings:
        if outcomes.has_matched_parameters(setting):
            cells, difference = _cells(outcomes, setting), outcomes.against_six_layers(setting)
            itself = setting == outcomes.comparison.settings[0]
            words = difference.text("+.2%") if difference and not itself else DASH
            rows.append([*cells[:2], words, *cells[2:]])
    return table([*TITLES[:2], "difference to dense, 6 layers", *TITLES[2:]], rows)


def matched_flops(outcomes: Outcomes) -> str:
    rows = []
    for setting in outcomes.comparison.settings:
        cells = _cells(outcomes, setting)
        rows.append([*cells[:2], *beside(outcomes, setting), *cells[2:]])
    return table([*TITLES[:2], "dense, same FLOPs", "difference", *TITLES[2:]], rows)


def table(titles: list[str], rows: list[list[str]], *, words: int = 1) -> str:
    """The first `words` columns are words, the others numbers."""
    rows = rows or [[NOT_RUN, *[""] * (len(titles) - 1)]]
    lines = [titles, ["---"] * words + ["--:"] * (len(titles) - words), *rows]
    return piped(lines)


def _cells(outcomes: Outcomes, setting: Setting) -> list[str]:
    """In the order of TITLES."""
    loss = outcomes.stat(setting, "loss")
    if loss is None:
        return [setting.title, NOT_RUN, *[""] * (len(TITLES) - 2)]
    forms = {"active_fraction": ".3f", "tlops_skipped": ".1%", "flops_per_token": ",.0f"}
    means = [_mean(outcomes.stat(setting, name), form) for name, form in forms.items()]
    parameters = _mean(outcomes.stat(setting, "parameters"), ",.0f")
    cost, costs = outcomes.cost(setting), outcomes.costs_of(setting)
    if cost is None or costs is None:
        return [setting.title, show(loss), *means, NOT_RUN, parameters, NOT_RUN, NOT_RUN]
    kept = keys_and_values(outcomes, setting)
    training, speed = f"{costs['training FLOPs'] / 1e15:.2f}", f"{cost['time']['speedup']:.2f}"
    return [setting.title, show(loss), *means, training, parameters, kept, speed]


def keys_and_values(outcomes: Outcomes, setting: Setting) -> str:
    """Bytes stored per token, and those that the cache reserves, if these are more."""
    stored, room = (_mean(outcomes.stat(setting, name), ",.0f") for name in ("kv_bytes", "kv_bytes_reserved"))
    return stored if stored == room else f"{stored} of {room}"


def _mean(stat: Stat | None, form: str) -> str:
    assert stat is not None, "what has a loss has them all"
    return format(stat.mean, form)


def trained_alike(outcomes: Outcomes) -> str:
    """Is it the routing, or that training saw every sequence twice? Budget routing vs. models that did so, too."""
    if not outcomes.of("two_passes"):
        return ""
    trained = [setting for setting in outcomes.of("budget") if setting.level != "any"]
    rows = [
        [s.title, show(loss), *beside(outcomes, s, "two_passes")] for s in trained if (loss := outcomes.stat(s, "loss"))
    ]
    titles = ["setting", "loss", "two passes, same FLOPs", "difference"]
    words = (
        "Budget routing compared with models that skip nothing, have the same executed FLOPs and were also trained "
        "with two forward passes per step:"
    )
    return f"{wrapped(words)}\n\n{table(titles, rows)}"


def beside(outcomes: Outcomes, setting: Setting, line: str = "dense") -> tuple[str, str]:
    """The loss of dense models at the same executed FLOPs, and the difference to it."""
    if setting.method == line:
        return DASH, DASH
    found = outcomes.beside(setting, line)
    if found is None:
        return NOT_RUN, ""
    if found == OUTSIDE:
        return OUTSIDE, DASH
    dense, difference = found
    return f"{dense.mean:.4f}", difference.text("+.2%")


# --- in words ---------------------------------------------------------------------------------------------------------

EVEN = "no clear difference"


def judge(difference: Stat) -> str:
    """Better or worse than dense models of the same cost, or neither; one seed decides nothing."""
    if difference.std is None:
        return "undecided"
    if abs(difference.mean) <= 2 * difference.std:
        return EVEN
    return "better" if difference.mean < 0 else "worse"


def verdicts(outcomes: Outcomes) -> str:
    """Who beats dense models with the same executed FLOPs, by rule."""
    found: dict[str, list[str]] = {"better": [], EVEN: [], "undecided": [], "worse": [], OUTSIDE: []}
    for setting in outcomes.comparison.settings:
        if setting.method == "dense":
            continue
        against = outcomes.beside(setting)
        if against == OUTSIDE:
            found[OUTSIDE].append(setting.title)
        elif against is not None:
            found[judge(against[1])].append(setting.title)
    if not any(found.values()):
        return ""
    rule = "by more than two standard deviations over the seeds; a single seed decides nothing"
    lines = [wrapped(f"Compared with dense models with the same executed FLOPs ({rule}):"), ""]
    shown = {name: titles for name, titles in found.items() if titles or name in ("better", "worse")}
    lines += [wrapped(f"- {name}: {'; '.join(titles) or 'none'}.") for name, titles in shown.items()]
    return "\n".join(lines) + "\n"


def _timed(outcomes: Outcomes) -> str:
    times = [cost["time"] for s in outcomes.comparison.settings if (cost := outcomes.cost(s))]
    return "; ".join(dict.fromkeys(f"{t['device']}, {t['batch']} sequences of {t['context']} tokens" for t in times))


# --- writing ----------------------------------------------------------------------------------------------------------


def write(results: Path, path: Path, *, quick: bool = False) -> Path:
    """Write the page to `path` and its figures to `figures/` next to it; a figure without numbers is not drawn."""
    with needs_report_extra(results):
        from paper import depth, tuned
        from paper.tradeoffs import EXECUTED, TRAINED, draw

    outcomes, (study, _) = Outcomes.read(results, SHAKESPEARE, quick=quick), depth.outcomes(results, quick=quick)
    drawn = {axis.name: draw(study, split="test", axis=axis) for axis in (EXECUTED, TRAINED)}
    figures = write_figures({**drawn, "shakespeare": draw(outcomes)}, path.parent / "figures")
    about_study = tuned.section(results, figures, quick=quick)
    write_bytes(path, document(outcomes, figures.get("shakespeare", ""), about_study).encode())
    return path


def write_figures(drawings: Mapping[str, "Drawing | None"], folder: Path) -> dict[str, str]:
    """Write each figure that has numbers to `folder`, as SVG and PNG; the Markdown that shows it, by its key."""
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    shown = {}
    for key, drawing in drawings.items():
        if drawing is not None:
            write_bytes(folder / f"{drawing.name}.svg", drawing.svg)
            write_bytes(folder / f"{drawing.name}.png", drawing.png)
            shown[key] = picture(drawing.name, drawing.caption)
    return shown
