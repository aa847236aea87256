"""Llama with a router in every layer but the first: a token that halts there skips the feed-forward.

Attention is computed for all tokens, because vLLM plans it once for all layers. Its output for a halted token is
discarded, as in `tokendepth.methods.tsa` with `skip="ffn"`.
"""

from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from tokendepth_vllm.router import Router


class RoutedLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", **rest) -> None:
        super().__init__(vllm_config, prefix, **rest)
        config = vllm_config.model_config.hf_config
        routed = extract_layer_index(prefix) > 0
        self.router = (
            Router(config.hidden_size, config.router_hidden, config.router_threshold_logit) if routed else None
        )

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Takes the previous layer's update and the states before it; returns the same for this layer."""
        if self.router is None:
            return super().forward(positions, hidden_states, residual)
        states = hidden_states if residual is None else hidden_states + residual
        active = self.router(states)
        attended = self.self_attn(positions=positions, hidden_states=self.input_layernorm(states))
        states = states + attended * active[:, None]
        rows = active.nonzero().squeeze(-1)
        update = states.new_zeros(states.shape)
        update[rows] = self.mlp(self.post_attention_layernorm(states[rows]))
        return update, states


class RoutedLlamaForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=RoutedLayer)
