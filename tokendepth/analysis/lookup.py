"""Is a router a lookup table? How much of its decisions the token explains, and what the previous token adds."""

from typing import Any

import numpy as np

from tokendepth.analysis.windows import FEWEST, Estimate, Windows

SHUFFLES = 10
PIECES = 20
"""Pieces of the text; each is left out once, to see how much the share depends on it (jackknife)."""
STUDENT = 2.093
"""The 97.5% quantile of Student's t with 19 degrees of freedom, for 20 pieces."""
SEEN = 5
"""How often a pair must have been seen to be used by the lookup; otherwise it uses only the token."""


def entropy(counts: np.ndarray) -> np.ndarray:
    """In bits, over the last dimension."""
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    return -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(-1)


def information(active: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mutual information of type and decision, in bits; of the `counts` tokens of each type, `active` are active."""
    table = np.stack([active, counts - active], axis=-1)
    given = (counts / counts.sum() * entropy(table)).sum(-1)
    return entropy(table.sum(-2)) - given


def adjusted(active: np.ndarray, counts: np.ndarray, dice: np.random.Generator) -> tuple[float, float]:
    """Share of the decision's entropy that the type explains beyond chance; and the share that chance explains.

    Types with few tokens seem to explain any decision. So decisions are shuffled over the tokens: what then remains is
    chance, and is subtracted from numerator and denominator. The result is 1 if the type determines the decision, and
    0 on average if it is independent. How many of each type are active after a shuffle is drawn directly.
    """
    own = float(entropy(np.array([active.sum(), (counts - active).sum()])))
    if not own:
        return np.nan, np.nan
    shuffled = dice.multivariate_hypergeometric(counts, int(active.sum()), size=SHUFFLES, method="marginals")
    chance = float(information(shuffled, counts).mean())
    return (float(information(active, counts)) - chance) / max(own - chance, 1e-12), chance / own


def token_share(decision: np.ndarray, ids: np.ndarray, windows: Windows, *, seed: int = 0) -> dict[str, Any]:
    """Mutual information of decision and token as a share of the decision's entropy, and what chance explains of it."""
    dice = np.random.default_rng(seed)
    types, kind = np.unique(ids, return_inverse=True)
    piece = windows.of * PIECES // windows.count
    counts = np.zeros((PIECES, len(types)), np.int64)
    active = np.zeros_like(counts)
    np.add.at(counts, (piece, kind), 1)
    np.add.at(active, (piece, kind), decision)
    everything, on = counts.sum(0), active.sum(0)
    share, chance = adjusted(on, everything, dice)
    estimate: Estimate = {"value": share, "low": None, "high": None}
    if np.isnan(share):
        return {"entropy": 0.0, "share": {**estimate, "value": None}, "chance": None}
    if windows.count >= FEWEST:
        without = [_left_out(everything - counts[n], on - active[n], dice) for n in range(PIECES)]
        error = STUDENT * float(np.sqrt((PIECES - 1) * np.var(without)))
        estimate = {"value": share, "low": share - error, "high": share + error}
    own = float(entropy(np.array([on.sum(), (everything - on).sum()])))
    return {"entropy": own, "share": estimate, "chance": chance}


def _left_out(counts: np.ndarray, active: np.ndarray, dice: np.random.Generator) -> float:
    there = counts > 0
    share, _ = adjusted(active[there], counts[there], dice)
    return 0.0 if np.isnan(share) else share


def lookups(decision: np.ndarray, ids: np.ndarray, first: np.ndarray, windows: Windows) -> dict[str, Estimate]:
    """How often a table predicts the decision on text that it was not made from: from nothing, token, or pair.

    Each half of the units is predicted from the other half. The `first` token of a window is left out, since the model
    sees nothing before it. The gains are those of `by_token` and `by_pair` over the table before them.
    """
    _, token = np.unique(ids, return_inverse=True)
    previous = np.insert(token[:-1], 0, 0)
    _, pair = np.unique(previous * (int(token.max()) + 1) + token, return_inverse=True)
    counted, half = ~first, windows.of % 2
    hits = {name: np.zeros(len(ids)) for name in ("constant", "token", "pair")}
    for part in (0, 1):
        known, asked = counted & (half != part), counted & (half == part)
        common = decision[known].mean() > 0.5 if known.any() else True
        by_token = _majority(token, decision, known, np.full(len(ids), common), fewest=1)
        by_pair = _majority(pair, decision, known, by_token, fewest=SEEN)
        for name, said in (("constant", np.full(len(ids), common)), ("token", by_token), ("pair", by_pair)):
            hits[name][asked] = (said == decision)[asked]
    return {
        "by_nothing": windows.mean(hits["constant"], counted),
        "by_token": windows.mean(hits["token"], counted),
        "by_pair": windows.mean(hits["pair"], counted),
        "gain_of_token": windows.mean(hits["token"] - hits["constant"], counted),
        "gain_of_previous": windows.mean(hits["pair"] - hits["token"], counted),
    }


def _majority(
    key: np.ndarray, decision: np.ndarray, known: np.ndarray, otherwise: np.ndarray, *, fewest: int
) -> np.ndarray:
    """The decision of most `known` tokens with the same key; `otherwise` at a tie or if fewer were seen."""
    size = int(key.max()) + 1
    seen = np.bincount(key[known], minlength=size)
    active = np.bincount(key[known], decision[known], size)
    decided = (seen >= fewest) & (2 * active != seen)
    return np.where(decided[key], (2 * active > seen)[key], otherwise)
