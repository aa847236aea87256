"""README.md's one table and what was found, from the rows in results/."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean

from paper import depth, spans
from paper.comparison import EVEN, judge, wrapped
from paper.contenders import LONG
from paper.equal_loss import Place, Ratio, at_its_loss, pass_times
from paper.evidence import NOT_RUN
from paper.grid import same_work
from paper.outcomes import Cost, Outcomes
from paper.retrofit_rows import Base, bases, block_flops, loss, untouched_loss
from paper.settings import Setting
from paper.wanted import Runs
from tokendepth.report.records import Record
from tokendepth.report.summary import DASH, Stat
from tokendepth.report.tables import piped
from tokendepth.runs.results import Row, read_rows

TITLES = [
    "model", "layers", "parameters", "FLOPs skipped", "loss", "baseline, same FLOPs",
    "speed, two cores, batch 1 / 8", "speed, H200, batch 8 / 64",
]  # fmt: skip
CLOCKS = (("CPU", (1, 8)), ("NVIDIA", (8, 64)))
STUDIED = {
    "span_rule": "span, word ends",
    "span_taught": "span, boundaries taught word ends",
    "budget": "budget",
    "mod": "MoD",
    "tsa": "TSA",
}
"""Contenders of docs/WHERE_DEPTH_PAYS.md, below its dense model with six layers."""
RETROFITTED = 0.7
"""Of the block FLOPs."""


def table(results: Path) -> str:
    """What was skipped, the loss and what the same FLOPs give without a router, and the speed."""
    timed = [row for row in read_rows(results / "forward.json") if row["positions"] == "trained"]
    lines = [TITLES, ["---", *("--:" for _ in TITLES[1:])]]
    lines += [_heading("enwik8, bytes"), *_studied(results)]
    lines += [_heading("Tiny-Shakespeare, characters"), *_shakespeare(results, timed)]
    for base in bases(results / "retrofit.json"):
        lines += [_heading(f"{base.title}, plain text"), *_retrofitted(base, timed)]
    return piped(lines)


def _heading(words: str) -> list[str]:
    return [f"**{words}**", *[""] * (len(TITLES) - 1)]


def _line(
    title: str, layers: int, numbers: Stat | None, skipped: float | None, loss: str, same: str, speeds: list[str]
) -> list[str]:
    millions = DASH if numbers is None else f"{numbers.mean / 1e6:.1f}M"
    share = NOT_RUN if skipped is None else f"{skipped:.0%}".replace("-0%", "0%")
    return [title, str(layers), millions, share, loss, same, *speeds]


def _speeds(speed: Callable[[str, int], str]) -> list[str]:
    """Both batch sizes of each device in one cell."""
    found = [[speed(kind, batch) for batch in batches] for kind, batches in CLOCKS]
    return [DASH if set(each) == {DASH} else " / ".join(each) for each in found]


# --- enwik8 -----------------------------------------------------------------------------------------------------------


def _studied(results: Path) -> list[list[str]]:
    """Methods that were tuned with the same search; speeds are relative to dense models with the same loss."""
    found, made = depth.outcomes(results)
    timed = pass_times(results)
    order = ["dense", *STUDIED]
    shown = [one for one in made if one == made[0] or one.setting.method in STUDIED]
    lines = []
    for entry in sorted(shown, key=lambda one: order.index(one.setting.method)):
        lines.append(
            _of_study(
                STUDIED.get(entry.setting.method, "dense"),
                found,
                entry,
                _speeds(lambda kind, batch, entry=entry: _speed_at_its_loss(found, entry, made, timed, kind, batch)),
            )
        )
    found, made = spans.outcomes_at(results, spans.FOURTEEN_TIMES)
    rule = next(one for one in made if one.setting.method == spans.RULE)
    return [*lines, _of_study(f"{STUDIED[spans.RULE]}, {spans.FOURTEEN_TIMES.title}", found, rule, [DASH, DASH])]


def _of_study(title: str, found: Outcomes, entry: depth.Entry, speeds: list[str]) -> list[str]:
    skipped, loss = (found.stat(entry.setting, name) for name in ("flops_skipped", "loss"))
    if loss is None or skipped is None:
        return [title, str(entry.config.model.n_layer), *[NOT_RUN] * 3, DASH, *speeds]
    against, parameters = found.beside(entry.setting), found.stat(entry.setting, "parameters")
    same = against[0].text(".3f") if isinstance(against, tuple) and entry.setting.method != "dense" else DASH
    return _line(title, entry.config.model.n_layer, parameters, skipped.mean, loss.text(".3f"), same, speeds)


def _speed_at_its_loss(
    found: Outcomes, entry: depth.Entry, made: list[depth.Entry], timed: dict[Place, depth.Times], kind: str, batch: int
) -> str:
    if entry.setting.method == "dense" or found.stat(entry.setting, "loss") is None:
        return DASH
    there = [
        times
        for (device, size), times in timed.items()
        if size == batch and (device.endswith(" 2 threads") if kind == "CPU" else not device.startswith("CPU"))
    ]
    costs = {one.setting: times[work] for one in made for times in there if (work := same_work(one.config)) in times}
    ratio = at_its_loss(found, entry, made, costs.get)
    return ratio.speedup if isinstance(ratio, Ratio) else DASH


# --- Tiny-Shakespeare -------------------------------------------------------------------------------------------------


def _shakespeare(results: Path, timed: list[Row]) -> list[list[str]]:
    runs = Runs.read(results / "shakespeare.json")
    models = {
        ("dense", "dense", None): runs.dense(),
        ("TSA, settings of its paper", "tsa", None): runs.of("tsa"),
        ("budget, run at 0.4", "budget", 0.4): runs.budget(0.4),
    }
    lines = []
    for (title, method, asked), found in models.items():
        loss, skipped, parameters = (
            Stat(tuple(record.needed(*key.split(".")) for record in found.values()))
            for key in ("hard.loss", "flops_skipped", "parameters")
        )
        speeds = [DASH] * len(CLOCKS)
        if method != "dense":
            run = f"shakespeare.{method}"
            speeds = _speeds(lambda kind, batch, run=run, asked=asked: _speed(timed, run, kind, batch, asked))
        layers = next(iter(found.values())).config.model.n_layer
        same = DASH if method == "dense" else _dense_at_its_cost(runs, found)
        lines.append(_line(title, layers, parameters, skipped.mean, loss.text(".3f"), same, speeds))
    return lines


def _dense_at_its_cost(runs: Runs, found: dict[int, Record]) -> str:
    beside = [runs.dense_at(seed, record.needed("flops_per_token")) for seed, record in found.items()]
    numbers = tuple(value for value in beside if isinstance(value, float))
    return Stat(numbers).text(".3f") if len(numbers) == len(beside) else DASH


def _speed(timed: list[Row], run: str, kind: str, batch: int, asked: float | None = None) -> str:
    """That of the one checkpoint timed on such a device; at any budget if `asked` is None."""
    found = [
        row["speedup"]
        for row in timed
        if (row["run"], row["batch"]) == (run, batch)
        and asked in (None, row["asked"])
        and row["device"].startswith(kind)
        and row["execution"] == "sparse"
    ]
    return f"{found[0]:.2f}x" if found else DASH


# --- a model that people have -----------------------------------------------------------------------------------------


def _retrofitted(base: Base, timed: list[Row]) -> list[list[str]]:
    """With a router and without, compared with the same model with blocks dropped."""
    layers = base.layers

    def numbers(name: str, budget: float | None) -> Stat | None:
        return base.stat(name, budget, lambda row: row["evaluation"]["parameters"])

    def text(name: str, budget: float | None, pick: Callable[[Row], float | None]) -> str:
        found = base.stat(name, budget, pick)
        return NOT_RUN if found is None else found.text(".3f")

    skipped = base.stat("span", RETROFITTED, lambda row: row["evaluation"]["flops_skipped"])
    run, none = f"{base.name}-span-{RETROFITTED:g}", [DASH] * len(CLOCKS)
    untouched = base.stat("dense", None, untouched_loss)
    return [
        _line(
            "unchanged", layers, numbers("dense", None), 0,
            NOT_RUN if untouched is None else f"{untouched.mean:.3f}", DASH, none,
        ),
        _line("fine-tuned", layers, numbers("dense", None), 0, text("dense", None, loss), DASH, none),
        _line(
            "fine-tuned with a router", layers, numbers("span", RETROFITTED), None if skipped is None else skipped.mean,
            text("span", RETROFITTED, loss), _dropped_at_its_cost(base),
            _speeds(lambda kind, batch: _speed(timed, run, kind, batch)),
        ),
    ]  # fmt: skip


def _dropped_at_its_cost(base: Base) -> str:
    costs = base.values("span", RETROFITTED, block_flops)
    dropped = [base.at_cost("drop", seed, cost) for seed, cost in costs.items()]
    numbers = tuple(value for value in dropped if isinstance(value, float))
    return Stat(numbers).text(".3f") if numbers and len(numbers) == len(dropped) else DASH


# --- in words ---------------------------------------------------------------------------------------------------------


def findings(results: Path) -> str:
    found, made = depth.outcomes(results)

    def gap(method: str) -> str:
        setting = next(one.setting for one in made if one.setting.method == method)
        return _percent(found, setting)

    def verdict(method: str) -> str:
        against = found.beside(next(one.setting for one in made if one.setting.method == method))
        return judge(against[1]) if isinstance(against, tuple) else ""

    def at(title: str, by: Cost = "flops_per_token") -> str:
        scale = next(one for one in spans.SCALES if one.title == title)
        there, entries = spans.outcomes_at(results, scale)
        return _percent(there, next(one.setting for one in entries if one.setting.method == spans.RULE), by)

    def six(scale: spans.Scale) -> str:
        there, entries = spans.outcomes_at(results, scale)
        gap = there.against_six_layers(next(one.setting for one in entries if one.setting.method == spans.RULE))
        return NOT_RUN if gap is None else _compared(gap.mean)

    tsa = Runs.read(results / "shakespeare.json").of("tsa").values()
    soft, hard = (Stat(tuple(record.needed(kind, "loss") for record in tsa)).text(".3f") for kind in ("soft", "hard"))
    rule, thin = (
        {one.seed: one.loss for one in found.executed(next(e.setting for e in made if e.setting.method == method))}
        for method in (spans.RULE, "thin")
    )
    thinner = mean(rule[seed] / thin[seed] - 1 for seed in rule.keys() & thin.keys())
    per_block = {"mor": "MoR", "early_exit": "early exit", "act": "ACT", "itt": "ITT"}
    worse = [name for method, name in per_block.items() if verdict(method) == "worse"] or ["none"]
    within = ", both within the spread over seeds" if verdict("mod") == verdict("budget") == EVEN else ""
    gate = (
        "**The gate of the TSA paper loses its quality when tokens are really skipped.** On Tiny-Shakespeare the loss "
        f"is {soft} with gates as weights, which skips nothing, and {hard} with skipping. The savings in the paper are "
        "gate weights near zero, not skipped work."
    )
    adjacent = (
        "**Sending only word ends through four of nine blocks beats dense models on the bytes of enwik8.** That is "
        "[`span`](docs/methods/span.md), with one decision per token for the four blocks. Its loss is "
        f"{gap(spans.RULE)} that of dense models with the same FLOPs and {_compared(thinner)} that of a thinner and "
        f"deeper one; at twice the width {at(spans.WIDE.title)}, with four times the context {at('context 1,024')} "
        f"({at('context 1,024', 'full_rows_flops')} if attention is counted over the full context). Compared with six "
        f"dense layers alone, which have two thirds of the parameters, it is {six(spans.BASE)} after {LONG:,} steps "
        f"and {six(spans.FOURTEEN_TIMES)} after {spans.FOURTEEN_TIMES.steps:,} (many passes over the text)."
    )
    boundaries = (
        f"**Boundaries can be learned if they are taught word ends first** ({gap('span_taught')} dense models; tested "
        "at width 256 and 4,000 steps). Without that, learned decisions at best match them: with entropy the loss is "
        f"{gap('span_entropy')}, with boundaries {gap('span_boundary')}, with a score {gap('span_score')}, with a "
        f"predicted cost of skipping {gap('span_gain')}."
    )
    every_block = (
        f"**Deciding in every block at best matches dense models** on enwik8: MoD is {gap('mod')}, `budget` "
        f"{gap('budget')}{within}. {', '.join(worse[:-1])} and {worse[-1]} are worse. On "
        "Tiny-Shakespeare `budget` skips two fifths of the FLOPs and loses nothing. But it alone was tuned there, on "
        "the text that it is judged on, and was trained with two forward passes per step; dense models trained that "
        "way are better still. It adds one checkpoint for all budgets."
    )
    return "\n".join(wrapped(f"- {point}") for point in (gate, adjacent, boundaries, every_block)) + "\n"


def _percent(found: Outcomes, setting: Setting, by: Cost = "flops_per_token") -> str:
    against = found.beside(setting, by=by)
    return _compared(against[1].mean) if isinstance(against, tuple) else NOT_RUN


def _compared(difference: float) -> str:
    return f"{abs(difference):.1%} {'below' if difference < 0 else 'above'}"
