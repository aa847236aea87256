"""The first lines of docs/WHERE_DEPTH_PAYS.md: who beats dense models, how sure that is, and for whom it pays."""

from collections.abc import Sequence
from pathlib import Path

from paper import contenders, spans
from paper.comparison import judge, wrapped
from paper.contenders import DECIDERS, DENSE, LONG, SHORT, THIN
from paper.depth import Entry, Order, step_times, with_steps
from paper.depth_order import Rank, kept, pairs_kept
from paper.equal_loss import Models, Ratio, pass_times
from paper.outcomes import Cost, Outcomes
from paper.spans import BASE, BPE, RULE
from tokendepth.report.summary import Stat


def answer(
    results: Path, found: Outcomes, made: list[Entry], ranks: Sequence[Rank], orders: list[Order], *, quick: bool
) -> str:
    """Empty if nothing ran."""
    known = {e.setting.method: gap for e in made if (gap := _difference(found, e)) and e.setting.method != DENSE.name}
    routed = [one for one in contenders.CONTENDERS if one not in (DENSE, THIN) and one.name in known]
    if not routed:
        return ""
    better = sorted((one for one in routed if judge(known[one.name]) == "better"), key=lambda one: known[one.name].mean)
    led = " and ".join(f"*{one.title}* ({_shown(known[one.name])})" for one in better)
    first = (
        f"**{len(better)} of {len(routed)} routed models have a lower loss than dense models** with the same executed "
        f"FLOPs (enwik8 by bytes, width {contenders.MODEL.d_model}, {LONG:,} steps){f': {led}' if led else ''}. "
        f"{'The others' if better else 'They'} are worse, or show no clear difference."
    )
    if (thin := known.get(THIN.name)) and judge(thin) == "better":
        first += f" A thinner, deeper dense model gains as well ({_shown(thin)})."
    points = [first]
    full = {e.setting.method: gap for e in made if (gap := _difference(found, e, "full_rows_flops"))}
    counted = [_shown(full[one.name]) for one in better if one.method == "span" and one.name in full]
    if counted:
        points.append(
            "**How FLOPs are counted.** Attention in a span is counted over the tokens that take it. Counted over the "
            f"full context, these differences are {' and '.join(counted)}."
        )
    same, pairs = pairs_kept(ranks)
    checked = [order for one in orders if (order := kept(one)) is not None]
    if pairs:
        points.append(
            f"**Settings were chosen with short runs** ({SHORT:,} steps). {same} of {pairs} pairs of contenders keep "
            f"their order after {LONG:,} steps, and {sum(checked)} of {len(checked)} pairs of settings, so a longer "
            "search might change the ranking."
        )
    if used := _for_whom(results, found, made, quick=quick):
        points.append(f"**For whom it pays.** {used}")
    return "\n".join(wrapped(f"- {point}") for point in points) + "\n"


def _difference(found: Outcomes, entry: Entry, by: Cost = "flops_per_token") -> Stat | None:
    against = found.beside(entry.setting, by=by)
    return against[1] if isinstance(against, tuple) else None


def _shown(difference: Stat) -> str:
    return difference.text("+.2%")


def _for_whom(results: Path, found: Outcomes, made: list[Entry], *, quick: bool) -> str:
    """Span at word ends: speed at equal loss, loss at equal training time, and with BPE."""
    rule, models = next((one for one in made if one.setting.method == RULE), None), Models(BASE.title, found, made)
    if rule is None or found.stat(rule.setting, "loss") is None:
        return ""
    speeds: dict[str, list[str]] = {}
    for (device, batch), times in pass_times(results).items():
        if isinstance(ratio := models.time(rule, times), Ratio):
            speeds.setdefault(device, []).append(f"{ratio.speedup} at batch {batch}")
    told = []
    if speeds:
        listed = "; ".join(f"{', '.join(found)} ({device})" for device, found in speeds.items())
        told.append(f"The speed of *{DECIDERS['rule']}* relative to dense models with the same loss is {listed}.")
    trained = [
        f"{_shown(gap)} on {device} ({judge(gap)})"
        for device, times in step_times(results).items()
        if (gap := _difference(with_steps(found, times), rule, "step_ms"))
    ]
    if trained:
        told.append(f"At equal training time its loss differs by {' and '.join(trained)}.")
    there, entries = spans.outcomes_at(results, BPE, quick=quick)
    for one in entries:
        if one.setting.method == RULE and (gap := _difference(there, one)):
            told.append(f"With {BPE.title} it differs by {_shown(gap)} at equal FLOPs ({judge(gap)}).")
    return " ".join(told)
