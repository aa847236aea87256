"""Sections of docs/WHERE_DEPTH_PAYS.md: other sizes and lengths of training, and spans with blocks of other widths."""

from collections.abc import Mapping
from pathlib import Path

from paper import contenders, spans
from paper.comparison import table, wrapped
from paper.contenders import DECIDERS, DENSE, LONG
from paper.depth_tables import BESIDE, rows_beside
from paper.outcomes import Outcomes
from paper.settings import Setting
from paper.spans import Scale
from tokendepth.data.fetch import PUBLISHED
from tokendepth.report.summary import Stat


def inner_width(results: Path, *, quick: bool = False) -> str:
    words = (
        f"{DECIDERS['rule'].capitalize()}, with blocks of other widths. One linear map projects tokens into the span "
        "and another projects their update back; the heads stay the same. All use the learning rate found for the "
        "span without maps. Two controls show what the maps do by themselves: inner width 256, and a dense model with "
        "the same maps around two of its layers. No learning rate was searched for models with maps."
    )
    found, made = spans.outcomes_of_widths(results, quick=quick)
    rows = rows_beside(found, [entry for entry in made if entry.setting.method in (spans.RULE, spans.MAPPED)])
    return f"{wrapped(words)}\n\n{table(BESIDE, rows)}"


def outcomes_at_scales(results: Path, *, quick: bool = False) -> dict[Scale, Outcomes]:
    return {scale: spans.outcomes_at(results, scale, quick=quick)[0] for scale in spans.SCALES}


def at_equal_flops(scales: Mapping[Scale, Outcomes]) -> dict[str, Stat]:
    """Span at word ends relative to dense models with the same FLOPs, at scales that have several dense models."""
    gaps = {}
    for scale, found in scales.items():
        line = [one for one in found.of("dense") if found.executed(one)]
        against = found.beside(rule) if (rule := _rule(found)) and len(line) > 1 else None
        if isinstance(against, tuple):
            gaps[scale.title] = against[1]
    return gaps


def against_six_layers(scales: Mapping[Scale, Outcomes]) -> dict[str, Stat]:
    """Span at word ends relative to six dense layers, over the length of training."""
    gaps = {}
    for scale in (*spans.lengths(), *(one for one in spans.SCALES if one.width != spans.BASE.width)):
        found = scales[scale]
        if (rule := _rule(found)) and (gap := found.against_six_layers(rule)):
            width = f"width {scale.width}, " if scale.width != spans.BASE.width else ""
            gaps[f"{width}{scale.steps:,} steps"] = gap
    return gaps


def _rule(found: Outcomes) -> Setting | None:
    """Span at word ends, if it has run."""
    return next((one for one in found.of(spans.RULE) if found.executed(one)), None)


def _in_short(results: Path, *, quick: bool) -> str:
    scales, told = outcomes_at_scales(results, quick=quick), []
    for words, gaps in (
        ("dense models with the same FLOPs", at_equal_flops(scales)),
        ("six dense layers", against_six_layers(scales)),
    ):
        alone = {title: " (one seed)" if gap.std is None else "" for title, gap in gaps.items()}
        listed = [f"{title} {gap.text('+.2%')}{alone[title]}" for title, gap in gaps.items()]
        if listed:
            told.append(f"Relative to {words}: {'; '.join(listed)}.")
    return " ".join(told)


def grows(results: Path, *, quick: bool = False) -> str:
    rows = []
    for scale in spans.SCALES:
        found, made = spans.outcomes_at(results, scale, quick=quick)
        rows += [[scale.title, *row] for row in rows_beside(found, made)]
    titles = ["scale", *BESIDE]
    words = (
        f"Each scale differs from the first one only in what its name says. Models: {DECIDERS['rule']}; the learned "
        "deciders that did best in the search and at full length, on validation text; the best method that decides in "
        "every block; and dense models of similar cost. Not all were trained at every scale: below the table is what "
        "is missing. Learning rates were found with short runs at width 256; wider models have them times 256 / width."
    )
    points = [
        f"**Passes over the text.** {_readings()}",
        (
            f"**BPE.** Span takes tokens that begin a word, signs and spaces: {spans.BPE.budget:g} of the training "
            "text. BPE models are trained and evaluated on as many tokens as byte models, so on nearly three times the "
            "text (training reads all of it twice). Their output head, which is in the FLOPs, costs a little more than "
            "a layer. So compare differences across scales, not losses, although all are in nats per byte."
        ),
        (
            "**Long runs.** The only dense baseline of the longest runs has six layers and costs slightly more FLOPs "
            "than span. No deeper dense model and no thin one was trained as long."
        ),
    ]
    if short := _in_short(results, quick=quick):
        points.insert(0, f"**The loss of {DECIDERS['rule']}, in short.** {short}")
    if doubled := _changes(spans.doublings(results, spans.lengths(), quick=quick)):
        about = f"**Doubling the steps** changes the loss of the dense model with six layers: {doubled}."
        if wide := _changes(spans.doublings(results, (spans.WIDE, spans.WIDE_TWICE), quick=quick)):
            about += f" At width {spans.WIDE.width}: {wide}, so those models are far from trained to the end."
        points.append(about)
    listed = "\n".join(wrapped(f"- {point}") for point in points)
    told = f"{wrapped(words)}\n\n{listed}\n\n{table(titles, rows, words=2)}"
    missing = [
        wrapped(f"- {scale}: {'; '.join(who)}.") for scale, who in spans.not_trained(results, quick=quick).items()
    ]
    return "\n".join([told, "Not trained:\n", *missing, ""]) if rows and missing else told


def _changes(doubled: list[spans.Doubling]) -> str:
    return "; ".join(
        f"from {one.steps:,} to {2 * one.steps:,} {one.test.text('+.2%')}"
        f"{' with one seed' if one.test.std is None else ''} ({one.validation.text('+.2%')} on validation text)"
        for one in doubled
    )


def _readings() -> str:
    """How often a training run reads its text."""
    splits = PUBLISHED[contenders.DATA.corpus].train_and_val
    assert splits is not None
    config = DENSE.config(next(iter(DENSE.values)), contenders.RATES[0], LONG)
    tokens = config.train.batch_size * config.model.context
    *some, most = (
        f"{scale.steps * tokens / splits[0]:.1f} times in {scale.steps:,} steps" for scale in spans.lengths()
    )
    return f"Training reads its {splits[0] / 1e6:.0f} million bytes {', '.join(some)} and {most}."
