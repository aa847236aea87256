"""docs/WHERE_DEPTH_PAYS.md, made from results/: how all were tuned, then test losses in two tables and a figure."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from paper import contenders, search, spans, time_to_loss
from paper.comparison import judge, table, verdicts, wrapped
from paper.contenders import DENSE, LONG, SHORT, WARM_UP, Contender
from paper.depth import PASSES, TIMES, TOKENS, Entry, Order, measured_with, order, outcomes, step_times, with_steps
from paper.depth_targets import targets
from paper.equal_loss import all_models, drawn_decisions, pass_times, shown
from paper.evidence import BITS, NOT_RUN, needs_report_extra, show
from paper.outcomes import OUTSIDE, Cost, Outcomes
from paper.search import Search
from tokendepth.data.fetch import PUBLISHED
from tokendepth.report.summary import DASH, Stat
from tokendepth.runs.files import disk_faults, write_bytes
from tokendepth.runs.results import rows_so_far

HEAD = f"""\
# Where depth pays

Every method on the bytes of enwik8, tuned alike, and compared with dense models of the same cost. All have the same
block (width 256, RMSNorm, rotary positions, SwiGLU, queries and keys normed), optimiser, batches (64 sequences of 256
bytes) and length ({LONG:,} steps, the first {LONG // WARM_UP} of them warm-up); they differ in what they do with depth.
Choices were made on validation text; every loss in the tables of results is of the **test** split, its first
{TOKENS:,} bytes, executed sparsely. No method trains by two passes here: only budget routing can, and on this text it
cost quality.
This page is generated from `search.json`, `depth.json`, `step_times.json`, `pass_times.json` and `spans.json` in
[results/](../results/) by `make readme`; the rows come from `python -m paper search`, `depth`, `times`, `passes` and
`spans`. A contender that has no row yet is `not run`; what was not trained at other scales is named below their table,
and a dash stands where nothing was timed. On Tiny-Shakespeare, without tuning: [COMPARISON.md](COMPARISON.md).
"""
SAME = 0.001
"""FLOPs that differ by a smaller share are the same by both conventions."""
NOTES = """\
- **loss**: nats per byte, executed; mean ± standard deviation over n seeds.
- **dense, same FLOPs**: on the straight line between dense models with 3, 4, 6, 8 and 12 layers of the same seeds. Up
  to 3% beyond the ends the last one stands for it; further off it is `outside`.
- **FLOPs**: executed, per token, with routers and output head. Rows of attention are counted as wide as the context,
  unless a method packs its tokens into a shorter sequence (span routing): there, as wide as that. What the difference
  would be by full rows stands beside it. Other methods mask keys, and are counted by full rows always.
- **training FLOPs**: per token, forward and backward, counted as they are dispatched; all train on as many tokens.
- **K/V bytes**: keys and values per token in float32, in the cache after reading test text; first seed.
- `random routing` has the budget, layers and rate that the search chose for budget routing, and throws dice; `span by
  dice` those of span routing by a rule.
"""


def document(results: Path, figures: dict[str, str], *, quick: bool = False) -> str:
    """The whole page; `figures` are Markdown by the name of what losses are drawn over."""
    (found, made), searched = outcomes(results, quick=quick), Search.read(results, quick=quick)
    parts = [
        HEAD,
        f"## What was wanted, and what came out\n\n{targets(results, quick=quick)}",
        f"## The rule of tuning\n\n{rule()}",
        f"### Who is tuned, and by what\n\n{knobs()}",
        f"### What was chosen\n\n{choices(searched)}",
        f"### Whether short runs tell\n\n{short_and_long(order(results, quick=quick))}",
        between_contenders(found, made, searched),
        f"## At equal executed FLOPs\n\n{figures.get('gaps', '')}\n{executed(found, made)}",
        verdicts(found) if made else "",
        figures.get("", ""),
        f"## At equal training FLOPs\n\n{trained(found, made)}",
        figures.get("training", ""),
        f"## At equal training time\n\n{timed(found, made, results, figures)}",
        f"## Time to a loss\n\n{time_to_loss.section(results, quick=quick)}",
        figures.get("time to a loss", ""),
        f"## At equal loss\n\n{at_equal_loss(results, quick=quick)}",
        f"## Whether the gap grows\n\n{grows(results, quick=quick)}",
        f"## Which width the span wants\n\n{inner_width(results, quick=quick)}",
        f"## How to read the tables\n\n{NOTES}",
    ]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def in_short(results: Path, *, quick: bool = False) -> str:
    """For another page: who beats dense models, and by what rule all were tuned."""
    found, _ = outcomes(results, quick=quick)
    if not (who := verdicts(found)):
        return f"{NOT_RUN}\n"
    words = (
        "All tables, at equal executed FLOPs, training FLOPs, training time and loss, and larger models: "
        "[WHERE_DEPTH_PAYS.md](WHERE_DEPTH_PAYS.md). Losses are of test text. The rule of tuning:"
    )
    picture = "![](figures/gaps-enwik8.png)"
    return f"{picture}\n\n{who}\n{wrapped(words)}\n\n{rule()}"


def rule() -> str:
    """As search.py states it."""
    lines = (search.__doc__ or "").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("1. "))
    return "\n".join(lines[first : lines.index("", first)]) + "\n"


def knobs() -> str:
    rates = ", ".join(f"{rate:g}" for rate in sorted(contenders.RATES))
    rows = [[one.title, one.knob, "; ".join(one.values), one.why] for one in contenders.CONTENDERS]
    return f"Learning rates: {rates}.\n\n{table(['', 'knob', 'values', 'why this one'], rows, words=4)}"


def choices(found: Search, contended: Sequence[Contender] | None = None) -> str:
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
    for one in contenders.CONTENDERS if contended is None else contended:
        count, lost = len(one.values) * len(contenders.RATES), found.lost[one]
        ended = f"{count - found.missing[one]} of {count}" + (f", {lost} lost" if lost else "")
        tried = found.tried[one]
        if not tried:
            rows.append([one.title, NOT_RUN, *[""] * 6, ended])
            continue
        # Of dense models a rate is chosen at each number of layers; of all others one run of all.
        groups = [[t for t in tried if t.value == value] for value in one.values] if one is DENSE else [tried]
        for group in filter(None, groups):
            best, second = group[0], f"{group[1].difference:+.2%}" if len(group) > 1 else DASH
            rate = f"{best.rate:g}" + (" (the edge)" if best.at_the_edge else "")
            figures = [f"{best.loss:.4f}", f"{best.flops:,.0f}", f"{best.dense:.4f}", f"{best.difference:+.2%}"]
            rows.append([one.title, best.value, rate, *figures, second, ended])
    return table(titles, rows, words=2)


def short_and_long(found: list[Order]) -> str:
    words = (
        f"The two best settings of some contenders at {SHORT:,} steps and at {LONG:,}, seed 0: the relative "
        "difference of the second's validation loss to the first's."
    )
    rows = []
    for one in found:
        long = NOT_RUN if one.long is None else f"{one.long:+.2%}"
        kept = "" if one.long is None else "yes" if one.short * one.long > 0 else "no"
        rows.append([one.contender.title, one.first, one.second, f"{one.short:+.2%}", long, kept])
    titles = ["", "first", "second", f"{SHORT:,} steps", f"{LONG:,} steps", "order kept"]
    return f"{wrapped(words)}\n\n{table(titles, rows, words=3)}"


def between_contenders(found: Outcomes, made: list[Entry], search: Search) -> str:
    """Whether those who lead after a short run lead after a long one."""
    ran = {one.name: choice for one in contenders.CONTENDERS if one is not DENSE and (choice := search.choice(one))}
    rows: list[tuple[float, float, str]] = []
    for entry in made:
        choice, against = ran.get(entry.setting.method), found.beside(entry.setting)
        if choice is not None and isinstance(against, tuple):
            rows.append((choice.difference, against[1].mean, choice.contender.title))
    if len(rows) < 2:
        return ""
    pairs = list(itertools.combinations(sorted(rows), 2))
    kept = sum(first[1] < second[1] for first, second in pairs)
    words = (
        f"What was chosen of each contender, beside dense models of its executed FLOPs: after {SHORT:,} steps on "
        f"validation text, and after {LONG:,} on test text, there in the mean over seeds. Of {len(pairs)} pairs of "
        f"contenders {kept} keep their order, so what was chosen by short runs need not be the best for long ones. Of "
        f"all contenders {_moved(min, rows)} gained most by the longer training, and {_moved(max, rows)} lost most."
    )
    lines = [[title, f"{short:+.2%}", f"{long:+.2%}"] for short, long, title in sorted(rows)]
    return f"{wrapped(words)}\n\n{table(['', f'{SHORT:,} steps', f'{LONG:,} steps'], lines)}"


def _moved(most: Callable[..., tuple[float, float, str]], rows: list[tuple[float, float, str]]) -> str:
    return most(rows, key=lambda row: row[1] - row[0])[-1]


def executed(found: Outcomes, made: list[Entry]) -> str:
    titles = ["setting", "rate", "loss", "dense, same FLOPs", "difference", "", "by full rows", "FLOPs", "active"]
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
        row = found.first_row(setting) or {}
        kept = f"{row['kv_bytes_per_token']:,.0f}" if "kv_bytes_per_token" in row else DASH
        figures = [f"{flops.mean:,.0f}", f"{active.mean:.3f}", f"{parameters.mean:,.0f}", kept]
        rows.append([*cells, *_beside(found, entry, "flops_per_token"), _by_full_rows(found, entry), *figures])
    return table([*titles, "parameters", "K/V bytes"], rows)


def trained(found: Outcomes, made: list[Entry]) -> str:
    rows = []
    for entry in made:
        loss, flops = found.stat(entry.setting, "loss"), found.stat(entry.setting, "training_flops")
        cells = _beside(found, entry, "training_flops") if loss else ["", "", ""]
        rows.append([entry.setting.title, show(loss), *cells, f"{flops.mean:,.0f}" if flops else ""])
    return table(["setting", "loss", "dense, same training FLOPs", "difference", "", "training FLOPs"], rows)


def timed(found: Outcomes, made: list[Entry], results: Path, figures: dict[str, str]) -> str:
    """A table and a picture for every device on which steps were timed; all trainings are equally many steps."""
    parts = []
    for device, times in step_times(results).items():
        there, rows = with_steps(found, times), []
        for entry in made:
            loss, step = there.stat(entry.setting, "loss"), there.stat(entry.setting, "step_ms")
            if loss and step and not math.isnan(step.mean):
                spent = f"{step.mean:,.0f}" if step.mean >= 100 else f"{step.mean:.2f}"
                rows.append([entry.setting.title, show(loss), *_beside(there, entry, "step_ms"), spent])
        titles = ["setting", "loss", "dense, same time", "difference", "", "ms per training step"]
        parts.append(f"### {device}\n\n{table(titles, rows)}\n{figures.get(device, '')}")
    if not parts:
        return f"{NOT_RUN}\n"
    words = (
        "A compiled step of each model, alone on its device: on a GPU in bfloat16, by a CUDA graph, on a CPU in "
        "float32, where `--train.compile on` compiles. Losses are those of the tables above, of the same models on "
        "every device. What has not been timed on a device is missing there; how it was timed is in the "
        f"[log](LOG.md). {measured_with(rows_so_far(results / TIMES))}."
    )
    return "\n".join([f"{wrapped(words)}\n", *parts])


def at_equal_loss(results: Path, *, quick: bool = False) -> str:
    """What the loss of a contender costs to run, as a multiple of what dense models of that loss take."""
    timed = pass_times(results)
    titles = ["scale", "setting", "loss", "K/V bytes", *(f"time, {device}, batch {batch}" for device, batch in timed)]
    rows = []
    for models in all_models(results, quick=quick):
        for entry in models.routed():
            loss = models.found.stat(entry.setting, "loss")
            assert loss is not None
            ratios = [models.keys_and_values(entry), *(models.time(entry, times) for times in timed.values())]
            cells = [show(_per_byte(models.found, entry, loss)), *map(shown, ratios)]
            rows.append([models.scale, entry.setting.title, *cells])
    words = (
        "What each model takes to run, over what dense models of its own loss take (on the straight line between the "
        "nearest two; below 1 is less than theirs): keys and values in the cache, and the time of a forward pass "
        "executed on the device that is named, the fastest of eager and compiled, on a GPU in bfloat16 and by CUDA "
        "graphs; each pass takes the next batch of validation text. With `<` no dense model loses as little, and it is "
        "beside the best of them; `outside`: all of them lose less."
    )
    if drawn := drawn_decisions(results):
        words += f" Decisions were drawn at random, with the share of each block, where weights were gone: {drawn}."
    if rows_of_passes := rows_so_far(results / PASSES):
        words += f" Times: {measured_with(rows_of_passes)}."
    return f"{wrapped(words)}\n\n{table(titles, rows, words=2)}"


BESIDE = ["setting", "loss", "dense, same FLOPs", "difference", "", "by full rows", "FLOPs"]


def _rows_beside(found: Outcomes, made: list[Entry]) -> list[list[str]]:
    """Of what has run."""
    rows = []
    for entry in made:
        loss, flops = found.stat(entry.setting, "loss"), found.stat(entry.setting, "flops_per_token")
        if loss and flops:
            beside = _beside(found, entry, "flops_per_token", _bytes_per_token(found, entry))
            cells = [show(_per_byte(found, entry, loss)), *beside, _by_full_rows(found, entry)]
            rows.append([entry.setting.title, *cells, f"{flops.mean:,.0f}"])
    return rows


def inner_width(results: Path, *, quick: bool = False) -> str:
    words = (
        "The span by a rule on the text, with blocks of other widths: a linear map leads into the span, and another "
        "one out of it, and its blocks keep their heads. All have the rate that was searched for the span without "
        "maps. Two controls tell what the maps do by themselves: inner width 256, and a dense model with the same "
        "maps around two of its layers."
    )
    found, made = spans.outcomes_of_widths(results, quick=quick)
    rows = _rows_beside(found, [entry for entry in made if entry.setting.method in (spans.RULE, spans.MAPPED)])
    return f"{wrapped(words)}\n\n{table(BESIDE, rows)}"


def grows(results: Path, *, quick: bool = False) -> str:
    rows = []
    for scale in spans.SCALES:
        found, made = spans.outcomes_at(results, scale, quick=quick)
        rows += [[scale.title, *row] for row in _rows_beside(found, made)]
    titles = ["scale", *BESIDE]
    doubled = spans.doublings(results, quick=quick)
    words = (
        "Span routing by a rule and by those learned deciders that did best in the search and at full length, on "
        "validation text, and the best method that decides block by block, beside those dense models of each scale "
        "that lie around them; rates as searched at width 256, times 256 / width. "
        f"{_readings()} With BPE the rule takes the tokens that begin a word, signs and spaces, which are "
        f"{spans.BPE.budget:g} of all. Losses are in nats per byte at every scale. But BPE is trained and evaluated on "
        "as many tokens as bytes are, so on nearly three times the text (its training reads all of it twice), and its "
        "output head, which is in the FLOPs, costs a little more than a layer: across scales only differences compare. "
        "At the longest trainings six layers stand for dense models, which is a little more than the FLOPs of the rule."
    )
    if doubled:
        told = "; ".join(
            f"from {one.steps:,} to {2 * one.steps:,} {one.test.text('+.2%')}"
            f"{' with one seed' if one.test.std is None else ''} ({one.validation.text('+.2%')} on validation text)"
            for one in doubled
        )
        words += f" What twice the steps change in the loss of the dense model with six layers: {told}."
    told = f"{wrapped(words)}\n\n{table(titles, rows, words=2)}"
    missing = [
        wrapped(f"- {scale}: {'; '.join(who)}.") for scale, who in spans.not_trained(results, quick=quick).items()
    ]
    return "\n".join([told, "Not trained:\n", *missing, ""]) if rows and missing else told


def _readings() -> str:
    """How often a training reads its text."""
    splits = PUBLISHED[contenders.DATA.corpus].train_and_val
    assert splits is not None
    config = DENSE.config(next(iter(DENSE.values)), contenders.RATES[0], LONG)
    tokens = config.train.batch_size * config.model.context
    *some, most = (
        f"{scale.steps * tokens / splits[0]:.1f} times in {scale.steps:,} steps" for scale in spans.lengths()
    )
    return f"A training reads its {splits[0] / 1e6:.0f} million bytes of text {', '.join(some)} and {most}."


def _bytes_per_token(found: Outcomes, entry: Entry) -> float:
    """Of the text that was evaluated, the same for all of a scale."""
    if entry.config.data.tokens == "byte":
        return 1.0
    sparse = (found.first_row(entry.setting) or {})["evaluation"]["sparse"]
    return BITS * sparse["loss"] / sparse["bits_per_byte"]


def _per_byte(found: Outcomes, entry: Entry, loss: Stat) -> Stat:
    size = _bytes_per_token(found, entry)
    return Stat(tuple(value / size for value in loss.values))


def _by_full_rows(found: Outcomes, entry: Entry) -> str:
    """The difference to dense models by the other convention, where there is another."""
    packed, full = (found.stat(entry.setting, name) for name in ("flops_per_token", "full_rows_flops"))
    if packed is None or full is None or full.mean < (1 + SAME) * packed.mean:
        return ""
    return _beside(found, entry, "full_rows_flops")[1]


def _beside(found: Outcomes, entry: Entry, by: Cost, bytes_per_token: float = 1.0) -> list[str]:
    """The loss of dense models at the same cost, how far from it this one is, and the verdict."""
    if entry.setting.method == "dense":
        return [DASH, DASH, ""]
    against = found.beside(entry.setting, by=by)
    if against is None:
        return [NOT_RUN, "", ""]
    if against == OUTSIDE:
        return [OUTSIDE, DASH, ""]
    dense, difference = against
    return [f"{dense.mean / bytes_per_token:.4f}", difference.text("+.2%"), judge(difference)]


def write(results: Path, path: Path, *, quick: bool = False) -> Path:
    """The page at `path` and its figures in `figures/` beside it."""
    with needs_report_extra(results):
        from paper import gaps, loss_over_time
        from paper.tradeoffs import EXECUTED, TRAINED, draw, timed_on

    folder, figures = path.parent / "figures", {}
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found, _ = outcomes(results, quick=quick)
    drawn = {axis.name: draw(found, split="test", axis=axis) for axis in (EXECUTED, TRAINED)}
    for device, times in step_times(results).items():
        drawn[device] = draw(with_steps(found, times), split="test", axis=timed_on(device))
    lines = time_to_loss.lines(results, quick=quick)
    drawn["time to a loss"] = loss_over_time.draw(lines, step_times(results))
    scales = {scale.title: spans.outcomes_at(results, scale, quick=quick)[0] for scale in spans.SCALES}
    apart = {
        "All methods, tuned alike": gaps.gaps(found),
        "Span by a rule: ends of words": gaps.elsewhere(scales),
    }
    drawn["gaps"] = gaps.draw(apart, "gaps-enwik8", "Test text of enwik8, bytes; width 256, unless a row says more")
    for name, drawing in drawn.items():
        if drawing is not None:
            write_bytes(folder / f"{drawing.name}.svg", drawing.svg)
            write_bytes(folder / f"{drawing.name}.png", drawing.png)
            figures[name] = f"![](figures/{drawing.name}.png)\n\n{wrapped(drawing.caption)}\n"
    write_bytes(path, document(results, figures, quick=quick).encode())
    return path
