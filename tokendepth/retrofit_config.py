"""What a retrofitted run starts from: a finished dense run. Standard library only."""

import re
from dataclasses import dataclass
from typing import Literal

from tokendepth.checks import check, check_range, check_types


@dataclass(frozen=True)
class RetrofitConfig:
    """The finished dense run whose weights this one starts from, and which weights are trained."""

    base: str = ""
    """Its folder; keep it until this run is finished."""
    sha256: str = ""
    """SHA-256 of its weights."""
    trains: Literal["all", "lora", "routers"] = "all"
    """all weights, lora (low-rank updates of the blocks' matrices, plus the routers), or only the routers."""
    rank: int = 8
    """Rank of lora."""
    distill: float = 0.5
    """Weight of the divergence from the untouched model in the loss; cross entropy has the rest."""
    routers_first: float = 0.0
    """First part of the training, from 0 to 1, in which only new parameters are trained: the routers and linear map."""
    drop: int = 0
    """Number of adjacent blocks of the base that are left out, as a control."""
    drop_from: int = 0
    """First block that is left out, counted from 0."""

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
