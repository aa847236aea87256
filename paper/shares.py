"""How far routed blocks are from the share of tokens that the budget asks for, and which rows have old thresholds.

The budget is the share of every routed block; the mean over blocks would hide blocks that miss it on either side.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tokendepth.config import BudgetConfig
from tokendepth.methods.budget import spread

FIRST = "32,768 tokens, however much the parts of the text differ"
LOOKED_AT = {
    "857fe488af0b": FIRST,
    "60ee5051e604": FIRST,
    "41382c3d2b36": FIRST,
    "774a5b35f86f": FIRST,
    "2752c6f566f7": FIRST,
    "27791e8ca2c1": FIRST,
    "ccc76dcc8817": "as much as the average over blocks needs",
}
"""The text that calibration used, by the commits of rows with an older calibration."""


@dataclass(frozen=True)
class Shares:
    """The shares of one model at one budget, block by block."""

    named: list[float]
    executed: list[float]
    commit: str

    @classmethod
    def of(cls, method: BudgetConfig, budget: float, per_site: list[float], env: dict[str, Any] | None) -> "Shares":
        _, *executed = per_site  # the first block is not routed
        named = spread(method.profile, budget) if method.profile else [budget] * len(executed)
        return cls(named, executed, (env or {}).get("commit", ""))

    @property
    def off_in_a_block(self) -> float:
        return max(abs(share - named) for share, named in zip(self.executed, self.named, strict=True))

    @property
    def off_in_the_mean(self) -> float:
        return abs(fmean(self.executed) - fmean(self.named))


def off(found: list[Shares]) -> str:
    block, mean = max(one.off_in_a_block for one in found), max(one.off_in_the_mean for one in found)
    return f"off by at most {block:.4f} in a single block; the mean over blocks by at most {mean:.4f}"


def older(found: list[Shares]) -> str:
    """A note if thresholds are older than the current calibration; else empty."""
    looked_at = dict.fromkeys(LOOKED_AT[one.commit] for one in found if one.commit in LOOKED_AT)
    if not looked_at:
        return ""
    return (
        "The thresholds of these budget models come from an older calibration. The current one reads as much training "
        f"text as the most varied block needs; theirs read {', or '.join(looked_at)}."
    )
