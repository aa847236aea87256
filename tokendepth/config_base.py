"""The base of every method's options. Standard library only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokendepth.checks import check_types

if TYPE_CHECKING:
    from tokendepth.config import ModelConfig


@dataclass(frozen=True)
class MethodConfig:
    """Base of every method's config. To add one, write a frozen dataclass in `method_configs.py`."""

    def __post_init__(self) -> None:
        check_types(self, "method")

    def check_model(self, model: "ModelConfig") -> None:
        """A UserError if this method does not work with that model."""

    def check_retrofit(self, is_one: bool) -> None:
        """A UserError if a retrofit cannot have this method and its options, or if only a retrofit can."""
