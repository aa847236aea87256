"""TokenDepthConfig: a native model's and method's config in the form that transformers saves and loads."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from tokendepth.checks import check, check_range
from tokendepth.config import FORMAT_VERSION, LARGEST_SEED, RunConfig, from_dict, to_dict
from tokendepth.errors import UserError, did_you_mean
from tokendepth.trace import EXECUTIONS

MODULES = {"configuration": "configuration_tokendepth", "modeling": "modeling_tokendepth"}
"""Files beside saved weights from which transformers gets the classes where nobody has imported them."""
AUTO_MAP = {
    "AutoConfig": f"{MODULES['configuration']}.TokenDepthConfig",
    "AutoModelForCausalLM": f"{MODULES['modeling']}.TokenDepthForCausalLM",
}
OF_TRANSFORMERS = {
    "_name_or_path", "_commit_hash", "attn_implementation", "auto_map", "experts_implementation", "model_type",
    "name_or_path", "num_labels", "output_attentions", "torch_dtype", "transformers_weights",
}  # fmt: skip
"""Keys that transformers writes or passes beside the fields of a config."""


class TokenDepthConfig(PreTrainedConfig):
    """`model` and `method` are what they are in a run's config.json, all values filled in and checked.

    >>> config = TokenDepthConfig(model={"vocab_size": 256, "n_layer": 4}, method={"name": "budget", "budget": 0.5})
    >>> config.native.model.n_layer
    4
    """

    model_type: ClassVar[str] = "tokendepth"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "depth", "aux_loss"]

    format_version: int = FORMAT_VERSION
    """Of `model` and `method`."""
    model: dict[str, Any] | None = None
    """As `tokendepth.config.ModelConfig`; what is left out has its default."""
    method: dict[str, Any] | None = None
    """Its `name` and its options; dense unless set."""
    execution: str = "sparse"
    """How it is executed in evaluation: soft, hard or sparse. It trains as the native model does."""
    seed: int = 0
    """Of the weights of a model that is not loaded."""
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
        """Nothing to do: what is saved names the installed package, of which no file is copied."""

    @property
    def native(self) -> RunConfig:
        """What the native model is built from."""
        method = {"name": "dense"} if self.method is None else self.method
        tree = {"version": self.format_version, "model": self.model or {}, "method": method}
        return from_dict({**tree, "train": {"seed": self.seed}})

    # The names by which others ask.

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
