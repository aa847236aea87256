"""The figures of docs/REPRODUCTION.md from results/; a figure without numbers is not drawn."""

from paper.architecture import architecture
from paper.evidence import BITS, Evidence
from paper.open_questions import LEVELS, MODELS
from paper.tables import (
    DENSE,
    EARLY_EXIT,
    ENWIK8_DENSE,
    ENWIK8_TSA,
    LAYERS,
    PENALTIES,
    TSA,
    fewer,
    penalty,
)
from tokendepth.config import PAPER_THRESHOLDS, method_name
from tokendepth.report.figures import Drawing
from tokendepth.report.heatmap import token_map
from tokendepth.report.palette import look
from tokendepth.report.plots import GUIDE, Points, curves, milestones, scatter
from tokendepth.report.records import Passage
from tokendepth.report.summary import Stat

Point = tuple[float, float, float]
TSA_COLOUR, EXIT_COLOUR = look("tsa").colour, look("early_exit").colour
LOSS = "validation loss\n(nats per character)"


def draw(evidence: Evidence) -> list[Drawing]:
    made = [
        architecture(),
        _curves(evidence, "shakespeare", "Tiny-Shakespeare", DENSE, TSA),
        _curves(evidence, "enwik8", "enwik8", ENWIK8_DENSE, ENWIK8_TSA),
        _penalties(evidence),
        _exits(evidence),
        _heat_map(evidence),
        _wall_clock(evidence),
        _milestones(evidence),
    ]
    return [drawing for drawing in made if drawing]


def _curves(e: Evidence, name: str, title: str, dense: str, tsa: str) -> Drawing | None:
    histories = {
        model: [row.get("history", []) for row in e.rows(experiment)]
        for model, experiment in ((("dense", "dense"), dense), (("tsa", "TSA, penalty 0.001"), tsa))
    }
    caption = (
        f"{title}: validation loss over steps and over cumulative token-layer operations (TLOps), one line per seed, "
        "on at most the first 262,144 characters of the validation split. TLOps count a layer by its gate weight, but "
        "training computes every layer, so the right panel shows neither FLOPs nor time."
    )
    return curves(f"reproduction-{name}", caption, histories)


def _point(x: Stat | None, y: Stat | None) -> list[Point]:
    return [] if x is None or y is None else [(x.mean, y.mean, y.std or 0.0)]


def _at(e: Evidence, label: str, mode: str) -> list[Point]:
    return _point(e.stat(label, mode, "active_fraction"), e.stat(label, mode, "loss"))


def _dense(e: Evidence) -> Points:
    """Dense models with fewer layers, plotted at the share of the routed blocks that they keep."""
    full = e.configs[DENSE].model.n_layer
    points = [
        ((n - 1) / (full - 1), loss.mean, loss.std or 0.0)
        for n in (full, *LAYERS)
        if (loss := e.stat(DENSE if n == full else fewer(n), "hard", "loss"))
    ]
    return Points("dense, fewer layers (control)", points, look("dense").colour, "D", "solid")


def _penalties(e: Evidence) -> Drawing | None:
    published = [
        (row["active_fraction"], row["loss"], 0.0)
        for row in (e.published("penalty", f"penalty {value:g}") for value in PENALTIES)
    ]
    ours = {mode: [p for value in PENALTIES for p in _at(e, penalty(value), mode)] for mode in ("soft", "hard")}
    if len(ours["soft"]) < 2:  # one penalty is no sweep
        return None
    as_published = Points("published (soft, one seed)", published, GUIDE, "x", "dotted")
    soft = Points("TSA, soft: nothing is skipped", ours["soft"], TSA_COLOUR, "o", (0, (2, 1.5)), filled=False)
    hard = Points("TSA, with skipping", ours["hard"], TSA_COLOUR, "s", "none")
    caption = (
        "The depth penalty, from 0 (right) to 0.5 (left). Left panel: the paper's mode, in which every layer is "
        "computed. Right panel: the same models with skipping, on another scale. Dense models with n = 2 to 6 layers "
        "are at (n - 1) / 5, the share of the routed blocks that they keep. Bars: standard deviations."
    )
    panels = {"soft": [as_published, soft], "with skipping (other scale)": [hard, _dense(e)]}
    return scatter("reproduction-penalty", caption, LOSS, panels)


def _exits(e: Evidence) -> Drawing | None:
    ours, read = (
        [
            point
            for threshold in PAPER_THRESHOLDS
            for point in _point(
                e.at_threshold(EARLY_EXIT, threshold, mode, "active_fraction"),
                e.at_threshold(EARLY_EXIT, threshold, mode, "loss"),
            )
        ]
        for mode in ("sparse", "read_early")
    )
    if not ours:
        return None
    published = [
        (row["active_fraction"], row["loss"], 0.0)
        for row in (e.published("early-exit", f"threshold {t:.2f}") for t in PAPER_THRESHOLDS)
    ]
    tsa = e.published("matched", "TSA")
    left = [
        Points("early exit", published, EXIT_COLOUR, "o"),
        Points("TSA, soft: nothing is skipped", [(tsa["active_fraction"], tsa["loss"], 0.0)], TSA_COLOUR, "*", "none"),
    ]
    right = [
        Points("early exit", ours, EXIT_COLOUR, "o"),
        Points("early exit, nothing skipped", read, EXIT_COLOUR, "o", (0, (2, 1.5)), filled=False),
        Points("TSA, soft: nothing is skipped", _at(e, TSA, "soft"), TSA_COLOUR, "*", "none"),
        Points("TSA, with skipping", _at(e, TSA, "hard"), TSA_COLOUR, "s", "none"),
        _dense(e),
    ]
    caption = (
        "Early exit at 13 thresholds and TSA at penalty 0.001, published and ours. Ours counts the first block once "
        "and really skips, except for hollow circles, where exits are counted but not taken. Dense models with n "
        "layers are at (n - 1) / 5. Bars: standard deviations."
    )
    return scatter("reproduction-early-exit", caption, LOSS, {"published": left, "ours (other scale)": right})


def _heat_map(e: Evidence) -> Drawing | None:
    tree = next((row["passage"] for row in e.rows(TSA, "routing") if row.get("passage")), None)
    if tree is None:
        return None
    passage = Passage.from_word(*(tree[name] for name in ("pieces", "sites", "soft", "hard", "surprisal")))
    return token_map(passage, "reproduction-routing", "TSA at penalty 0.001 on Shakespeare's validation text, seed 0")


def _wall_clock(e: Evidence) -> Drawing | None:
    rows = [row for row in e.wallclock if row["condition"] == "sparse"]
    batch = (e.timed(condition="soft") or {}).get("batch")
    published = [(r["active_fraction"], r["speedup"], 0.0) for r in e.paper if r["table"] == "wall-clock"]
    series = [Points("published: M1 Pro, FFN, contiguous", published, GUIDE, "x", "dotted")]
    for skip, (marker, words) in {"ffn": ("o", "FFN skipped"), "block": ("s", "block skipped")}.items():
        for positions in ("contiguous", "random"):
            points = sorted(
                (row["active_fraction"], row["speedup"], 0.0)
                for row in rows
                if (row["skip"], row["positions"], row["batch"]) == (skip, positions, batch)
            )
            filled = positions == "contiguous"
            line = "solid" if filled else "dashed"
            series.append(Points(f"{words}, {positions}", points, TSA_COLOUR, marker, line, filled))
    if not any(one.points for one in series[1:]):
        return None
    device = rows[0]["device"]
    caption = (
        f"Wall-clock speed-up of a forward pass over the active fraction; ours on {device}, batch {batch}, float32. "
        "Above the grey line is faster than dense. The dashed vertical lines mark the paper's operating points."
    )
    marks = {"Shakespeare 0.726": 0.726, "enwik8 0.833": 0.833}
    return scatter("reproduction-wall-clock", caption, "speed-up over dense", {"": series}, marks=marks, level=1.0)


def _milestones(e: Evidence) -> Drawing | None:
    levels = [f"{level} {unit}" for unit in ("bits", "nats") for level in LEVELS]
    rows = {
        (method_name(e.configs[label].method), name): [
            e.steps_to(label, level / unit) for unit in (BITS, 1.0) for level in LEVELS
        ]
        for name, label in MODELS.items()
    }
    caption = (
        "Steps to a validation loss of 2.5, 2.0 and 1.8, in bits and in nats, validated every 250 steps on at most the "
        "first 262,144 characters of the validation split. One dot per seed; a cross if the loss was never reached. "
        "Diamonds: published for enwik8, in bits."
    )
    steps = max(e.configs[label].train.steps for label in MODELS.values())
    said = e.published("convergence", "enwik8, baseline and TSA")["steps"]
    published = {(name, f"{level} bits"): step for name in MODELS if "enwik8" in name for level, step in said.items()}
    return milestones("reproduction-milestones", caption, rows, levels, steps, published)
