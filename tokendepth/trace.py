"""DepthTrace: which token was worked on where, and what that costs. Every method makes one; every figure reads one.

Two numbers that must not be mixed come out of it. Under `soft` the work is a weight, so `tlops_saved` is the paper's
weighted contribution and no FLOP is skipped. Under `sparse` the work is what ran, and `flops` counts only that.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

Execution = Literal["soft", "hard", "sparse"]
EXECUTIONS: tuple[Execution, ...] = ("soft", "hard", "sparse")


@dataclass(frozen=True)
class Site:
    """One place where depth is spent, with FLOPs (2 x multiply-adds of matrix products) for one token there."""

    name: str
    routed: bool
    """False for a site that is always active, such as the stem."""
    always: float
    """Spent on every token, worked on or not: keys and values that others attend to."""
    active: float
    """Spent on a token that is worked on: queries, its attention row, output projection, feed-forward."""
    router: float = 0.0
    """Spent on deciding."""
    blocks: int = 1
    """Number of blocks at this site: what a token counts in token-layer operations."""
    per_key: float = 0.0
    """The part of `active` that each key costs, if active tokens can be packed into a shorter sequence; else 0."""


@dataclass(frozen=True)
class DepthTrace:
    """`work[site, batch, time]` in [0, 1] (a torch tensor or a numpy array) and what each site costs.

    >>> trace = td.load("runs/tsa")("def depth(token):").trace
    >>> [site.name for site in trace.sites][:2]
    ['block 0', 'block 1']
    >>> 0 <= trace.totals().active_fraction <= 1
    True
    """

    work: Any
    sites: tuple[Site, ...]
    execution: Execution
    outside: float = 0.0
    """FLOPs per token outside the sites: the output head."""
    valid: Any = None
    """`[batch, time]`, False at padding; None where every position holds a token."""
    fewer_keys: Any = None
    """`[batch]`: by how many keys packing shortened each active token's attention; None without packing."""
    read_alone: bool = False
    """Whether the output head was taken for one token of each sequence alone, as when a prompt is read."""

    def totals(self) -> "DepthTotals":
        positions = self.work.shape[1] * self.work.shape[2]
        work, tokens = self.work, positions
        if self.valid is not None:
            work, tokens = work * self.valid, int(self.valid.sum())
        worked = tuple(float(w) for w in work.reshape(len(self.sites), -1).sum(-1).tolist())
        # FLOPs are what ran: soft and hard compute every layer for every position, padding too, whatever the gate says.
        skips = self.execution == "sparse"
        ran = [w if skips and site.routed else positions for site, w in zip(self.sites, worked, strict=True)]
        outside = self.outside * (self.work.shape[1] if self.read_alone else positions)
        full = outside + positions * sum(s.always + s.active for s in self.sites)
        flops = outside + positions * sum(s.always + s.router for s in self.sites)
        flops += sum(s.active * n for s, n in zip(self.sites, ran, strict=True))
        narrower = self._narrower_rows(work) if skips and self.fewer_keys is not None else 0.0
        routed, blocks = tuple(s.routed for s in self.sites), tuple(s.blocks for s in self.sites)
        return DepthTotals(routed, worked, tokens, flops - narrower, full, blocks, narrower)

    def _narrower_rows(self, work: Any) -> float:
        """FLOPs that packing saved in attention."""
        fewer, per_sequence = self.fewer_keys.tolist(), work.sum(2).tolist()
        return sum(
            site.per_key * sum(n * keys for n, keys in zip(active, fewer, strict=True))
            for site, active in zip(self.sites, per_sequence, strict=True)
        )


@dataclass(frozen=True)
class DepthTotals:
    """Sums over traces, as plain numbers. All depth metrics are defined here and nowhere else."""

    routed: tuple[bool, ...]
    work: tuple[float, ...]
    tokens: int
    flops: float
    """FLOPs executed, routers included."""
    flops_dense: float
    """FLOPs of the same blocks with every token active and no routers."""
    blocks: tuple[int, ...] = ()
    """Token-layer operations of a token at each site; 1 if not given."""
    narrower_rows: float = 0.0
    """FLOPs that packing saved in attention; already subtracted from `flops`."""

    def __add__(self, other: "DepthTotals") -> "DepthTotals":
        assert self.routed == other.routed, "traces of different methods do not add up"
        return replace(
            self,
            work=tuple(a + b for a, b in zip(self.work, other.work, strict=True)),
            tokens=self.tokens + other.tokens,
            flops=self.flops + other.flops,
            flops_dense=self.flops_dense + other.flops_dense,
            narrower_rows=self.narrower_rows + other.narrower_rows,
        )

    @property
    def per_site(self) -> list[float]:
        return [w / self.tokens for w in self.work]

    @property
    def active_fraction(self) -> float:
        """Alpha, eq. 6: the mean work over the routed sites; 1 where nothing is routed."""
        fractions = [f for f, routed in zip(self.per_site, self.routed, strict=True) if routed]
        return sum(fractions) / len(fractions) if fractions else 1.0

    @property
    def tlops(self) -> float:
        """Token-layer operations: tokens processed, summed over the blocks."""
        return sum(w * n for w, n in zip(self.work, self._blocks, strict=True))

    @property
    def tlops_saved(self) -> float:
        """Delta, eq. 7: 1 - (1 + (L-1) alpha) / L when one of L sites, the stem, is always active."""
        return 1 - self.tlops / (self.tokens * sum(self._blocks))

    @property
    def _blocks(self) -> tuple[int, ...]:
        return self.blocks or (1,) * len(self.work)

    @property
    def flops_full_rows(self) -> float:
        """FLOPs executed by the other convention: attention rows as wide as without packing."""
        return self.flops + self.narrower_rows

    @property
    def flops_skipped(self) -> float:
        """Share of the router-free dense FLOPs that was not executed; negative where the routers cost more."""
        return 1 - self.flops / self.flops_dense


def add_up(totals: "list[DepthTotals]") -> DepthTotals:
    return reduce(lambda a, b: a + b, totals)
