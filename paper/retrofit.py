"""Retrofit, judged: one dense model brought to some budgets by routers, beside what must be beaten.

All contenders begin with the same weights and are trained on the same tokens under the same seeds: the dense model
trained alike; adjacent blocks dropped, then trained; a span with a learned router, and with dice in its place; a router
for each block. Every loss is of the test split, executed sparsely, at a measured share of the base's block FLOPs.

    from paper.retrofit import study
    study(base=Path("runs/smollm2"), corpus="text:wiki.txt", max_minutes=9)      # repeat it until nothing is left
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paper import grid, tables
from paper.evidence import PAPER
from paper.grid import Deadline, Progress, check_size
from tokendepth.config import DataConfig, DenseConfig, ModelConfig, RunConfig, TrainConfig
from tokendepth.errors import UserError, did_you_mean
from tokendepth.runs.results import Row
from tokendepth.runs.run import Run
from tokendepth.training.retrofit_options import TRAIN, RetrofitMethod, RetrofitOptions, RouterChoice

ROWS = "retrofit.json"
SEEDS = 3
BUDGETS = "0.86,0.70"
TOKENS = 2**19


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    method: RetrofitMethod
    router: RouterChoice | None = None

    def options(self, budget: float, corpus: str | None, context: int | None) -> RetrofitOptions:
        return RetrofitOptions(corpus=corpus, budget=budget, method=self.method, router=self.router, context=context)


CONTENDERS = (
    Contender("dense", "dense, trained alike", "dense"),
    Contender("span", "one decision for a span; router told the divergence", "span", "kl"),
    Contender("drop", "adjacent blocks dropped, then trained", "drop"),
    Contender("dice", "the span, dice instead of the router", "span", "dice"),
    Contender("budget", "a router for each block, told the size of the update", "budget", "update"),
    Contender("loss", "the span; router told the true loss", "span", "loss"),
)
"""What decides most comes first: a call that is cut short has it."""
SHAPE = ModelConfig(d_model=32, n_layer=8, n_head=4, d_ff=48, context=16, dropout=0.0)
"""Of the base of a miniature."""


def study(
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
) -> Progress:
    """Fill the rows of all contenders at all budgets; run folders go to `out`."""
    check_size(seeds, max_minutes)
    if base is None and not quick:
        raise UserError("python -m paper retrofit needs --base RUN, a finished dense run; tokendepth import makes one")
    found = _miniature_base(out, show=show) if base is None else Run.open(base)
    if quick:
        seeds, train = 1, replace(train, steps=4, batch_size=4, eval_every=4, checkpoint_every=4, device="cpu")
    wanted = _chosen(only)
    configs: dict[str, RunConfig] = {}
    for number, budget in enumerate(_numbers(budgets)):
        for one in wanted:
            if one.method == "dense" and number:  # it is the same at any budget
                continue
            config = _planned(found, one.options(budget, corpus, context), train, show=show)
            for seed in range(seeds):
                seeded = replace(config, train=replace(config.train, seed=seed))
                configs[f"{one.name}-{budget:g}-seed{seed}"] = seeded
    tokens = tables.MINIATURE_TOKENS if quick else TOKENS
    how: dict[str, Any] = {"workers": workers, "show": show, "here": quick, "tokens": tokens, "split": "test"}
    with grid.repeatable(out):
        return grid.fill(configs, out, results / ROWS, Deadline.after(max_minutes), also=at_full_budget, **how)


def _planned(base: Run, options: RetrofitOptions, train: TrainConfig, *, show: bool) -> RunConfig:
    from tokendepth.training.retrofit_plan import plan

    return replace(plan(base, options, show=show), train=train)


def _chosen(only: str) -> list[Contender]:
    names = [one.name for one in CONTENDERS]
    for name in filter(None, only.split(",")):
        if name not in names:
            raise UserError(f"--only has {name!r}: no such contender; {did_you_mean(name, names)}")
    return [one for one in CONTENDERS if not only or one.name in only.split(",")]


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
    """The same weights with every token active: their loss, and how often both choose the same next token."""
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
