"""The functions of `import tokendepth as td`: what the commands do, without printing.

Their examples are run by a test, one after the other, as they stand in `tokendepth.__all__`.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from tokendepth import data, methods
from tokendepth.config import RunConfig
from tokendepth.data.dataset import Split
from tokendepth.errors import UserError
from tokendepth.infer import generate as generating
from tokendepth.infer.compile import compiled
from tokendepth.infer.text_model import TextModel
from tokendepth.measure import evaluate as evaluating
from tokendepth.model import LanguageModel
from tokendepth.runs.files import read_json
from tokendepth.runs.run import Run
from tokendepth.trace import Execution
from tokendepth.training import loop, retrofit_plan
from tokendepth.training.progress import console
from tokendepth.training.retrofit_wish import Choice, RetrofitMethod, RouterChoice, Wish

AnyModel = TypeVar("AnyModel", LanguageModel, TextModel)


def build(config: RunConfig) -> LanguageModel:
    """The untrained model of a config, on the CPU; the same seed gives the same weights.

    Where the config leaves the vocabulary to the corpus, the corpus is read (and downloaded, the first time).

    >>> model = td.build(td.recipe("modern.budget_10m", {"model.vocab_size": 8192}))
    >>> round(sum(weight.numel() for weight in model.parameters()) / 1e6)
    10
    """
    if not config.model.vocab_size:
        config = loop.resolve(config, data.load(config.data))
    return methods.build(config)


def train(config: RunConfig, out: str | Path, *, resume: bool = False, show: bool = True) -> Run:
    """Train a config into the folder `out`; `resume` goes on from its newest checkpoint. `show` prints progress.

    Ctrl-C saves and stops within one step; the same call with `resume=True` then ends in the same weights.

    >>> config = td.recipe("demo.tsa", {"data.corpus": "text:corpus.txt", "train.steps": 2})
    >>> run = td.train(config, "runs/tsa", show=False)
    >>> run.finished
    True
    """
    return loop.train(config, out, resume=resume, show=show)


def retrofit(
    model: Run | str | Path,
    out: str | Path,
    *,
    corpus: str | None = None,
    budget: float = 0.85,
    method: RetrofitMethod = "span",
    router: RouterChoice | None = None,
    begin: int | None = None,
    length: int | None = None,
    choose: Choice = "alike",
    drop: int | None = None,
    trains: Literal["all", "lora", "routers"] = "all",
    rank: int = 8,
    distill: float = 0.5,
    context: int | None = None,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    show: bool = True,
) -> Run:
    """Put routers into a finished dense model and train it, to execute `budget` of its blocks' FLOPs.

    `model` is a run, a Hugging Face folder or a GGUF file; it is needed until the retrofit is finished, which is a run
    like any other. One decision for adjacent blocks (`method="span"`), or one for each block ("budget"); "dense" and
    "drop" are controls. Unless `begin`, `length` or `drop` say which blocks, that is measured. The other options are
    those of `tokendepth retrofit --help`; `changes` sets what is left by its dotted name, as in `recipe`.

    >>> dense = td.recipe("demo.dense", {"data.corpus": "text:corpus.txt", "train.steps": 2})
    >>> run = td.train(dense, "runs/dense", show=False)
    >>> small = td.retrofit(run, "runs/small", budget=0.8, changes={"train.steps": 2}, show=False)
    >>> small.config.method.budget < 1
    True
    """
    wish = Wish(
        corpus=corpus, budget=budget, method=method, router=router, begin=begin, length=length, choose=choose,
        drop=drop, trains=trains, rank=rank, distill=distill, context=context,
    )  # fmt: skip
    base = _dense_run(model, Path(out))
    begun = retrofit_plan.begun_in(out) if resume else None
    config = retrofit_plan.plan(base, wish, changes, begun=begun, show=show)
    if show and os.environ.get("RANK", "0") == "0":
        console.print(retrofit_plan.in_words(config, base.config), markup=False, soft_wrap=True)
    return loop.train(config, out, resume=resume, show=show)


def load(run: Run | str | Path, *, device: str = "auto", budget: float | None = None) -> TextModel:
    """The trained model of a run folder, ready to be called on text or on ids.

    `budget` sets the share of the tokens that its routed blocks work on, for a method that has such a dial.

    >>> model = td.load("runs/tsa")
    >>> out = model(["one text", "another"])
    >>> sorted(out.trace.valid.sum(1).tolist())
    [7, 8]
    """
    return TextModel.of(Run.open(_path(run)), device, budget)


def evaluate(
    run: Run | str | Path,
    *,
    split: Split = "val",
    device: str = "auto",
    timing: bool = True,
    budget: float | None = None,
    curve: bool = False,
    tokens: int | None = None,
) -> dict[str, Any]:
    """Measure a finished run over a whole split: soft, hard and sparse, FLOPs, controls, time on this machine.

    `curve` executes a model with a dial at each of its points; `tokens` takes the beginning of the split only. Figures
    of the whole validation split at the run's own budget are kept in the folder, where `tokendepth report` finds them.

    >>> figures = td.evaluate("runs/tsa", timing=False)
    >>> sorted(figures["sparse"])[:2]
    ['active_fraction', 'active_fraction_per_site']
    >>> figures["decision_flips"]
    0
    """
    opened = Run.open(_path(run))
    found = evaluating.evaluate(
        opened, split=split, device=device, timing=timing, budget=budget, curve=curve, tokens=tokens
    )
    if split == "val" and budget is None and tokens is None:
        opened.write_evaluation(found)
    return found


class Generation:
    """Text as it is generated: iterate over its pieces, or ask for all of it.

    >>> generation = td.generate("runs/tsa", "def ", tokens=5, temperature=0)
    >>> "".join(generation) == generation.text
    True
    >>> len(generation.spending.depth)
    5
    """

    def __init__(self, pieces: Iterator[str], spending: generating.Spending) -> None:
        self._rest, self._read = pieces, []
        self.spending = spending
        """What each token cost so far, and the seconds that all of them took."""

    def __iter__(self) -> Iterator[str]:
        yield from self._read
        for piece in self._rest:
            self._read.append(piece)
            yield piece

    @property
    def text(self) -> str:
        """The whole continuation; what is not there yet is generated now."""
        return "".join(self)


def generate(
    run: Run | str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    execution: Execution = "sparse",
    device: str = "auto",
    budget: float | None = None,
) -> Generation:
    """Continue a prompt with a finished run. Temperature 0 takes the likeliest token; `seed` fixes the others.

    >>> len(td.generate("runs/tsa", "def ", tokens=5).text)
    5
    """
    spending = generating.Spending()
    pieces = generating.generate(
        Run.open(_path(run)), prompt, spending, tokens=tokens, temperature=temperature, seed=seed,
        execution=execution, device=device, budget=budget,
    )  # fmt: skip
    return Generation(pieces, spending)


def compile(model: AnyModel) -> AnyModel:
    """The same weights in the form that runs fastest, for inference; the first call of a shape takes some ten seconds.

    >>> fast = td.compile(td.load("runs/tsa"))
    >>> type(fast).__name__
    'TextModel'
    """
    if isinstance(model, TextModel):
        return TextModel(compiled(model.network), model.tokenizer)
    return compiled(model)


def _dense_run(model: Run | str | Path, out: Path) -> Run:
    """The run that `model` is; a Hugging Face folder or a GGUF file becomes one, in a folder beside `out`."""
    path = Path(_path(model))
    config = path / "config.json"
    foreign = path.is_file() or (config.is_file() and "model_type" in read_json(config))
    if not foreign:
        return Run.open(path)
    try:
        from tokendepth.hf.importing import import_model  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise UserError(f"{path} is not a tokendepth run; this version retrofits those of tokendepth train") from None
    imported = out.with_name(f"{out.name}-base")
    return Run.open(imported) if Run(imported).finished else import_model(path, imported)


def _path(run: Run | str | Path) -> str | Path:
    return run.path if isinstance(run, Run) else run
