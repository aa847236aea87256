"""What a run starts from, where that is a finished dense run and not chance. Standard library only."""

import re
from dataclasses import dataclass
from typing import Literal

from tokendepth.checks import check, check_range, check_types


@dataclass(frozen=True)
class RetrofitConfig:
    """A finished dense run whose weights this one begins with, and what of them is trained."""

    base: str = ""
    """Its folder; needed until this run is finished."""
    sha256: str = ""
    """Of its weights."""
    trains: Literal["all", "lora", "routers"] = "all"
    """All weights; low-rank changes of the blocks' matrices, and the routers; or the routers alone."""
    rank: int = 8
    """Of lora."""
    distill: float = 0.5
    """Weight of the divergence from the untouched model; the cross entropy has the rest."""
    routers_first: float = 0.0
    """Part of the training in which only the routers move, where there are any that learn."""
    drop: int = 0
    """How many adjacent blocks of the base are left out: the control."""
    drop_from: int = 0
    """The first of them, counted from 0."""

    def __post_init__(self) -> None:
        check_types(self, "retrofit")
        check(bool(self.base), "retrofit.base", self.base, "the folder of a finished dense run")
        is_hash = re.fullmatch("[0-9a-f]{64}", self.sha256) is not None
        check(is_hash, "retrofit.sha256", self.sha256, "64 hexadecimal digits, the SHA-256 of the base's weights")
        check_range("retrofit.rank", self.rank, 1, 100_000)
        check_range("retrofit.distill", self.distill, 0, 1)
        check_range("retrofit.routers_first", self.routers_first, 0, 1)
        check_range("retrofit.drop", self.drop, 0, 1000)
        check_range("retrofit.drop_from", self.drop_from, 0, 1000)

    @property
    def dropped(self) -> range:
        return range(self.drop_from, self.drop_from + self.drop)
