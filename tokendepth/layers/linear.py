"""Linear layers that are fast for a few rows on a CPU, and their weights, including those of a LoRA adapter."""

from typing import Any

from torch import Tensor, nn

from tokendepth.errors import UserError
from tokendepth.ops.few_rows.eager import linear


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def weights_of(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weight and bias that `linear` applies, including active adapters.

    PEFT wraps the layers that it adapts, so code that slices the weight itself would miss the adapter.
    """
    return (linear.weight, linear.bias) if is_plain(linear) else _adapted(linear)


def is_plain(*layers: nn.Module) -> bool:
    return all(isinstance(layer, nn.Linear) for layer in layers)


def _adapted(layer: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = layer.weight, layer.bias
    if layer.disable_adapters or layer.merged:
        return weight, bias
    for adapter in layer.active_adapters:
        if adapter not in getattr(layer, "lora_A", {}):
            continue
        if adapter in layer.lora_variant:
            raise UserError(
                f"adapter {adapter!r} is a variant of LoRA; expected plain LoRA; merge it into the model first"
            )
        weight = weight + layer.get_delta_weight(adapter)
    return weight, bias
