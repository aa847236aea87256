"""Does the gap between routed and dense models grow with training, context and width, and does it hold for BPE?

Nothing is searched again. At each scale, dense models of several depths are compared with span at word ends, with the
learned deciders that did best in the search and at full length (on validation text), and with the best method that
decides in every block. If a run takes minutes, only span at word ends is compared with six dense layers. Learning rates
are those of the search, times 256 / width. Longer sequences come in smaller batches, so that every step has as many
tokens. BPE shows whether a span pays if tokens are already words or parts of them. Span at word ends is also trained
with blocks of other widths.

    from paper.spans import spans
    spans(max_minutes=9)                    # repeat until nothing is left
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from paper import contenders
from paper.contenders import DATA, LONG, MODEL, WARM_UP, miniature
from paper.depth import LAYERS as ALL_LAYERS
from paper.depth import ROWS as BASE_ROWS
from paper.depth import SEEDS, Entry, check_names, entries, fill_on_test, outcomes_of
from paper.evidence import by_experiment
from paper.grid import Deadline, Progress, first_seeds_first, missing, same
from paper.outcomes import Executed, Outcomes
from paper.search import Search
from paper.settings import Setting
from tokendepth import data
from tokendepth.config import RunConfig, SpanConfig, override
from tokendepth.errors import UserError, did_you_mean
from tokendepth.report.summary import Stat
from tokendepth.runs.results import rows_so_far

ROWS = "spans.json"
LAYERS = (6, 4, 8)
RULE, MAPPED = "span_rule", "dense_maps"
BLOCK_BY_BLOCK = ("tsa", "budget", "mod", "mor", "act", "itt")
"""Methods that decide anew in every block, or in every recursion of shared blocks."""


@dataclass(frozen=True)
class Scale:
    title: str
    width: int = MODEL.d_model
    context: int = MODEL.context
    steps: int = LONG
    tokens: str = DATA.tokens
    budget: float | None = None
    """Share of the tokens that take a span; None: as searched."""
    layers: tuple[int, ...] = LAYERS
    """Of dense models, so that some cost more than the routed models and some have a lower loss."""
    routed: tuple[str, ...] | None = None
    """What is compared with the dense models, if runs take long; None: word ends and the best of the others."""
    seeds: int = SEEDS
    """The most seeds that are trained at this scale."""

    def of(self, config: RunConfig) -> RunConfig:
        """The same model at this scale."""
        grown, model, train = self.width // MODEL.d_model, config.model, config.train
        shape = {"d_model": self.width, "n_head": grown * model.n_head, "d_ff": grown * model.d_ff}
        batch = train.batch_size * model.context // self.context
        rhythm = {"warmup": self.steps // WARM_UP, "eval_every": self.steps // 4, "checkpoint_every": self.steps}
        method = config.method
        if self.budget is not None and isinstance(method, SpanConfig):
            method = replace(method, budget=self.budget)
        return replace(
            config,
            data=replace(config.data, tokens=self.tokens),
            method=method,
            model=replace(model, context=self.context, **shape),
            train=replace(train, lr=train.lr / grown, steps=self.steps, batch_size=batch, **rhythm),
        )


BASE = Scale("width 256, context 256, 4,000 steps", layers=ALL_LAYERS)
TWICE = Scale("8,000 steps", steps=2 * LONG)
WIDE = Scale("width 512", width=512, layers=(*LAYERS, 12))
WIDE_TWICE = Scale("width 512, 8,000 steps", width=512, steps=2 * LONG)
SEVEN_TIMES = Scale("28,000 steps", steps=28_000, layers=(6,), routed=(RULE,))
"""Each run takes minutes, so the only dense baseline has six layers, which cost a little more than span."""
FOURTEEN_TIMES = replace(SEVEN_TIMES, title="56,000 steps", steps=56_000)
TWENTY_EIGHT_TIMES = replace(SEVEN_TIMES, title="112,000 steps", steps=112_000)
BPE = Scale("BPE of 4,096 tokens", tokens="bpe:4096", budget=0.56)
"""4,096, so that at width 256 the head costs about a layer; that of 16,384 would cost more than four.

The budget is the share of word ends: 0.557 of the tokens of the training split, counted over all of it (0.559 of the
validation split; 0.256 of bytes).
"""
SCALES = (
    BASE,
    WIDE,
    Scale("context 1,024", context=1024),
    TWICE,
    WIDE_TWICE,
    SEVEN_TIMES,
    FOURTEEN_TIMES,
    TWENTY_EIGHT_TIMES,
    replace(SEVEN_TIMES, title="224,000 steps", steps=224_000, routed=(), seeds=1),
    BPE,
)
"""The most important first, so that a call that is cut short has it."""
WIDTHS = (256, 384, 512)
"""Of the blocks of a span, in models of width 256. The first is a control for the maps into and out of the span."""
DENSE_WITH_MAPS = {
    "model.n_layer": "6",
    "method.begin": "2",
    "method.length": "2",
    "method.decide": "dice",
    "method.budget": "1",
}
"""Turn span at word ends with maps into a dense model: all tokens take the two layers between the maps."""
DENSE_SIX = Setting("dense, 6 layers", "dense", "")
INNER_WIDTH = "inner width"
"""The name of those models, where others have that of their scale."""


def scale_of(title: str) -> Scale:
    """The scale with this title; the first one if it is empty."""
    found = {scale.title: scale for scale in SCALES}
    _check_scale(title, found)
    return found.get(title, BASE)


def _check_scale(title: str, known: Iterable[str]) -> None:
    if title and title not in known:
        raise UserError(f"--scale is {title!r}: no such scale; {did_you_mean(title, known)}")


def at_scale(results: Path, scale: Scale, *, quick: bool = False) -> list[Entry]:
    """Dense models, span at word ends and the best of the others, as far as the search is complete."""
    search = Search.read(results, quick=quick)
    deciders = [one.name for one in contenders.CONTENDERS if one.method == "span" and one.name != RULE]
    learned = {best_of(deciders, search), best_at_full_length(deciders, results, search)}
    wanted = {RULE, *learned, best_of(BLOCK_BY_BLOCK, search)} if scale.routed is None else set(scale.routed)
    found = []
    for entry in entries(search):
        layers = entry.config.model.n_layer
        if entry.setting.method in wanted or (entry.setting.method == "dense" and layers in scale.layers):
            config = entry.config if scale == BASE else scale.of(entry.config)
            found.append(replace(entry, config=miniature(config) if quick else config, rate=config.train.lr))
    return found


def best_of(names: Iterable[str], search: Search) -> str | None:
    """The contender with the lowest loss relative to dense models in the search."""
    choices = [search.choice(one) for one in contenders.CONTENDERS if one.name in names]
    found = [choice for choice in choices if choice is not None]
    return min(found, key=lambda one: one.difference).contender.name if found else None


def best_at_full_length(names: Iterable[str], results: Path, search: Search) -> str | None:
    """The contender with the lowest final loss on validation text, on average over its seeds."""
    path = results / BASE_ROWS
    rows, losses = by_experiment(rows_so_far(path)), {}
    for one in contenders.CONTENDERS:
        choice = search.choice(one)
        if one.name in names and choice is not None:
            config = one.config(choice.value, choice.rate, LONG)
            if seeds := rows.get(same(config, seed=False)):
                losses[one.name] = mean(row["history"][-1]["val_loss"] for row in seeds.values())
    return min(losses, key=losses.__getitem__, default=None)


def of_widths(results: Path, *, quick: bool = False) -> list[Entry]:
    """Span at word ends at the first scale, with blocks of other widths, and a dense model with the same maps."""
    found = []
    for rule in (one for one in at_scale(results, BASE, quick=quick) if one.setting.method == RULE):
        for width in WIDTHS:
            inner = width * rule.config.model.d_model // MODEL.d_model
            setting = Setting(f"{rule.setting.title}, inner width {width}", RULE, "")
            found.append(replace(rule, setting=setting, config=override(rule.config, {"method.width": str(inner)})))
        dense = override(rule.config, {**DENSE_WITH_MAPS, "method.width": str(rule.config.model.d_model)})
        found.append(replace(rule, setting=Setting("dense with maps, 6 layers", MAPPED, ""), config=dense))
    return found


def named(title: str, run: str) -> str:
    """The folder of a run of a scale."""
    return f"{title.replace(' ', '_').replace(',', '')}-{run}"


def spans(
    *,
    seeds: int = SEEDS,
    scale: str = "",
    only: tuple[str, ...] = (),
    quick: bool = False,
    max_minutes: float | None = None,
    out: Path = Path("runs/spans"),
    results: Path = Path("results"),
    workers: int | None = None,
    show: bool = True,
) -> Progress:
    """Fill the rows of all scales except the first, which `depth` fills; run folders go to `out`.

    `scale` and `only` name the scale and the contenders to train now; none means all. Dense models and span at word
    ends come first at all scales, since every question needs them.
    """
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; expected 1 or more")
    if max_minutes is not None and not max_minutes > 0:
        raise UserError(f"--max-minutes is {max_minutes:g}; expected a number above 0")
    check_names(tuple(name for name in only if name != MAPPED))
    urgent, others, deadline = {}, {}, Deadline.after(max_minutes)
    made = {one.title: at_scale(results, one, quick=quick) for one in SCALES[1:]}
    most = {one.title: min(seeds, one.seeds) for one in SCALES}
    made[INNER_WIDTH] = of_widths(results, quick=quick)
    _check_scale(scale, made)
    for title, found in made.items():
        for entry in found if scale in ("", title) else ():
            if not only or entry.setting.method in only:
                runs = entry.runs(1 if quick else most.get(title, seeds))
                kind = urgent if _is_urgent(entry) else others
                kind |= {named(title, name): config for name, config in runs.items()}
    configs = {**first_seeds_first(urgent), **first_seeds_first(others)}
    if not any(made.values()):
        raise UserError(f"{results} has no complete search yet; run: python -m paper search")
    if not configs:
        raise UserError(f"--only is {', '.join(only)}: none of them is part of {scale or 'any scale'}; name others")
    for text in {config.data for config in missing(configs, results / ROWS).values()}:
        data.load(text)  # fills the cache: otherwise parallel runs would each train the BPE and encode the text
    how = {"workers": workers, "quick": quick, "show": show, "in_order": True}
    return fill_on_test(configs, out, results / ROWS, deadline, **how)


def _is_urgent(entry: Entry) -> bool:
    """The dense models that all are compared with, and span at word ends."""
    return entry.setting.method == RULE or (entry.setting.method == "dense" and entry.config.model.n_layer in LAYERS)


def outcomes_at(results: Path, scale: Scale, *, quick: bool = False) -> tuple[Outcomes, list[Entry]]:
    found = at_scale(results, scale, quick=quick)
    return outcomes_of(found, results, BASE_ROWS if scale == BASE else ROWS), found


def not_trained(results: Path, *, quick: bool = False) -> dict[str, list[str]]:
    """The titles of what has no row, by scale."""
    missing = {}
    for scale in SCALES:
        found, made = outcomes_at(results, scale, quick=quick)
        if titles := [entry.setting.title for entry in made if not found.executed(entry.setting)]:
            missing[scale.title] = titles
    return missing


def outcomes_of_widths(results: Path, *, quick: bool = False) -> tuple[Outcomes, list[Entry]]:
    plain = [one for one in at_scale(results, BASE, quick=quick) if one.setting.method in ("dense", RULE)]
    found = [*plain, *of_widths(results, quick=quick)]
    return outcomes_of(found, results, BASE_ROWS, ROWS), found


def lengths() -> list[Scale]:
    """The first scale and those that differ from it only in the length of training, the shortest first."""
    shape = BASE.width, BASE.context, BASE.tokens, BASE.budget
    alike = [one for one in SCALES if (one.width, one.context, one.tokens, one.budget) == shape]
    return sorted(alike, key=lambda scale: scale.steps)


@dataclass(frozen=True)
class Doubling:
    """Relative change in the loss of the dense model with six layers after twice the steps, over shared seeds."""

    steps: int
    test: Stat
    validation: Stat


def doublings(results: Path, scales: Iterable[Scale], *, quick: bool = False) -> list[Doubling]:
    """Of `scales` that differ only in the length of training."""
    ended: dict[int, dict[int, Executed]] = {}
    for scale in scales:
        found, made = outcomes_at(results, scale, quick=quick)
        if any(entry.setting == DENSE_SIX for entry in made):
            ended[scale.steps] = {one.seed: one for one in found.executed(DENSE_SIX)}
    gains = []
    for steps, short in ended.items():
        long = ended.get(2 * steps, {})
        if pairs := [(short[seed], long[seed]) for seed in short.keys() & long.keys()]:
            test = Stat(tuple(after.loss / before.loss - 1 for before, after in pairs))
            validation = Stat(tuple(after.val_loss / before.val_loss - 1 for before, after in pairs))
            gains.append(Doubling(steps, test, validation))
    return gains
