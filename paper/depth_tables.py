"""Tables of the study of depth: each model's loss beside that of dense models with the same cost."""

import math
from collections.abc import Mapping
from pathlib import Path

from paper.comparison import judge, keys_and_values, table, wrapped
from paper.depth import TIMES, Entry, measured_with, step_times, with_steps
from paper.evidence import BITS, NOT_RUN, show
from paper.outcomes import OUTSIDE, Cost, Outcomes
from tokendepth.report.summary import DASH, Stat
from tokendepth.runs.results import rows_so_far

SAME = 0.001
"""FLOPs that differ by less are the same by both conventions."""
FULL_CONTEXT = "difference, full context"
BESIDE = ["setting", "loss", "dense, same FLOPs", "difference", "verdict", FULL_CONTEXT, "FLOPs"]


def executed(found: Outcomes, made: list[Entry]) -> str:
    titles = ["setting", "learning rate", "loss", *BESIDE[2:], "active"]
    rows = []
    for entry in made:
        setting, loss = entry.setting, found.stat(entry.setting, "loss")
        cells = [setting.title, f"{entry.rate:g}", show(loss)]
        if loss is None:
            rows.append([*cells, *[""] * (len(titles) + 2 - len(cells))])
            continue
        flops, active, parameters = (
            found.stat(setting, name) for name in ("flops_per_token", "active_fraction", "parameters")
        )
        assert flops is not None
        assert active is not None
        assert parameters is not None
        figures = [
            f"{flops.mean:,.0f}",
            f"{active.mean:.3f}",
            f"{parameters.mean:,.0f}",
            keys_and_values(found, setting),
        ]
        rows.append([*cells, *_beside(found, entry, "flops_per_token"), by_full_rows(found, entry), *figures])
    return table([*titles, "parameters", "K/V bytes"], rows)


def trained(found: Outcomes, made: list[Entry]) -> str:
    rows = []
    for entry in made:
        loss, flops = found.stat(entry.setting, "loss"), found.stat(entry.setting, "training_flops")
        cells = _beside(found, entry, "training_flops") if loss else ["", "", ""]
        rows.append([entry.setting.title, show(loss), *cells, f"{flops.mean:,.0f}" if flops else ""])
    titles = ["setting", "loss", "dense, same training FLOPs", "difference", "verdict", "training FLOPs"]
    return table(titles, rows)


def timed(found: Outcomes, made: list[Entry], results: Path, figures: Mapping[str, str]) -> str:
    """A table and a figure for every device on which steps were timed; all training runs have as many steps."""
    parts = []
    for device, times in step_times(results).items():
        there, rows = with_steps(found, times), []
        for entry in made:
            loss, step = there.stat(entry.setting, "loss"), there.stat(entry.setting, "step_ms")
            if loss and step and not math.isnan(step.mean):
                spent = f"{step.mean:,.0f}" if step.mean >= 100 else f"{step.mean:.2f}"
                rows.append([entry.setting.title, show(loss), *_beside(there, entry, "step_ms"), spent])
        titles = ["setting", "loss", "dense, same time", "difference", "verdict", "ms per training step"]
        parts.append(f"### {device}\n\n{table(titles, rows)}\n{figures.get(device, '')}")
    if not parts:
        return f"{NOT_RUN}\n"
    words = (
        "One compiled training step of each model, with nothing else on the device: on a GPU in bfloat16 with a CUDA "
        "graph, on a CPU in float32 with `--train.compile on`. Losses are those at equal executed FLOPs, of the same "
        "models on every device. Models that were not timed on a device are left out. How they were timed, and what "
        "has become faster since, is in the [log](LOG.md). Measured with: "
        f"{measured_with(rows_so_far(results / TIMES))}."
    )
    return "\n".join([f"{wrapped(words)}\n", *parts])


def rows_beside(found: Outcomes, made: list[Entry]) -> list[list[str]]:
    """Of the entries that have run."""
    rows = []
    for entry in made:
        loss, flops = found.stat(entry.setting, "loss"), found.stat(entry.setting, "flops_per_token")
        if loss and flops:
            beside = _beside(found, entry, "flops_per_token", _bytes_per_token(found, entry))
            cells = [show(per_byte(found, entry, loss)), *beside, by_full_rows(found, entry)]
            rows.append([entry.setting.title, *cells, f"{flops.mean:,.0f}"])
    return rows


def _bytes_per_token(found: Outcomes, entry: Entry) -> float:
    """For the evaluated text, which is the same for all models of a scale."""
    if entry.config.data.tokens == "byte":
        return 1.0
    sparse = (found.first_row(entry.setting) or {})["evaluation"]["sparse"]
    return BITS * sparse["loss"] / sparse["bits_per_byte"]


def per_byte(found: Outcomes, entry: Entry, loss: Stat) -> Stat:
    size = _bytes_per_token(found, entry)
    return Stat(tuple(value / size for value in loss.values))


def by_full_rows(found: Outcomes, entry: Entry) -> str:
    """The difference to dense models with attention counted over the full context, if that is not the same."""
    packed, full = (found.stat(entry.setting, name) for name in ("flops_per_token", "full_rows_flops"))
    if packed is None or full is None or full.mean < (1 + SAME) * packed.mean:
        return ""
    return _beside(found, entry, "full_rows_flops")[1]


def _beside(found: Outcomes, entry: Entry, by: Cost, bytes_per_token: float = 1.0) -> list[str]:
    """The loss of dense models at the same cost, the difference to it, and the verdict."""
    if entry.setting.method == "dense":
        return [DASH, DASH, ""]
    against = found.beside(entry.setting, by=by)
    if against is None:
        return [NOT_RUN, "", ""]
    if against == OUTSIDE:
        return [OUTSIDE, DASH, ""]
    dense, difference = against
    return [f"{dense.mean / bytes_per_token:.4f}", difference.text("+.2%"), judge(difference)]
