"""Tokens in windows, and intervals by resampling whole windows: the tokens of one window depend on each other."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 400
FEWEST = 20
"""Minimum number of windows for an interval; with fewer, resampling understates chance."""
MOST = 2000
"""Maximum number of resampled units: with more windows, neighbours form one unit, since they too are similar."""
QUANTILES = (0.025, 0.975)
KNOWN = 0.9
"""Share of the resamples that must have a value for an interval to be given."""

Estimate = dict[str, float | None]
"""`value`, and the `low` and `high` end of its 95% interval; each None if unknown."""


class Windows:
    """The windows of a text, resampled with replacement; the same seed gives the same intervals."""

    def __init__(self, window: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0) -> None:
        """window: `[token]`, the number of each token's window, in the order of the text."""
        _, found = np.unique(window, return_inverse=True)
        windows = int(found.max()) + 1
        self.count = min(windows, MOST)
        self.of = found * self.count // windows
        """`[token]`: the unit that each token belongs to."""
        draws = np.random.default_rng(seed).multinomial(self.count, np.full(self.count, 1 / self.count), resamples)
        self.weights = draws.astype(float)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """`[unit]`: sum over each unit of one number per token."""
        return np.bincount(self.of, values, self.count)

    def estimate(
        self, parts: Sequence[np.ndarray], statistic: Callable[..., Any], among: np.ndarray | None = None
    ) -> Estimate:
        """A statistic of sums over all tokens, and its interval.

        parts: what is summed, each one number per token. among: the tokens that the statistic is about, if not all of
        them; if they occur in fewer than `FEWEST` units, there is no interval.
        """
        return self.of_sums([self.sums(part) for part in parts], statistic, among)

    def of_sums(
        self, parts: Sequence[np.ndarray], statistic: Callable[..., Any], among: np.ndarray | None = None
    ) -> Estimate:
        """The same, from sums over the units."""
        by_unit = np.stack(parts)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(*by_unit.sum(1)))
            spread = np.asarray(statistic(*(by_unit @ self.weights.T)), float)
        units = self.count if among is None else np.count_nonzero(np.bincount(self.of[among], minlength=self.count))
        known = spread[np.isfinite(spread)]
        if not np.isfinite(value):
            return {"value": None, "low": None, "high": None}
        if units < FEWEST or len(known) < KNOWN * len(spread):
            return {"value": value, "low": None, "high": None}
        low, high = np.quantile(known, QUANTILES)
        return {"value": value, "low": float(low), "high": float(high)}

    def mean(self, values: np.ndarray, among: np.ndarray | None = None) -> Estimate:
        """Mean of one number per token, over all tokens or `among` some."""
        counted = np.ones(len(self.of)) if among is None else among.astype(float)
        return self.estimate([values * counted, counted], np.divide, among)

    def difference(self, values: np.ndarray, among: np.ndarray) -> Estimate:
        """The mean among some tokens, minus the mean of all others."""
        inside, outside = among.astype(float), (~among).astype(float)
        parts = [values * inside, inside, values * outside, outside]
        return self.estimate(parts, lambda a, n, b, m: a / n - b / m, among)

    def rank_correlation(self, a: np.ndarray, b: np.ndarray) -> Estimate:
        """Spearman's. Ranks are those in the whole text, not recomputed in every resample."""
        known = np.isfinite(a) & np.isfinite(b)
        x, y = np.zeros(len(a)), np.zeros(len(b))
        # Centred, so that sums of squares lose no digits.
        x[known], y[known] = (ranks(values[known]) - (known.sum() + 1) / 2 for values in (a, b))
        parts = [known.astype(float), x, y, x * x, y * y, x * y]
        return self.estimate(parts, _pearson, known)


def _pearson(n: Any, x: Any, y: Any, xx: Any, yy: Any, xy: Any) -> Any:
    return (xy - x * y / n) / np.sqrt((xx - x * x / n) * (yy - y * y / n))


def ranks(values: np.ndarray) -> np.ndarray:
    """From 1; ties share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def excludes_zero(estimate: Estimate) -> bool:
    low, high = estimate["low"], estimate["high"]
    return low is not None and high is not None and (low > 0 or high < 0)
