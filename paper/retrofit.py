"""The study of retrofits: routers bring one dense model to several budgets, compared with simpler ways to get there.

All contenders start from the same weights and are trained on the same tokens with the same seeds: the dense model with
nothing skipped; adjacent blocks dropped; a linear map in their place; a span with a learned router, and with random
decisions; and others, if named. Losses are those of the test split, executed sparsely, at a measured share of the
base's block FLOPs.

All get the same small search, by a rule fixed in advance: `RATES` times two values of one knob (the dense model: four
rates), seed 0, `SHORT` of the steps, at the first budget. The run with the lowest validation loss, relative to the
untouched model on the same text, decides for every budget (relative, because runs made at different times read
different amounts of it). Random decisions use the router's rate. A contender without a search uses its first setting.

    from paper.retrofit import search, study
    search(base=Path("runs/smollm2"), corpus="text:wiki.txt", max_minutes=9)     # repeat both until they are done
    study(base=Path("runs/smollm2"), corpus="text:wiki.txt", max_minutes=9)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paper import grid, tables
from paper.evidence import PAPER
from paper.grid import Deadline, Progress, check_size
from tokendepth.config import DataConfig, DenseConfig, ModelConfig, RunConfig, TrainConfig, from_dict
from tokendepth.data.dataset import Split
from tokendepth.errors import UserError, did_you_mean
from tokendepth.runs.results import Row, rows_so_far
from tokendepth.runs.run import Run
from tokendepth.training.retrofit_options import TRAIN, RetrofitOptions

ROWS, SEARCH_ROWS = "retrofit.json", "retrofit_search.json"
SEEDS = 3
BUDGETS = "0.86,0.70"
TOKENS = 2**16
RATES = (1e-4, 3e-4)
WARMUP = 20
SHORT = 2 / 3
"""Length of a run of the search, as a share of the steps."""

Setting = Mapping[str, Any]
"""Options of a retrofit."""
TITLES = {"smollm2": "SmolLM2-135M-Instruct"}
"""Full names of bases, by the name of their run folder."""


def base_title(base: str) -> str:
    return TITLES.get(base, base)


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    setting: Setting
    knob: tuple[Setting, ...] = ({},)
    """Settings that the search tries; the first one is used if there was no search."""
    rates: tuple[float, ...] = RATES
    like: str = ""
    """Use the learning rate that the search chose for this contender."""
    default: bool = True
    """Part of the study unless contenders are named."""

    def tries(self) -> list[tuple[float, Setting]]:
        return [] if self.like else [(rate, one) for one in self.knob for rate in self.rates]


ROUTED: Setting = {"method": "span"}
TOLD: tuple[Setting, ...] = ({"router": "kl"}, {"router": "teacher"})
CHOOSE: tuple[Setting, ...] = ({"choose": "alike"}, {"choose": "loss"})
CONTENDERS = (
    Contender("dense", "dense, fine-tuned", {"method": "dense"}, rates=(5e-5, 1e-4, 2e-4, 3e-4)),
    Contender("drop", "blocks dropped", {"method": "drop"}, CHOOSE),
    Contender("replaced", "blocks replaced by a linear map", {"method": "replace"}, CHOOSE),
    Contender("span", "span (linear map for skipped tokens)", ROUTED, TOLD),
    Contender("dice", "span, random", {**ROUTED, "router": "dice"}, like="span"),
    Contender("loss", "span, router trained on the true loss", {**ROUTED, "router": "loss"}, default=False),
    Contender("plain", "span, no linear map", {**ROUTED, "bypass": False}, TOLD, default=False),
    Contender("budget", "budget, one router per block", {"method": "budget"}, default=False),
)
"""The most important first, so that a call that is cut short has them."""
SHAPE = ModelConfig(d_model=32, n_layer=8, n_head=4, d_ff=48, context=16, dropout=0.0)
"""Of the base in a miniature (`--quick`)."""


@dataclass(frozen=True)
class Plans:
    """Makes the config for a contender and a budget."""

    base: Run
    corpus: str | None
    context: int | None
    train: TrainConfig
    show: bool
    known: dict[str, RunConfig] = field(default_factory=dict)

    def config(self, setting: Setting, budget: float, rate: float, steps: int) -> RunConfig:
        from tokendepth.training.retrofit_plan import plan

        key = f"{setting} {budget}"
        if key not in self.known:  # measure the base only once
            how = RetrofitOptions(corpus=self.corpus, budget=budget, context=self.context, distill=0.0, **setting)
            self.known[key] = plan(self.base, how, show=self.show)
        warmup = min(WARMUP, steps - 1)
        rhythm = {"eval_every": steps, "checkpoint_every": steps, "compile": "off"}  # too few steps to repay compiling
        train = replace(self.train, lr=rate, warmup=warmup, steps=steps, **rhythm)
        return replace(self.known[key], train=train)


def search(*, budgets: str = BUDGETS, results: Path = Path("results"), **settings: Any) -> Progress:
    """Fill the rows of the search."""
    study = _Study(budgets=budgets, results=results, **settings)
    steps = max(2, round(SHORT * study.train.steps))
    configs = {}
    for one in study.wanted:
        for number, (rate, knob) in enumerate(one.tries()):
            name = f"{one.name}-{study.budgets[0]:g}-try{number}"
            configs[name] = study.plans.config({**one.setting, **knob}, study.budgets[0], rate, steps)
    return study.fill(configs, SEARCH_ROWS, "val")


def study(*, budgets: str = BUDGETS, seeds: int = SEEDS, results: Path = Path("results"), **settings: Any) -> Progress:
    """Fill the rows of all contenders at all budgets."""
    study = _Study(budgets=budgets, seeds=seeds, results=results, **settings)
    chosen = choices(results / SEARCH_ROWS, study.base)
    configs: dict[str, RunConfig] = {}
    for number, budget in enumerate(study.budgets):
        for one in study.wanted:
            if one.name == "dense" and number:  # the same at any budget
                continue
            rate, knob = chosen.get(one.like or one.name, (one.rates[0], one.knob[0]))
            knob = one.knob[0] if one.like else knob
            config = study.plans.config({**one.setting, **knob}, budget, rate, study.train.steps)
            for seed in range(study.seeds):
                name = f"{one.name}-{budget:g}-seed{seed}"
                configs[name] = replace(config, train=replace(config.train, seed=seed))
    return study.fill(configs, ROWS, "test", also=at_full_budget)


def choices(path: Path, base: Run) -> dict[str, tuple[float, Setting]]:
    """The rate and setting with the lowest validation loss, for each contender that was searched."""
    tries = {one.name: one.tries() for one in CONTENDERS}
    searched = search_differences(path, base.fingerprint)
    return {name: tries[name][min(found, key=found.__getitem__)] for name, found in searched.items()}


def search_differences(path: Path, sha256: str) -> dict[str, dict[int, float]]:
    """Loss relative to the untouched base with this SHA-256, by contender and number of the try.

    Not the loss itself: rows made at different times read different amounts of validation text.
    """
    found: dict[str, dict[int, float]] = {}
    for row in rows_so_far(path):
        retrofit = from_dict(row["config"]).retrofit
        if retrofit is not None and retrofit.sha256 == sha256:
            name, _, number = row["name"].rsplit("-", 2)
            evaluation = row["evaluation"]
            difference = evaluation["sparse"]["loss"] / evaluation["untouched"]["loss"] - 1
            found.setdefault(name, {})[int(number.removeprefix("try"))] = difference
    return found


class _Study:
    def __init__(
        self,
        *,
        base: Path | None = None,
        corpus: str | None = None,
        context: int | None = None,
        budgets: str = BUDGETS,
        seeds: int = SEEDS,
        only: str = "",
        train: TrainConfig = TRAIN,
        quick: bool = False,
        max_minutes: float | None = None,
        out: Path = Path("runs/retrofit"),
        results: Path = Path("results"),
        workers: int | None = None,
        show: bool = True,
    ) -> None:
        check_size(seeds, max_minutes)
        if base is None and not quick:
            remedy = "a finished dense run; tokendepth import makes one"
            raise UserError(f"python -m paper retrofit needs --base RUN, {remedy}")
        self.budgets, self.wanted = _numbers(budgets), _chosen(only)
        if quick:
            seeds, train = 1, replace(train, steps=4, batch_size=4, eval_every=4, checkpoint_every=4, device="cpu")
        self.deadline = Deadline.after(max_minutes)
        self.base = _miniature_base(out, show=show) if base is None else Run.open(base)
        self.seeds, self.train, self.quick, self.out, self.results = seeds, train, quick, out, results
        self.workers, self.show = workers, show
        self.plans = Plans(self.base, corpus, context, train, show)

    def fill(self, configs: dict[str, RunConfig], rows: str, split: Split, **more: Any) -> Progress:
        tokens = tables.MINIATURE_TOKENS if self.quick else TOKENS
        how: dict[str, Any] = {"workers": self.workers, "show": self.show, "here": self.quick, "tokens": tokens}
        with grid.repeatable(self.out):
            path = self.results / rows
            return grid.fill(configs, self.out, path, self.deadline, split=split, curve=False, **how, **more)


def _chosen(only: str) -> list[Contender]:
    names = [one.name for one in CONTENDERS]
    for name in filter(None, only.split(",")):
        if name not in names:
            raise UserError(f"--only has {name!r}: no such contender; {did_you_mean(name, names)}")
    return [one for one in CONTENDERS if (one.name in only.split(",") if only else one.default)]


def _numbers(budgets: str) -> list[float]:
    try:
        return [float(word) for word in budgets.split(",")]
    except ValueError:
        raise UserError(f"--budgets is {budgets!r}; expected numbers with commas between them: {BUDGETS}") from None


def _miniature_base(out: Path, *, show: bool) -> Run:
    from tokendepth.training.loop import train

    config = RunConfig(
        DataConfig(f"text:{PAPER}"), SHAPE, DenseConfig(), TrainConfig(steps=8, batch_size=4, device="cpu")
    )
    return train(config, out / "base", resume=True, show=show)


def at_full_budget(run: Run) -> Row:
    """The same weights with every token active: the loss, and how often both agree on the most likely next token."""
    import torch
    import torch.nn.functional as F

    from tokendepth import data
    from tokendepth.data.dataset import NO_LOSS
    from tokendepth.measure.evaluate import batches, load_model
    from tokendepth.runs.machine import choose_device

    device = choose_device(run.config.train.device, "--train.device")
    model, dataset = load_model(run, device), data.load(run.config.data)
    sites = sum(site.routed for site in model.method.sites(keys=1))
    if not sites:
        return {}
    nats = agree = count = 0.0
    tokens = (run.evaluation or {}).get("tokens")
    with torch.no_grad():
        for ids, targets in batches(dataset, "test", run.config.model.context, device, tokens):
            everyone = torch.ones(sites, *ids.shape, dtype=torch.bool, device=device)
            full = model(ids, execution="hard", decisions=everyone).logits.flatten(0, 1).float()
            own = model(ids, execution="sparse").logits.flatten(0, 1)
            flat = targets.flatten()
            counted = flat != NO_LOSS
            nats += F.cross_entropy(full, flat, reduction="sum").item()
            agree += ((full.argmax(-1) == own.argmax(-1)) & counted).sum().item()
            count += counted.sum().item()
    return {"full_budget_loss": nats / count, "agreement": agree / count}
