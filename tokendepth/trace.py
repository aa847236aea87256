"""DepthTrace: which tokens were processed where, and what that costs. Every method makes one; every figure reads one.

It gives two numbers that must not be mixed. Under `soft` the work is a weight: `tlops_saved` is the weighted
contribution of the TSA paper, and no FLOP is skipped. Under `sparse` the work is what ran, and `flops` counts that.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

Execution = Literal["soft", "hard", "sparse"]
EXECUTIONS: tuple[Execution, ...] = ("soft", "hard", "sparse")


@dataclass(frozen=True)
class Site:
    """A place where a router decides, or where every token is processed, such as a block.

    FLOPs are for one token: 2 x the multiply-adds of matrix products.
    """

    name: str
    """Such as "block 0"."""
    routed: bool
    """Whether a router decides here; False if every token is processed, as in the stem."""
    always: float
    """FLOPs spent on every token, processed or not: keys and values that other tokens attend to."""
    active: float
    """FLOPs spent only on a processed token: queries, its attention row, output projection, feed-forward."""
    router: float = 0.0
    """FLOPs of the decision."""
    blocks: int = 1
    """Number of blocks at this site: the token-layer operations of one token."""
    per_key: float = 0.0
    """The part of `active` that each key costs, if active tokens can be packed into a shorter sequence; else 0."""


@dataclass(frozen=True)
class DepthTrace:
    """Which tokens were processed where, and what each site costs. A site is a place such as a block.

    >>> trace = td.load("runs/tsa")("def depth(token):").trace
    >>> [site.name for site in trace.sites][:2]
    ['block 0', 'block 1']
    >>> 0 <= trace.totals().active_fraction <= 1
    True
    """

    work: Any
    """`[site, batch, time]`, from 0 (skipped) to 1 (processed), a torch tensor or a numpy array."""
    sites: tuple[Site, ...]
    """One `Site` for each entry of the first dimension of `work`."""
    execution: Execution
    """soft (work is a weight, nothing is skipped), hard (0 or 1, nothing is skipped) or sparse (really skipped)."""
    outside: float = 0.0
    """FLOPs per token outside the sites: the output head."""
    valid: Any = None
    """`[batch, time]`, False at padding; None if there is no padding."""
    fewer_keys: Any = None
    """`[site, batch]`: by how many keys packing shortened each active token's attention; None without packing."""
    read_alone: bool = False
    """Whether the output head ran for only one token of each sequence, as when a prompt is read."""

    def totals(self) -> "DepthTotals":
        """Add up the work over all tokens, and the FLOPs over all positions that were computed."""
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
            site.per_key * sum(n * keys for n, keys in zip(active, shorter, strict=True))
            for site, active, shorter in zip(self.sites, per_sequence, fewer, strict=True)
        )


@dataclass(frozen=True)
class DepthTotals:
    """Sums over one or several traces, as plain numbers; totals can be added. All depth metrics are defined here."""

    routed: tuple[bool, ...]
    """For each site, whether a router decides there."""
    work: tuple[float, ...]
    """For each site, the sum of the work over the tokens."""
    tokens: int
    """Number of tokens, padding excluded."""
    flops: float
    """FLOPs executed, routers included."""
    flops_dense: float
    """FLOPs of the same blocks with every token active and no routers."""
    blocks: tuple[int, ...] = ()
    """For each site, the token-layer operations of one token; 1 if not given."""
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
        """For each site, the mean work: the share of tokens that it processed, under soft their mean weight."""
        return [w / self.tokens for w in self.work]

    @property
    def active_fraction(self) -> float:
        """Mean work over the routed sites (alpha, eq. 6 of the TSA paper); 1 if there are none."""
        fractions = [f for f, routed in zip(self.per_site, self.routed, strict=True) if routed]
        return sum(fractions) / len(fractions) if fractions else 1.0

    @property
    def tlops(self) -> float:
        """Token-layer operations: tokens processed, summed over the blocks."""
        return sum(w * n for w, n in zip(self.work, self._blocks, strict=True))

    @property
    def tlops_saved(self) -> float:
        """Share of token-layer operations saved (delta, eq. 7): 1 - (1 + (L-1) alpha) / L if 1 of L is not routed."""
        return 1 - self.tlops / (self.tokens * sum(self._blocks))

    @property
    def _blocks(self) -> tuple[int, ...]:
        return self.blocks or (1,) * len(self.work)

    @property
    def flops_full_rows(self) -> float:
        """FLOPs executed if attention is counted as wide as without packing."""
        return self.flops + self.narrower_rows

    @property
    def flops_skipped(self) -> float:
        """Share of `flops_dense` that was not executed; negative if routers cost more than skipping saves."""
        return 1 - self.flops / self.flops_dense


def add_up(totals: "list[DepthTotals]") -> DepthTotals:
    return reduce(lambda a, b: a + b, totals)
