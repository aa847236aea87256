"""docs/REPRODUCTION.md, made from results/: python -m paper.document

Every published number beside ours, soft and executed, with a verdict by rule; then one paragraph for each finding. A
number that has no row is `not run`.
"""

import math
import textwrap
from pathlib import Path

from paper.claims import claims
from paper.evidence import NOT_RUN, Evidence, collapses, needs_report_extra, show
from paper.findings import findings
from paper.findings.finding import Finding
from paper.open_questions import convergence, open_questions
from paper.tables import TABLES, Line, Table
from paper.verdict import RULE, judge, judge_speedup
from tokendepth.report.summary import COLLAPSE
from tokendepth.runs.files import disk_faults, write_bytes
from tokendepth.runs.results import Row

QUANTITIES = {
    "parameters": ("parameters", ",.0f", ("parameters",), None),
    "loss": ("loss, nats", ".4f", ("soft", "loss"), ("hard", "loss")),
    "bits_per_character": ("bits per character", ".4f", ("soft", "bits_per_character"), ("hard", "bits_per_character")),
    "accuracy": ("accuracy", ".4f", ("soft", "accuracy"), ("hard", "accuracy")),
    "perplexity": ("perplexity", ".3f", ("soft", "perplexity"), ("hard", "perplexity")),
    "active_fraction": ("active fraction", ".3f", ("soft", "active_fraction"), ("hard", "active_fraction")),
    "tlops_saved": ("TLOps saved", ".1%", ("tlops_saved_soft",), ("tlops_skipped",)),
}
"""Published key: what it is called, its format, and where ours is, soft and hard."""
EXITED = {"loss": ("sparse", "loss"), "bits_per_character": ("sparse", "bits_per_character"),
          "active_fraction": ("sparse", "active_fraction"), "tlops_saved": ("tlops_skipped",)}  # fmt: skip
"""Where the same numbers are in one execution of an early-exit model."""
READ_EARLY = {key: ("read_early", key) for key in EXITED} | {"tlops_saved": ("tlops_saved_read_early",)}
"""And where its answers alone are taken early."""

MINIATURE = """\
> **A miniature**, made by `--quick`: models of a few thousand parameters after four steps. It shows how the page is
> made; its numbers and verdicts say nothing about the paper.

"""
HEAD = """\
# The paper, reproduced

*Adaptive Computation Depth via Learned Token Routing in Transformers* (A. A. A. Mohammed), number by number. This page
is generated from [results/](../results/) by `make readme`, and a test fails when it is stale. The published numbers are
in [paper/paper.json](../paper/paper.json); ours come from `python -m paper reproduce all --seeds 3` and, on
Tiny-Shakespeare, also from earlier runs of the same configs ([results/shakespeare.json](../results/shakespeare.json)).

The paper's losses are means of 20 random batches of one seed, and its active fractions those of one training batch with
dropout on. Ours are taken over the whole validation split without dropout, as mean ± standard deviation over n seeds.
**Soft** is the paper's mode: every layer is computed, and a gate scales what it adds. **Executed** is the same trained
model with its decisions rounded to yes or no at its threshold, which is what skipping does.

{took}

## The rule

{rule}

One per cent is more than the differences between models on which the paper's claims rest (0.4% to 0.7%): that two
losses are reproduced does not make the difference between them so. The findings below look at the differences.

A number that stands in two tables is counted once; bits per character, which are the loss again, and a dense model's
active fraction of 1 are not counted. Second readings are counted apart.

| verdict | numbers | in second readings |
|---|--:|--:|
{counts}

"""


class Tally:
    """Verdicts, each number's once; those of second readings apart."""

    def __init__(self) -> None:
        self._found: dict[bool, dict[tuple, str]] = {False: {}, True: {}}

    def add(self, what: tuple, verdict: str, *, second: bool = False) -> None:
        self._found[second].setdefault(what, verdict)

    def rows(self) -> str:
        kinds = ("reproduced", "differs", "not supported", "other machine", NOT_RUN)
        counts = [[kind, *(list(found.values()).count(kind) for found in self._found.values())] for kind in kinds]
        return "\n".join(f"| {' | '.join(map(str, line))} |" for line in counts)


def document(evidence: Evidence, figures: dict[str, str]) -> str:
    """The whole page; `figures` are paths, relative to it, by caption."""
    tally = Tally()
    parts = [_section(name, table, evidence, tally) for name, table in TABLES.items() if table.lines]
    parts += [f"### Steps to a loss\n\n{convergence(evidence)}\n\n", _times(evidence, tally)]
    took = _wrapped(_took(evidence))
    head = (MINIATURE if evidence.quick else "") + HEAD.format(rule=RULE, counts=tally.rows(), took=took)
    found = "".join(f"### {f.title}\n\n{_wrapped(f'{_bold(f, evidence)}{f.text}')}\n\n" for f in findings(evidence))
    found += (
        "### Claims in the text\n\nReproduced here is what lies within two standard deviations, but not more than 10% "
        f"away, or within what was rounded away in print.\n\n{claims(evidence)}\n\n"
    )
    answers = "".join(f"### {title}\n\n{text}\n\n" for title, text in open_questions(evidence))
    pictures = "".join(f"![]({path})\n\n{_wrapped(caption)}\n\n" for caption, path in figures.items())
    sections = (
        f"## Findings\n\n{found}## The paper's open questions\n\n{answers}## Every number\n\n{''.join(parts)}## "
        f"Figures\n\n{pictures}"
    )
    return (head + sections).rstrip() + "\n"


def _took(evidence: Evidence) -> str:
    """What the calls took together, on each device; the scaling study apart, and what was measured again later."""
    said = []
    for device in dict.fromkeys(call["device"] for call in evidence.calls):
        for scaling, what in ((False, "the tables"), (True, "the scaling study")):
            calls = [c for c in evidence.calls if c["device"] == device and (c["table"] == "scaling") == scaling]
            if calls:
                first = [call for call in calls if call["commit"] == calls[0]["commit"]]
                again = [call for call in calls if call not in first]
                words = f"{what} {_together(first)} on {device}"
                said.append(f"{words}, and {_together(again)} more after changes" if again else words)
    return f"What it took: {'; '.join(said) or NOT_RUN}."


def _together(calls: list[Row]) -> str:
    minutes, runs = (sum(call[key] for call in calls) for key in ("minutes", "runs"))
    runs, times = (
        f"{count} {word}{'' if count == 1 else 's'}" for count, word in ((runs, "run"), (len(calls), "call"))
    )
    return f"{minutes:.1f} minutes ({runs} in {times})"


def _bold(finding: Finding, evidence: Evidence) -> str:
    """Its verdict; a miniature has none."""
    return "" if evidence.quick else f"**{finding.verdict[:1].upper()}{finding.verdict[1:]}** "


def _wrapped(text: str) -> str:
    """Lines of a length that a difference can be read in."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


# --- tables of runs ---------------------------------------------------------------------------------------------------


def _section(name: str, table: Table, evidence: Evidence, tally: Tally) -> str:
    lines = _lines(table.lines, evidence, tally)
    text = f"### {table.title}\n\n`python -m paper reproduce {name}`\n\n{lines}\n"
    if table.second_lines:
        lines = _lines(table.second_lines, evidence, tally, second=True)
        text += f"{_wrapped('**A second reading.** ' + table.about_second)}\n\n{lines}\n"
    return text


def _lines(lines: tuple[Line, ...], evidence: Evidence, tally: Tally, *, second: bool = False) -> str:
    rows = [
        "| paper | row | number | published | ours, as the paper measures | ours, executed | verdict |",
        "|---|---|---|--:|--:|--:|---|",
    ]
    for line in lines:
        published = evidence.published(line.table, line.row)
        for key, (title, form, soft, hard) in QUANTITIES.items():
            if key not in published:
                continue
            if line.threshold is None:
                ours = evidence.stat(line.label, *soft)
                executed = show(evidence.stat(line.label, *hard), form) if hard else ""
            else:
                executed = "the same"
                ours = evidence.at_threshold(line.label, line.threshold, *EXITED[key])
                if line.read_early:
                    executed = show(ours, form)
                    ours = evidence.at_threshold(line.label, line.threshold, *READ_EARLY[key])
            verdict = judge(published[key], ours, saving=key == "tlops_saved", collapses=_collapses(evidence, line))
            if key != "bits_per_character" and not (key == "active_fraction" and published[key] == 1):
                tally.add((line.label, line.threshold, key, published[key]), verdict, second=second)
            cells = [published["source"], line.row, title, format(published[key], form), show(ours, form), executed]
            rows.append(f"| {' | '.join([*cells, verdict])} |")
    return "\n".join(rows) + "\n"


def _collapses(evidence: Evidence, line: Line) -> bool | None:
    """Exits that were only counted have soft figures too: those of the same exits, not taken."""
    if not line.read_early or line.threshold is None:
        return collapses(evidence, line.label)
    counted, taken = (
        evidence.at_threshold(line.label, line.threshold, mode, "loss") for mode in ("read_early", "sparse")
    )
    return None if counted is None or taken is None else taken.mean > (1 + COLLAPSE) * counted.mean


# --- tables of times --------------------------------------------------------------------------------------------------


def _times(evidence: Evidence, tally: Tally) -> str:
    device = evidence.wallclock[0]["device"] if evidence.wallclock else NOT_RUN
    about = (
        "`python -m paper reproduce wall-clock` and `python -m paper reproduce batch`, by the paper's protocol: an "
        "untrained model, tokens made active by decree, 30 warm-up and 200 timed passes, float32, against the dense "
        f"model without routers. Published: M1 Pro, MLX. Ours: {device}. `ffn` skips what the paper skips, the "
        "feed-forward; `block` also queries, attention rows and output projection. The paper's active tokens are "
        "the first of each sequence; `random` ones lie anywhere. Medians; quartiles are in the rows."
    )
    columns = [(skip, positions) for skip in ("ffn", "block") for positions in ("contiguous", "random")]
    titles = " | ".join(f"{skip}, {positions}" for skip, positions in columns)
    rows = [
        f"| paper | row | published ms | published speed-up | our dense ms | {titles} | verdict (ffn, contiguous) |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    published = [row for row in evidence.paper if row["table"] in ("throughput", "wall-clock", "batch")]
    for row in published:
        if row["row"] == "baseline":
            continue
        condition = {"batch": row.get("batch", _usual_batch(evidence))}
        if row["row"] == "soft TSA":
            found = [evidence.timed(condition="soft", **condition)] + [None] * 3
        else:
            alpha = row["active_fraction"]
            found = [
                evidence.timed(condition="sparse", active_fraction=alpha, skip=skip, positions=positions, **condition)
                for skip, positions in columns
            ]
        speeds = [f"{f['speedup']:.3f}x" if f else NOT_RUN for f in found]
        if row["row"] == "soft TSA":
            speeds[1:] = ["\u2014"] * 3
        ours = found[0]["speedup"] if found[0] else None
        # Rows from before conditions took turns with the dense model have no quartiles of their ratio.
        upper = found[0].get("speedup_quartiles", [0, math.inf])[1] if found[0] else 0.0
        verdict = judge_speedup(row["speedup"], ours, upper)
        what = (condition["batch"], row.get("active_fraction"))
        tally.add(("speed-up", *what), verdict)
        tally.add(("ms", *what), "other machine" if found[0] else NOT_RUN)
        dense = f"{found[0]['dense_ms'][0]:.2f}" if found[0] else NOT_RUN
        cells = [row["source"], row["row"], f"{row['ms']:.1f}", f"{row['speedup']:.3f}x", dense, *speeds, verdict]
        rows.append(f"| {' | '.join(cells)} |")
    return f"### Wall-clock\n\n{_wrapped(about)}\n\n" + "\n".join(rows) + "\n\n" + _training(evidence, tally)


def _usual_batch(evidence: Evidence) -> int:
    """The batch of the sweep over fractions: 64, or what a miniature takes for it."""
    soft = evidence.timed(condition="soft")
    return soft["batch"] if soft else 64


def _training(evidence: Evidence, tally: Tally) -> str:
    rows = [
        "| shape | dense ms | TSA ms | TSA / dense | early exit ms | early exit / dense |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    rows += [_training_line(row) for row in evidence.training]
    if not evidence.training:
        rows.append(f"| {NOT_RUN} |" + " |" * 5)
    for name in ("baseline", "TSA"):
        tally.add(("training ms", name), "other machine" if evidence.training else NOT_RUN)
    baseline, tsa = (evidence.published("enwik8", name)["ms_per_step"] for name in ("baseline", "TSA"))
    device = f" Ours: {evidence.training[0]['device']}." if evidence.training else ""
    about = (
        "`python -m paper reproduce training`: one optimiser step, the models interleaved in one process, medians. "
        f"Published for enwik8's shape on an M1 Pro: {baseline} and {tsa} ms, {tsa / baseline:.3f}.{device}"
    )
    return f"### Training time\n\n{_wrapped(about)}\n\n" + "\n".join(rows) + "\n\n"


def _training_line(row: Row) -> str:
    exits = [f"{row['early_exit_ms'][0]:.2f}", f"{row['early_exit_ratio'][0]:.3f}"] if "early_exit_ms" in row else []
    cells = [row["shape"], f"{row['dense_ms'][0]:.2f}", f"{row['tsa_ms'][0]:.2f}", f"{row['ratio'][0]:.3f}"]
    return f"| {' | '.join([*cells, *(exits or [NOT_RUN] * 2)])} |"


# --- writing ----------------------------------------------------------------------------------------------------------


def write(results: Path, path: Path, *, quick: bool = False) -> Path:
    """The page at `path` and its figures in `figures/` beside it; what has no numbers is not drawn."""
    with needs_report_extra(results):
        from paper.figures import draw

    evidence = Evidence.read(results, quick=quick)
    folder = path.parent / "figures"
    drawings = draw(evidence)
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for drawing in drawings:
        write_bytes(folder / f"{drawing.name}.svg", drawing.svg)
        write_bytes(folder / f"{drawing.name}.png", drawing.png)
    write_bytes(path, document(evidence, {d.caption: f"figures/{d.name}.png" for d in drawings}).encode())
    return path
