"""TokenDepthForCausalLM: the native language model, with any method and architecture, as a transformers model.

It wraps a `LanguageModel` and implements no layers of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from tokendepth.checks import check_budget
from tokendepth.config import method_name
from tokendepth.data.dataset import NO_LOSS
from tokendepth.errors import UserError
from tokendepth.hf.cache import DepthCache
from tokendepth.hf.configuration import MODULES, TokenDepthConfig
from tokendepth.layers.positions import RotaryPositions, rotary_frequencies
from tokendepth.measure.calibrate import calibrate_on
from tokendepth.methods import build
from tokendepth.methods.base import Method
from tokendepth.model import Block, Output
from tokendepth.trace import EXECUTIONS, DepthTrace, Execution

THIN_FILE = '''"""{what} of a tokendepth model: the package is what defines it."""

try:
    from tokendepth.hf import {name}
except ImportError as error:
    raise ImportError(f"this model needs the package tokendepth: pip install 'tokendepth[hf]' ({{error}})") from None
'''


@dataclass
class TokenDepthOutput(CausalLMOutputWithPast):
    loss: Tensor | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    aux_loss: Tensor | None = None
    """In training: the method's auxiliary loss, which `loss` includes."""
    depth: DepthTrace | None = None
    """With `output_depth`: which tokens were processed where, and the cost."""


class TokenDepthForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TokenDepthConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True

    config: TokenDepthConfig

    def __init__(self, config: TokenDepthConfig) -> None:
        super().__init__(config)
        native = config.native
        if not native.model.vocab_size:
            raise UserError("model.vocab_size is 0; expected the number of tokens of the tokenizer")
        # transformers sets the default dtype to the requested precision. Build in float32 and convert afterwards, since
        # thresholds stay exact in any precision.
        asked = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            self.model = build(native)
        finally:
            torch.set_default_dtype(asked)
        self.model.to(asked)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Keep the native model's initial weights; recompute buffers that are not saved."""
        if isinstance(module, RotaryPositions):
            init.copy_(module.frequencies, rotary_frequencies(self.model.config))
        if isinstance(module, Method):
            module.set_progress(1.0)

    # -- forward

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DepthCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_depth: bool = False,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> TokenDepthOutput:
        """Logits of the next tokens and, with `labels`, the loss.

        attention_mask: 0 at padding, for all tokens so far or only the new ones. labels: like `input_ids`, with -100 at
        tokens without a loss. num_items_in_batch: number of labels in all micro-batches of a step, on all processes.
        output_depth: also return the trace. `shift_labels`, labels already shifted by one as some collators give them,
        is accepted in `kwargs`: as a named argument, the Trainer would treat it as a second label.
        """
        targets = kwargs.pop("shift_labels", None)
        for name, value in kwargs.items():
            if value is not None and value is not False:
                raise UserError(f"{name} is not an argument of this model; leave it out")
        batch, time = input_ids.shape
        valid = _new_columns(attention_mask, time)
        self._check(input_ids, valid, past_key_values)
        if valid is not None:  # ids at padding may be outside the vocabulary
            input_ids = input_ids.masked_fill(~valid, 0)
        cache = past_key_values
        if cache is None and use_cache and not self.training:
            cache = self.new_cache()
        if targets is None and labels is not None:
            targets = F.pad(labels, (0, 1), value=NO_LOSS)[:, 1:]
        if targets is not None and valid is not None:  # nothing predicts the first token after left padding
            targets = targets.masked_fill(~valid, NO_LOSS)
        # generate() needs only the last token's logits; for all tokens of a long prompt they would take gigabytes
        alone = targets is None and isinstance(logits_to_keep, int) and logits_to_keep == 1
        last = input_ids.new_full((batch,), time - 1) if alone else None
        out = self.model(
            input_ids,
            execution=self._execution(),
            cache=None if cache is None else cache.room_for(batch, time),
            valid=valid,
            read=last,
            **self._loss_arguments(targets),
        )
        if cache is not None:
            cache.advance(time, valid)
            if output_depth:
                cache.traces.append(out.trace)
        loss, aux_loss = (None, None) if targets is None else self._losses(out, targets, num_items_in_batch)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return TokenDepthOutput(
            loss=loss,
            logits=out.logits[:, kept],
            past_key_values=cache,
            aux_loss=aux_loss,
            depth=out.trace if output_depth else None,
        )

    def _execution(self) -> Execution:
        wanted = self.config.execution
        if wanted not in EXECUTIONS:
            raise UserError(f"config.execution is {wanted!r}; expected one of {', '.join(EXECUTIONS)}")
        return "soft" if self.training else wanted

    def _check(self, ids: Tensor, valid: Tensor | None, cache: object) -> None:
        if cache is not None and not isinstance(cache, DepthCache):
            raise UserError(
                f"past_key_values is a {type(cache).__name__}, which cannot hold what this model remembers; leave it "
                "out, or make one by model.new_cache()"
            )
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():  # on a GPU, the check would synchronise
            there, size = ids if valid is None else ids[valid], self.model.config.vocab_size
            if there.numel() and not 0 <= int(there.min()) <= int(there.max()) < size:
                wrong = int(there.min()) if int(there.min()) < 0 else int(there.max())
                raise UserError(
                    f"token id {wrong} is out of range; expected 0 to {size - 1}; for padding, pass an attention_mask"
                )

    def _loss_arguments(self, targets: Tensor | None) -> dict[str, Tensor]:
        """Arguments with which a method computes its own losses over the same tokens as the task."""
        if targets is None or not self.training:
            return {}
        return {"targets": targets, "counted": targets != NO_LOSS}

    def _losses(self, out: Output, targets: Tensor, items: Tensor | int | None) -> tuple[Tensor, Tensor | None]:
        """The total loss and, in training, the auxiliary loss: this micro-batch's contributions to those of the step.

        Auxiliary losses are means over labelled tokens, so they are weighted by this micro-batch's share of all labels.
        """
        flat = targets.flatten().to(out.logits.device)
        task = F.cross_entropy(out.logits.flatten(0, 1).float(), flat, reduction="sum", ignore_index=NO_LOSS)
        own = (flat != NO_LOSS).sum()
        items = own.clamp(min=1) if items is None else items
        items = items.to(task.device) if isinstance(items, Tensor) else items
        if not self.training:
            return task / items, None
        aux = sum(out.losses.values(), torch.zeros_like(task)) * (own / items)
        return task / items + aux, aux

    # -- generation

    def new_cache(self, capacity: int | None = None, *, croppable: bool = False) -> DepthCache:
        """A cache for `past_key_values`; with `capacity`, of fixed size."""
        return DepthCache(self.model, capacity, croppable=croppable)

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Mask ids beyond the vocabulary: they are padding, in a prompt or after the end of a sequence."""
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        inputs = prepare(input_ids, *args, **kwargs)
        outside = inputs["input_ids"] >= self.model.config.vocab_size
        if outside.any():
            mask = inputs.get("attention_mask")
            there = ~outside if mask is None else mask[:, -outside.shape[1] :].bool() & ~outside
            inputs["attention_mask"] = there.long()
        return inputs

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, generation_config: GenerationConfig, model_kwargs: dict, generation_mode: Any, *args: Any, **kwargs: Any
    ) -> None:
        wanted, context = generation_config.cache_implementation, self.model.config.context
        if wanted not in (None, "dynamic", "static"):
            raise UserError(f"cache_implementation is {wanted!r}; expected dynamic or static")
        longest = (generation_config.max_length or 0) - _padding_of(model_kwargs.get("attention_mask"))
        if longest - 1 > context:
            raise UserError(
                f"prompt and new tokens may be {longest} tokens, but this model's context is {context}; lower "
                f"max_new_tokens or max_length to make them {context + 1} or fewer"
            )
        if model_kwargs.get("past_key_values") is not None or not generation_config.use_cache:
            prepare = super()._prepare_cache_for_generation  # pyright: ignore[reportAttributeAccessIssue]
            prepare(generation_config, model_kwargs, generation_mode, *args, **kwargs)
            return
        longest = max(generation_config.max_length, getattr(generation_config, "max_cache_len", None) or 0)
        capacity = min(context, longest) if wanted == "static" else None
        model_kwargs["past_key_values"] = self.new_cache(capacity, croppable=bool(generation_config.is_assistant))

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError(
            "generate_batch needs attention by pages of keys and values, which this model's cache does not have; "
            "use generate() on a padded batch"
        )

    # -- training

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable | None = None, every_n_layers: int = 1
    ) -> None:
        blocks = [module for module in self.model.modules() if isinstance(module, Block)]
        for number, block in enumerate(blocks):
            block.recompute = gradient_checkpointing_func if enable and number % every_n_layers == 0 else None

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(isinstance(module, Block) and module.recompute is not None for module in self.model.modules())

    @property
    def has_budget(self) -> bool:
        """Whether the method has a budget that thresholds calibrate."""
        dial = self.model.method.dial(self.model.config, self.model.method.config)
        return dial is not None and dial.calibrated

    def calibrate(self, input_ids: Tensor, budget: float | None = None) -> None:
        """Set the thresholds so that a share `budget` (default: the model's own) of these tokens is active.

        A method with a budget needs this after training, since inference uses fixed thresholds. `input_ids` are
        training text, `[batch, time]` without padding; the more, the better.
        """
        dial = self.model.method.dial(self.model.config, self.model.method.config)
        if dial is None or not self.has_budget:
            name = method_name(self.config.native.method)
            raise UserError(f"method {name} has no budget to set; leave calibrate out")
        check_budget("budget", dial.own if budget is None else budget)
        was_training = self.training
        self.eval()
        calibrate_on(self.model, input_ids, dial.own if budget is None else budget)
        self.train(was_training)

    # -- embeddings

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Linear | None:
        """None if the head is tied to the embedding."""
        return self.model.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        raise UserError(
            "the vocabulary of this model is fixed; train one with a tokenizer that has the tokens you need"
        )

    # -- files

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing to do: saved models refer to the installed package instead of copying its code."""

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory: Any, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            write_thin_files(Path(save_directory))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but missing, unexpected or mismatched tensors are an error."""
        asked = kwargs.pop("output_loading_info", False)
        if kwargs.get("quantization_config") is not None:
            raise UserError("quantization_config is given; this model's layers are not quantised; leave it out")
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model, info = loaded
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(key if isinstance(key, str) else key[0] for key in info[problem]):
                what = problem.removesuffix("_keys")
                raise UserError(
                    f"{pretrained_model_name_or_path} does not fit its config.json: {len(names)} {what} tensors, such "
                    f"as {names[0]}; restore the folder from a copy"
                )
        return (model, info) if asked else model


def write_thin_files(folder: Path) -> None:
    """Write the files from which transformers loads the classes if `tokendepth.hf` was not imported."""
    for part, name in (("configuration", "TokenDepthConfig"), ("modeling", "TokenDepthForCausalLM")):
        text = THIN_FILE.format(what=part.capitalize(), name=name)
        (folder / f"{MODULES[part]}.py").write_text(text, encoding="utf-8")


def _new_columns(mask: Tensor | None, time: int) -> Tensor | None:
    """`[batch, time]`: which of the new tokens are not padding; None: all."""
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape[1] < time:
        raise UserError(
            f"attention_mask has the shape {tuple(mask.shape)}; expected [batch, tokens so far], 0 at padding"
        )
    valid = mask[:, -time:].bool()
    # Without padding no mask is needed. Under a compiler this is not checked, since it depends on values.
    return None if not torch.compiler.is_compiling() and bool(valid.all()) else valid


def _padding_of(mask: Tensor | None) -> int:
    """The least padding of any sequence in the batch, in columns."""
    return 0 if mask is None else int((mask == 0).sum(1).min())
