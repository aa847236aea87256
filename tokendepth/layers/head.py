"""The output head, from a token's state to its logits over the vocabulary."""

from tokendepth.config import ModelConfig


def head_flops(model: ModelConfig) -> int:
    """Per token, whether or not the head is tied to the embedding."""
    return 2 * model.d_model * model.vocab_size
