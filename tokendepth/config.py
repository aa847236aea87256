"""Everything a run depends on, as frozen dataclasses with strict JSON. Standard library only.

A `RunConfig` is one tree: `data`, `model`, `method`, `train`. Each method's options are in a class of their own (in
`method_configs.py`, re-exported here), so another method's option is an error. Values are checked on construction; an
invalid one raises `UserError`.
"""

import dataclasses
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tokendepth.checks import check, check_range, check_types, coerce, flag, is_optional, printable, types_of
from tokendepth.data_config import CORPORA as CORPORA
from tokendepth.data_config import DEFAULT_SOURCE_LENGTH, DataConfig
from tokendepth.data_config import NO_CORPUS as NO_CORPUS
from tokendepth.data_config import OWN_TOKENS as OWN_TOKENS
from tokendepth.data_config import SYNTHETIC_CORPORA as SYNTHETIC_CORPORA
from tokendepth.data_config import TOKENS as TOKENS
from tokendepth.errors import UserError, did_you_mean
from tokendepth.method_configs import HALTING_THRESHOLDS as HALTING_THRESHOLDS
from tokendepth.method_configs import METHOD_CONFIGS, DenseConfig, MethodConfig, method_name
from tokendepth.method_configs import PAPER_THRESHOLDS as PAPER_THRESHOLDS
from tokendepth.method_configs import ACTConfig as ACTConfig
from tokendepth.method_configs import BudgetConfig as BudgetConfig
from tokendepth.method_configs import EarlyExitConfig as EarlyExitConfig
from tokendepth.method_configs import ITTConfig as ITTConfig
from tokendepth.method_configs import MoDConfig as MoDConfig
from tokendepth.method_configs import MoRConfig as MoRConfig
from tokendepth.method_configs import SpanConfig as SpanConfig
from tokendepth.method_configs import SwitchConfig as SwitchConfig
from tokendepth.method_configs import TSAConfig as TSAConfig
from tokendepth.retrofit_config import RetrofitConfig

FORMAT_VERSION = 2
"""Version 2 added kinds of layers, and tokens other than characters and bytes. Earlier versions can be read."""

LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True)
class ModelConfig:
    d_model: int = 256
    """Width of the residual stream."""
    n_layer: int = 6
    """Number of transformer blocks, including those that are never skipped."""
    n_head: int = 8
    """Attention heads (query heads); must divide d_model unless head_width is set."""
    d_ff: int = 1024
    """Hidden width of the feed-forward network."""
    context: int = 128
    """Longest sequence; with learned positions, also their number."""
    dropout: float = 0.1
    """Dropout on embeddings, attention weights and both residual updates while training."""
    vocab_size: int = 0
    """Vocabulary size; 0 takes it from the corpus."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm (mean, variance, scale and shift) or RMSNorm (scale only)."""
    norm_eps: float = 1e-5
    """Epsilon of the norms, added to the variance."""
    positions: Literal["learned", "rotary"] = "learned"
    """learned adds a vector for each position to the embedding; rotary rotates queries and keys (RoPE)."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How rotary frequencies are scaled for a longer context than the model was first trained on."""
    rope_factor: float = 1.0
    """Factor by which rope_scaling extends the context."""
    rope_original_context: int = 0
    """Context before scaling; for llama3 and yarn."""
    rope_low: float = 1.0
    """Frequencies with at most this many turns in the original context are fully scaled; for llama3 and yarn."""
    rope_high: float = 0.0
    """Frequencies with at least this many turns are not scaled; for llama3 (default 4) and yarn (default 32)."""
    n_kv_head: int = 0
    """Key/value heads, each shared by a group of query heads (GQA); 0 gives every query head its own."""
    head_width: int = 0
    """Width of a head; 0 means d_model / n_head."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Which attention projections have a bias: none, queries, keys and values, or the output projection too."""
    qk_norm: bool = False
    """RMSNorm on queries and keys before their dot product."""
    ffn: Literal["gelu", "swiglu", "geglu"] = "gelu"
    """Feed-forward network: two layers with GELU, or gated with SiLU (SwiGLU) or tanh-GELU (GeGLU)."""
    ffn_bias: bool = True
    """Whether the linear layers of the feed-forward network have a bias."""
    tie_head: bool = True
    """Whether the output head shares its weights with the token embedding."""
    embedding_scale: float = 1.0
    """Factor on the input embeddings (not on a tied output head)."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        for name in ("d_model", "n_head", "d_ff", "context"):
            check_range(f"model.{name}", getattr(self, name), 1, 1_000_000)
        check_range("model.n_layer", self.n_layer, 1, 1000)  # layers take memory even on the meta device
        check_range("model.vocab_size", self.vocab_size, 0, 10_000_000)
        check_range("model.dropout", self.dropout, 0, 1, below=True)
        check_range("model.head_width", self.head_width, 0, 1_000_000)
        if self.d_model % self.n_head and not self.head_width:
            raise UserError(
                f"model.d_model is {self.d_model}; expected a multiple of model.n_head ({self.n_head}); "
                "set --model.d-model or --model.n-head"
            )
        divides = 0 <= self.n_kv_head <= self.n_head and self.n_head % (self.n_kv_head or 1) == 0
        expected = f"0, or a divisor of model.n_head ({self.n_head})"
        check(divides, "model.n_kv_head", self.n_kv_head, expected)
        check_range("model.embedding_scale", self.embedding_scale, 1e-6, 1e6)
        check(0 < self.norm_eps < 1, "model.norm_eps", self.norm_eps, "a number above 0 and below 1")
        self._check_positions()

    def _check_positions(self) -> None:
        check(1 < self.rope_base <= 1e12, "model.rope_base", self.rope_base, "a number above 1 and up to 1e+12")
        check_range("model.rope_factor", self.rope_factor, 1, 1_000_000)
        check_range("model.rope_original_context", self.rope_original_context, 0, 100_000_000)
        check_range("model.rope_low", self.rope_low, 0, 1_000_000)
        check_range("model.rope_high", self.rope_high, 0, 1_000_000)
        if self.positions == "learned":
            self._check_unset("learned positions are not rotary", "rope_base", "rope_scaling")
        if self.rope_scaling == "none":
            self._check_unset("model.rope_scaling is none", "rope_factor")
        if self.rope_scaling in ("none", "linear"):
            unused = ("rope_original_context", "rope_low", "rope_high")
            self._check_unset(f"model.rope_scaling is {self.rope_scaling}", *unused)
        if self.positions == "learned":
            return
        if self.width % 2:
            raise UserError(
                f"model.head_width is {self.width}, an odd number; expected an even one, since rotary positions "
                "rotate pairs; set it with --model.head-width or --model.n-head"
            )
        if self.rope_scaling in ("llama3", "yarn"):
            expected = f"the context before scaling, since rope_scaling is {self.rope_scaling}"
            check(self.rope_original_context > 0, "model.rope_original_context", self.rope_original_context, expected)
            high = self.rope_high or {"llama3": 4.0, "yarn": 32.0}[self.rope_scaling]
            check(0 < self.rope_low < high, "model.rope_low", self.rope_low, f"a number above 0 and below {high:g}")

    def _check_unset(self, since: str, *names: str) -> None:
        """Setting an option that would have no effect is an error."""
        for name in names:
            default, value = getattr(type(self), name), getattr(self, name)
            check(value == default, f"model.{name}", value, f"{default!r}, since {since}")

    @property
    def width(self) -> int:
        """Width of one attention head."""
        return self.head_width or self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 5000
    """Optimiser steps."""
    batch_size: int = 64
    """Sequences per optimiser step, over all ranks and accumulation."""
    accumulate: int = 1
    """Micro-batches per optimiser step. Without dropout it changes the result only by rounding, unless the method
    computes a statistic over each micro-batch, as budget, span and others do; the training log then warns."""
    lr: float = 3e-4
    """Peak learning rate; a cosine schedule lowers it to a tenth."""
    warmup: int = 0
    """Steps over which the learning rate rises to its peak; with it, deep models tolerate a higher rate."""
    weight_decay: float = 0.1
    """Weight decay of AdamW."""
    decay: Literal["matrices", "all"] = "matrices"
    """Which weights decay: matrices excludes biases, norms and embeddings; all is what the TSA paper's MLX runs did."""
    clip: float = 1.0
    """Maximum norm of the gradient."""
    seed: int = 0
    """Seed of initial weights, data order and dropout."""
    eval_every: int = 250
    """Steps between validations."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    log_every: int = 50
    """Steps between rows of metrics.jsonl."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses the GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the matrix products in training; auto is bfloat16 on a GPU, float32 on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto turns it on if it saves time: for 25,000 steps or more on a GPU."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder (needs the extra `tensorboard`)."""

    def __post_init__(self) -> None:
        check_types(self, "train")
        for name in ("steps", "batch_size", "accumulate", "eval_every", "checkpoint_every", "log_every"):
            check_range(f"train.{name}", getattr(self, name), 1, 10**9)
        check_range("train.seed", self.seed, 0, LARGEST_SEED)
        check_range("train.lr", self.lr, 0, 10)
        expected = f"a number from 0 to below train.steps ({self.steps})"
        check(0 <= self.warmup < self.steps, "train.warmup", self.warmup, expected)
        check_range("train.weight_decay", self.weight_decay, 0, 10)
        check(self.clip > 0 and math.isfinite(self.clip), "train.clip", self.clip, "a finite number above 0")
        expected = f"a multiple of train.accumulate ({self.accumulate})"
        check(self.batch_size % self.accumulate == 0, "train.batch_size", self.batch_size, expected)


@dataclass(frozen=True)
class RunConfig:
    """The complete configuration of a run: data, model, method, training. Immutable; invalid values raise UserError.

    `tokendepth train RECIPE --help` describes every value. `recipe` changes them by dotted name.

    >>> config = td.recipe("shakespeare.budget")
    >>> config.model.n_layer, config.train.steps
    (6, 5000)
    """

    data: DataConfig = field(default_factory=DataConfig)
    """Corpus, and what one token is: `data.corpus`, `data.tokens`."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape and kinds of layers: `model.d_model`, `model.n_layer`, `model.context` and others."""
    method: MethodConfig = field(default_factory=DenseConfig)
    """Routing method and its options, such as `method.budget`."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Training: `train.steps`, `train.lr`, `train.seed` and others."""
    recipe: str = ""
    """Name of the recipe that it was made from."""
    retrofit: RetrofitConfig | None = None
    """The model that a retrofit starts from, and what of it is trained; None for all other runs."""

    def __post_init__(self) -> None:
        if self.data.synthetic:
            needed = 2 * (self.data.source_length or DEFAULT_SOURCE_LENGTH) + 2
            expected = f"at least {needed}, the length of one {self.data.corpus} example"
            check(self.model.context >= needed, "model.context", self.model.context, expected)
        self.method.check_model(self.model)
        if self.retrofit is not None:
            self.method.check_retrofit(True)


# --- strict JSON ------------------------------------------------------------------------------------------------------


def to_dict(config: RunConfig) -> dict[str, Any]:
    """A plain, JSON-ready tree that `from_dict` turns back into an equal config."""
    tree = dataclasses.asdict(config)
    tree["method"] = {"name": method_name(config.method), **tree["method"]}
    if config.retrofit is None:
        del tree["retrofit"]
    return {"version": FORMAT_VERSION, **tree}


def from_dict(tree: object) -> RunConfig:
    """Strict: unknown keys, wrong types, values out of range and newer versions are errors."""
    if not isinstance(tree, dict):
        raise UserError(f"a config is {type(tree).__name__}; expected a JSON object; restore it from a copy")
    tree = dict(tree)
    version = tree.pop("version", None)
    if type(version) is not int or version < 1:
        raise UserError(f"config version is {version!r}; expected a whole number up to {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise UserError(
            f"config version is {version}, newer than this tokendepth can read ({FORMAT_VERSION}); upgrade tokendepth"
        )
    method = tree.get("method", {})
    if not isinstance(method, dict):
        raise UserError(f"method is {method!r}; expected a JSON object with a name; restore config.json from a copy")
    method = dict(method)
    name = method.pop("name", None)
    if not isinstance(name, str) or name not in METHOD_CONFIGS:
        raise UserError(f"method.name is {name!r}: no such method; {did_you_mean(str(name), METHOD_CONFIGS)}")
    tree["method"] = _build(METHOD_CONFIGS[name], method, "method.")
    for part, cls in (("data", DataConfig), ("model", ModelConfig), ("train", TrainConfig)):
        tree[part] = _build(cls, tree.get(part, {}), part + ".")
    if "retrofit" in tree:
        tree["retrofit"] = _build(RetrofitConfig, tree["retrofit"], "retrofit.")
    return _build(RunConfig, tree, "")


def _build(cls: type, tree: object, prefix: str) -> Any:
    if not isinstance(tree, dict):
        raise UserError(f"{prefix.rstrip('.')} is {tree!r}; expected a JSON object")
    hints = types_of(cls)
    for key in tree:
        if key not in hints:
            hint = did_you_mean(str(key), hints) if hints else "it has no options"
            raise UserError(f"{prefix}{printable(key)}: unknown key; {hint}")
    return cls(**{key: coerce(hints[key], value, prefix + key) for key, value in tree.items()})


def parse_value(hint: Any, text: str, name: str) -> Any:
    """Parse `text` from a command line or a sweep, as strictly as JSON is checked."""
    inner = [a for a in typing.get_args(hint) if a is not type(None)] if is_optional(hint) else [hint]
    if text == "None" and is_optional(hint):
        return None
    for kind in inner:
        if kind is bool and text in ("True", "False", "true", "false"):
            return text in ("True", "true")
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                pass
    return coerce(hint, text, name)


def options(config: RunConfig) -> dict[str, Any]:
    """Every dotted name that can be overridden, with its type: `{"train.steps": int, ...}`."""
    found = {}
    for part in ("data", "model", "method", "train"):
        for key, hint in types_of(type(getattr(config, part))).items():
            found[f"{part}.{key}"] = hint
    return found


def override(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """`config` with dotted names set, from values or from text: `override(c, {"train.steps": "100"})`."""
    known = options(config)
    parts: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        if name not in known:
            raise UserError(unknown_option(name, config))
        part, key = name.split(".")
        read = parse_value if isinstance(value, str) else coerce
        parts.setdefault(part, {})[key] = read(known[name], value, name)
    made = {part: dataclasses.replace(getattr(config, part), **values) for part, values in parts.items()}
    return dataclasses.replace(config, **made)


def unknown_option(name: str, config: RunConfig, others: Iterable[str] = ()) -> str:
    """The message for an unknown option: which method has it, else the nearest flag of the config's or of `others`."""
    name = printable(name)
    part, _, key = name.rpartition(".")
    known, own = options(config), method_name(config.method)
    if name in ("method", "method.name"):
        methods = ", ".join(METHOD_CONFIGS)
        return f"{flag(name)}: the recipe chooses the method, as in shakespeare.mod; it is one of {methods}"
    spellings = {spelling: flag(o) for o in known for spelling in (o, o.replace(".", "_"), o.split(".")[1])}
    if part in ("", "method") and key not in spellings:
        owners = [m for m, cls in METHOD_CONFIGS.items() if key in types_of(cls)]
        if owners:
            return f"{flag(name)}: an option of method {' and '.join(owners)}, but this run's method is {own}; drop it"
        if part and not any(n.startswith("method.") for n in known):
            return f"{flag(name)}: unknown option; method {own} has no options; drop it"
    word = key if key in spellings else name
    return f"{flag(name)}: unknown option; {did_you_mean(word, {*map(flag, known), *others}, spellings)}"
