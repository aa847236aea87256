"""Linear layers: few rows fast on a CPU, and their numbers, also where a low-rank adapter stands in their place."""

from typing import Any

from torch import Tensor, nn

from tokendepth.errors import UserError
from tokendepth.ops.few_rows.eager import linear


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def weights_of(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias that `linear` multiplies by and adds.

    PEFT puts a module around a layer that it adapts. Whoever takes rows of the weight must not pass the adapter by.
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
