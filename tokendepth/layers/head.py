"""The output head: from a token's state to a logit for every token of the vocabulary."""

from tokendepth.config import ModelConfig


def head_flops(model: ModelConfig) -> int:
    """Of one token, whether or not the matrix is the embedding's."""
    return 2 * model.d_model * model.vocab_size
