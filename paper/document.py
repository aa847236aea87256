"""docs/REPRODUCTION.md, made from results/: python -m paper.document

The answer first, then one paragraph per finding, then every published number compared with ours, soft and with
skipping, with a verdict by rule. A number without a row is `not run`.
"""

import math
import textwrap
from pathlib import Path

from paper.claims import claims
from paper.comparison import picture
from paper.evidence import NOT_RUN, Evidence, collapses, needs_report_extra, show
from paper.findings import findings
from paper.findings.finding import Finding
from paper.open_questions import convergence, open_questions
from paper.tables import DENSE, ENWIK8_DENSE, ENWIK8_TSA, TABLES, TSA, Line, Table
from paper.verdict import RULE, judge, judge_speedup
from tokendepth.report.summary import COLLAPSE
from tokendepth.report.tables import piped
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
"""Published key: title, format, and where to find ours, soft and hard."""
EXITED = {"loss": ("sparse", "loss"), "bits_per_character": ("sparse", "bits_per_character"),
          "active_fraction": ("sparse", "active_fraction"), "tlops_saved": ("tlops_skipped",)}  # fmt: skip
"""Where to find the same numbers for an early-exit model at one threshold."""
READ_EARLY = {key: ("read_early", key) for key in EXITED} | {"tlops_saved": ("tlops_saved_read_early",)}
"""And if only its predictions are read early and nothing is skipped."""

MINIATURE = """\
> **A miniature**, made by `--quick`: models of a few thousand parameters after four steps. It shows how the page is
> made; its numbers and verdicts say nothing about the paper.

"""
HEAD = """\
# The TSA paper, reproduced

*Adaptive Computation Depth via Learned Token Routing in Transformers* (A. A. A. Mohammed) proposes Token-Selective
Attention (TSA): in every layer a router decides for each token how much of the layer's update to apply. This page
compares every number of the paper with ours.

{answer}
**Soft** is the paper's mode: every layer is computed, and a gate between 0 and 1 scales its update; nothing is skipped.
**With skipping** is the same trained model with its decisions rounded to yes or no at its own threshold, so that a
token that is not active really skips the layer. The **active fraction** is the share of tokens that the routed layers
process; in soft mode, the mean gate. **TLOps** are token-layer operations: one token going through one layer.

## How it was measured

The published numbers are in [paper/paper.json](../paper/paper.json). Ours come from `python -m paper reproduce all
--seeds 3` and, on Tiny-Shakespeare, also from earlier runs of the same configs
([shakespeare.json](../results/shakespeare.json)). `make readme` generates this page from [results/](../results/), and a
test fails if it is out of date.

The paper's losses are means over 20 random batches with one seed, and its active fractions come from one training batch
with dropout on. Ours are measured on the whole validation split without dropout: mean ± standard deviation over n
seeds. Losses are in nats per character.

If the paper's text contradicts its numbers, or its two frameworks differ, we ran both readings. The second reading has
fewer seeds and is counted separately.

{took}

## The rule

{rule}

1% is more than the differences between models on which the paper's claims rest (0.4% to 0.7%). So two reproduced losses
do not mean that the difference between them is reproduced; the findings below look at the differences.

A number that appears in two tables is counted once. Bits per character, which repeat the loss, and a dense model's
active fraction of 1 are not counted.

| verdict | numbers | in second readings |
|---|--:|--:|
{counts}

"""


class Tally:
    """Verdicts, each number counted once; second readings separately."""

    def __init__(self) -> None:
        self._found: dict[bool, dict[tuple, str]] = {False: {}, True: {}}

    def add(self, what: tuple, verdict: str, *, second: bool = False) -> None:
        self._found[second].setdefault(what, verdict)

    def count(self, kind: str, *, second: bool = False) -> int:
        return list(self._found[second].values()).count(kind)

    def rows(self) -> str:
        kinds = ("reproduced", "differs", "not supported", "other machine", NOT_RUN)
        counts = [[kind, *(self.count(kind, second=second) for second in self._found)] for kind in kinds]
        return "\n".join(f"| {' | '.join(map(str, line))} |" for line in counts)


def document(evidence: Evidence, figures: dict[str, str]) -> str:
    """The whole page; `figures` are names, by caption."""
    tally = Tally()
    parts = [_section(name, table, evidence, tally) for name, table in TABLES.items() if table.lines]
    parts += [f"### Steps to a loss\n\n{convergence(evidence)}\n\n", _times(evidence, tally)]
    took = _wrapped(_took(evidence))
    about = {"rule": RULE, "counts": tally.rows(), "took": took, "answer": _answer(evidence, tally)}
    head = (MINIATURE if evidence.quick else "") + HEAD.format(**about)
    found = "".join(_finding(finding, evidence) for finding in findings(evidence))
    found += (
        "### Claims in the text\n\n"
        + _wrapped(
            "Here a number counts as reproduced if it is within two standard deviations but not more than 10% away, or "
            "within the rounding of the printed number."
        )
        + f"\n\n{claims(evidence)}\n\n"
    )
    answers = "".join(f"### {title}\n\n{text}\n\n" for title, text in open_questions(evidence))
    pictures = "".join(f"{picture(name, caption)}\n" for caption, name in figures.items())
    sections = (
        f"## Findings\n\n{found}## Questions that the paper leaves open\n\n{answers}## Every number\n\n{''.join(parts)}"
        f"## Figures\n\n{pictures}"
    )
    return (head + sections).rstrip() + "\n"


def _answer(e: Evidence, tally: Tally) -> str:
    """The result in a few sentences and a table; a miniature has none."""
    if e.quick:
        return ""
    models = {"Tiny-Shakespeare": ("shakespeare", TSA, DENSE), "enwik8": ("enwik8", ENWIK8_TSA, ENWIK8_DENSE)}
    rows = [["TSA", "published", "ours, soft", "ours, with skipping", "ours, dense"], ["---", *["--:"] * 4]]
    rises = []
    for name, (table, tsa, dense) in models.items():
        soft, hard = e.stat(tsa, "soft", "loss"), e.stat(tsa, "hard", "loss")
        published = format(e.published(table, "TSA")["loss"], ".4f")
        rows.append([f"{name}, loss", published, show(soft), show(hard), show(e.stat(dense, "hard", "loss"))])
        if soft and hard:
            rises.append(f"{hard.mean / soft.mean - 1:+.1%} on {name}")
    known = [answer for _, tsa, _ in models.values() if (answer := collapses(e, tsa)) is not None]
    verdict = f"({NOT_RUN})" if not known else "are not supported" if any(known) else "are supported"
    timed = e.timed(condition="sparse", active_fraction=0.726, skip="ffn", positions="contiguous")
    published = e.published("throughput", "sparse TSA at 0.726")["speedup"]
    speed = f"{timed['speedup']:.3f}x of the dense speed on {timed['device']}" if timed else NOT_RUN
    counts = {kind: tally.count(kind) for kind in ("reproduced", "differs", "not supported")}
    text = (
        f"**In short:** TSA's savings {verdict}. The paper counts gate weights near zero as saved, but computes every "
        "layer. If tokens really skip layers, the loss changes by "
        f"{' and '.join(rises) or NOT_RUN}. By the paper's own protocol, a forward pass that skips runs at {speed} "
        f"(published: {published}x on an M1 Pro). Of {sum(counts.values())} published numbers that can be judged, "
        f"{counts['reproduced']} are reproduced, {counts['differs']} differ, and {counts['not supported']} are savings "
        "that are not supported."
    )
    return f"{_wrapped(text)}\n\n{piped(rows)}"


def _finding(finding: Finding, evidence: Evidence) -> str:
    text = _wrapped(f"{_bold(finding, evidence)}{finding.text}")
    return f"### {finding.title}\n\n{text}\n\n" + (f"{finding.table}\n" if finding.table else "")


def _took(evidence: Evidence) -> str:
    """The time of all calls, by device; the scaling study and later repetitions separately."""
    said = []
    for device in dict.fromkeys(call["device"] for call in evidence.calls):
        for scaling, what in ((False, "the tables"), (True, "the scaling study")):
            calls = [c for c in evidence.calls if c["device"] == device and (c["table"] == "scaling") == scaling]
            if calls:
                first = [call for call in calls if call["commit"] == calls[0]["commit"]]
                again = [call for call in calls if call not in first]
                words = f"{what} took {_together(first)} on {device}"
                said.append(f"{words}, plus {_together(again)} after later changes" if again else words)
    return f"Time: {'; '.join(said) or NOT_RUN}."


def _together(calls: list[Row]) -> str:
    minutes, runs = (sum(call[key] for call in calls) for key in ("minutes", "runs"))
    runs, times = (
        f"{count} {word}{'' if count == 1 else 's'}" for count, word in ((runs, "run"), (len(calls), "call"))
    )
    return f"{minutes:.1f} minutes ({runs} in {times})"


def _bold(finding: Finding, evidence: Evidence) -> str:
    """Its verdict in bold; a miniature has none."""
    return "" if evidence.quick else f"**{finding.verdict[:1].upper()}{finding.verdict[1:]}** "


def _wrapped(text: str) -> str:
    """Lines short enough for a readable diff."""
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
        "| paper | row | number | published | ours, as the paper measures | ours, with skipping | verdict |",
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
    """Exits that were only counted are compared with the same exits taken."""
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
        "`python -m paper reproduce wall-clock` and `python -m paper reproduce batch`. The paper's protocol: an "
        "untrained model with preset active tokens, 30 warm-up and 200 timed forward passes, float32, compared with "
        f"the dense model without routers. Published: M1 Pro, MLX. Ours: {device}. `ffn` skips what the paper skips, "
        "the feed-forward network; `block` also skips queries, attention rows and the output projection. In the paper "
        "the first tokens of each sequence are active (`contiguous`); `random` ones are anywhere. Numbers are medians; "
        "quartiles are in the rows of [wallclock.json](../results/wallclock.json)."
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
    """The batch size of the sweep over fractions: 64, or that of a miniature."""
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
        "`python -m paper reproduce training`: median time per optimiser step, with the models interleaved in one "
        f"process. Published for enwik8's shape on an M1 Pro: dense {baseline} ms, TSA {tsa} ms, ratio "
        f"{tsa / baseline:.3f}.{device}"
    )
    return f"### Training time\n\n{_wrapped(about)}\n\n" + "\n".join(rows) + "\n\n"


def _training_line(row: Row) -> str:
    exits = [f"{row['early_exit_ms'][0]:.2f}", f"{row['early_exit_ratio'][0]:.3f}"] if "early_exit_ms" in row else []
    cells = [row["shape"], f"{row['dense_ms'][0]:.2f}", f"{row['tsa_ms'][0]:.2f}", f"{row['ratio'][0]:.3f}"]
    return f"| {' | '.join([*cells, *(exits or [NOT_RUN] * 2)])} |"


# --- writing ----------------------------------------------------------------------------------------------------------


def write(results: Path, path: Path, *, quick: bool = False) -> Path:
    """The page at `path` and its figures in `figures/` next to it; a figure without numbers is not drawn."""
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
    write_bytes(path, document(evidence, {d.caption: d.name for d in drawings}).encode())
    return path
