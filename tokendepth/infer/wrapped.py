"""A wrapper around a model that forwards attribute access to it."""

from typing import Any

from torch import nn

from tokendepth.model import LanguageModel


class Wrapped(nn.Module):
    def __init__(self, original: LanguageModel) -> None:
        super().__init__()
        self.original = original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)
