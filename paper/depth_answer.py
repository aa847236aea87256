"""The first lines of docs/WHERE_DEPTH_PAYS.md: who beats dense models, how sure that is, and for whom it pays."""

from collections.abc import Sequence
from pathlib import Path

from paper import contenders, spans
from paper.comparison import EVEN, judge, wrapped
from paper.contenders import DECIDERS, DENSE, LONG, SHORT, THIN
from paper.depth import Entry, Order, step_times, with_steps
from paper.depth_order import kept
from paper.equal_loss import Models, Ratio, pass_times
from paper.outcomes import Cost, Outcomes
from paper.spans import BASE, BPE, RULE
from tokendepth.report.summary import Stat


def answer(results: Path, found: Outcomes, made: list[Entry], orders: list[Order], *, quick: bool) -> str:
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
    if larger := _parameters(found, made, [one.name for one in better]):
        who = "The better ones have" if len(better) > 1 else "The better one has"
        first += f" {who} {larger} times the parameters of six dense layers."
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
    if checked := [order for one in orders if (order := kept(one)) is not None]:
        points.append(
            f"**Settings were chosen with short runs** ({SHORT:,} steps). For {checked.count(False)} of the "
            f"{len(checked)} contenders that we checked, with one seed, the runner-up was better after {LONG:,} steps, "
            "so a longer search might change the ranking."
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
    speeds: dict[str, list[tuple[int, Ratio]]] = {}
    for (device, batch), times in pass_times(results).items():
        if isinstance(ratio := models.time(rule, times), Ratio):
            speeds.setdefault(device, []).append((batch, ratio))
    told = []
    if speeds:
        listed = "; ".join(f"on {device} {_where_faster(ratios)}" for device, ratios in speeds.items())
        told.append(f"A forward pass of *{DECIDERS['rule']}*, relative to dense models with the same loss: {listed}.")
    trained = [
        f"on {device} it is {_verdict(gap)}"
        for device, times in step_times(results).items()
        if (gap := _difference(with_steps(found, times), rule, "step_ms"))
    ]
    if trained:
        told.append(f"Its loss at equal training time: {', '.join(trained)}.")
    there, entries = spans.outcomes_at(results, BPE, quick=quick)
    for one in entries:
        if one.setting.method == RULE and (gap := _difference(there, one)):
            told.append(f"Its loss with {BPE.title}, at equal FLOPs, is {_verdict(gap)}.")
    return " ".join(told)


def _where_faster(ratios: Sequence[tuple[int, Ratio]]) -> str:
    """With which numbers of sequences a pass takes less time."""
    shown = ", ".join(f"{ratio.speedup} at batch {batch}" for batch, ratio in ratios)
    faster = [batch for batch, ratio in ratios if ratio.value < 1]
    if len(faster) in (0, len(ratios)):
        return f"{'faster' if faster else 'slower'} ({shown})"
    return f"faster at batch {' and '.join(map(str, faster))} only ({shown})"


def _verdict(gap: Stat) -> str:
    """In words and as a number."""
    words = {"better": "lower", "worse": "higher", EVEN: "not clearly different"}.get(judge(gap), "undecided")
    return f"{words} ({_shown(gap)})"


def _parameters(found: Outcomes, made: list[Entry], names: Sequence[str]) -> str:
    """Relative to six dense layers, from the smallest to the largest; empty if nothing ran."""
    six = found.stat(found.comparison.settings[0], "parameters")
    sizes = [s.mean for e in made if e.setting.method in names and (s := found.stat(e.setting, "parameters"))]
    if six is None or not sizes:
        return ""
    return " to ".join(dict.fromkeys(f"{size / six.mean:.1f}" for size in (min(sizes), max(sizes))))
