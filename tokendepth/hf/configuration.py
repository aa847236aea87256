"""TokenDepthConfig: the native model and method config in the form that transformers saves and loads."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from tokendepth.checks import check, check_range
from tokendepth.config import FORMAT_VERSION, LARGEST_SEED, RunConfig, from_dict, to_dict
from tokendepth.errors import UserError, did_you_mean
from tokendepth.trace import EXECUTIONS

MODULES = {"configuration": "configuration_tokendepth", "modeling": "modeling_tokendepth"}
"""Files saved with the weights from which transformers loads the classes if `tokendepth.hf` was not imported."""
AUTO_MAP = {
    "AutoConfig": f"{MODULES['configuration']}.TokenDepthConfig",
    "AutoModelForCausalLM": f"{MODULES['modeling']}.TokenDepthForCausalLM",
}
OF_TRANSFORMERS = {
    "_name_or_path", "_commit_hash", "attn_implementation", "auto_map", "experts_implementation", "model_type",
    "name_or_path", "num_labels", "output_attentions", "torch_dtype", "transformers_weights",
}  # fmt: skip
"""Keys that transformers writes or passes in addition to a config's fields."""


class TokenDepthConfig(PreTrainedConfig):
    """`model` and `method` as in a run's config.json, with defaults filled in and checked.

    >>> config = TokenDepthConfig(model={"vocab_size": 256, "n_layer": 4}, method={"name": "budget", "budget": 0.5})
    >>> config.native.model.n_layer
    4
    """

    model_type: ClassVar[str] = "tokendepth"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "depth", "aux_loss"]

    format_version: int = FORMAT_VERSION
    """Format version of `model` and `method`."""
    model: dict[str, Any] | None = None
    """Fields of `tokendepth.config.ModelConfig`; missing ones get their defaults."""
    method: dict[str, Any] | None = None
    """`name` and options of the method; default: dense."""
    execution: str = "sparse"
    """Execution in evaluation mode: soft, hard or sparse. Training is as in the native model."""
    seed: int = 0
    """Seed for the initial weights of a new model."""
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for key in kwargs:
            if key not in OF_TRANSFORMERS:
                hint = did_you_mean(str(key), self.__dataclass_fields__)
                raise UserError(f"{key}: unknown key of a TokenDepthConfig; {hint}")
        check(self.execution in EXECUTIONS, "execution", self.execution, f"one of {', '.join(EXECUTIONS)}")
        for name in ("seed", "format_version"):
            check(type(getattr(self, name)) is int, name, getattr(self, name), "a whole number")
        check_range("seed", self.seed, 0, LARGEST_SEED)
        tree = to_dict(self.native)
        self.model, self.method, self.format_version = tree["model"], tree["method"], tree["version"]
        super().__post_init__(**{key: value for key, value in kwargs.items() if key != "auto_map"})
        self.auto_map = dict(AUTO_MAP)

    @classmethod
    def of(cls, config: RunConfig, **options: Any) -> "TokenDepthConfig":
        """The model and method of a run's config."""
        tree = to_dict(config)
        return cls(model=tree["model"], method=tree["method"], seed=config.train.seed, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: saved models refer to the installed package instead of copying its code."""

    @property
    def native(self) -> RunConfig:
        """The native config."""
        method = {"name": "dense"} if self.method is None else self.method
        tree = {"version": self.format_version, "model": self.model or {}, "method": method}
        return from_dict({**tree, "train": {"seed": self.seed}})

    # Names that transformers and other libraries expect.

    @property
    def vocab_size(self) -> int:
        return self.native.model.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.native.model.d_model

    @property
    def num_hidden_layers(self) -> int:
        return self.native.model.n_layer

    @property
    def num_attention_heads(self) -> int:
        return self.native.model.n_head

    @property
    def num_key_value_heads(self) -> int:
        return self.native.model.kv_heads

    @property
    def head_dim(self) -> int:
        return self.native.model.width

    @property
    def max_position_embeddings(self) -> int:
        return self.native.model.context

    @property
    def tie_word_embeddings(self) -> bool:
        return self.native.model.tie_head
