"""depth_by: a trace and token attributes in, depth by attribute out."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tokendepth.analysis.windows import RESAMPLES, Windows
from tokendepth.errors import UserError
from tokendepth.trace import DepthTrace

GROUPS = 10
"""Number of groups of equal size into which numbers are split; ties may leave fewer."""


def depth_by(
    trace: DepthTrace, attributes: Mapping[str, ArrayLike], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Average depth for each value of a token attribute; for numeric attributes also the rank correlation with depth.

    Each attribute has the trace's shape, `[batch, time]`. Strings define groups; numbers are split into ten groups of
    equal size; tokens with an empty string or NaN are left out. Depth is a token's mean work over the routed sites.

    The result has for each attribute a list `groups`, whose rows have the keys `group`, `tokens`, `share` (of all
    tokens), `depth`, `difference` (from all other tokens) and `per_site` (depth at each site). Numeric attributes also
    have the `mean` of each group, `rank_correlation` and `rank_correlation_per_site`. Confidence intervals come from
    resampling whole sequences; they are None for groups that occur in fewer than 20 sequences.
    """
    sites = [n for n, site in enumerate(trace.sites) if site.routed]
    if not sites:
        raise UserError("the trace has no routed site, so every token has the same depth; pass one of a routed model")
    shape = tuple(trace.work.shape[1:])
    valid = np.ones(shape, bool) if trace.valid is None else to_numpy(trace.valid).astype(bool)
    columns = {name: np.asarray(values) for name, values in attributes.items()}
    for name, values in columns.items():
        if values.shape != shape:
            raise UserError(f"attribute {name!r} has the shape {values.shape}; expected one value per token: {shape}")
    number = np.broadcast_to(np.arange(shape[0])[:, None], shape)
    windows = Windows(number[valid], resamples=resamples, seed=seed)
    work = to_numpy(trace.work)[sites][:, valid]
    return tabulate(work, windows, {name: values[valid] for name, values in columns.items()})


def to_numpy(values: Any) -> np.ndarray:
    """A torch tensor or numpy array as a numpy array."""
    return values if isinstance(values, np.ndarray) else values.detach().float().cpu().numpy()


def tabulate(work: np.ndarray, windows: Windows, attributes: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The same for `work` `[routed site, token]` and one value per token."""
    layers = work.astype(float)
    depth = layers.mean(0)
    found = {}
    for name, values in attributes.items():
        is_number = np.issubdtype(values.dtype, np.number)
        groups = _cut(values.astype(float)) if is_number else named(values)
        found[name] = {"groups": [_row(group, chosen, layers, depth, windows) for group, chosen in groups]}
        if is_number:
            for row, (_, chosen) in zip(found[name]["groups"], groups, strict=True):
                row["mean"] = float(values[chosen].mean())
            found[name]["rank_correlation"] = windows.rank_correlation(values.astype(float), depth)
            found[name]["rank_correlation_per_site"] = [
                windows.rank_correlation(values.astype(float), layer) for layer in layers
            ]
    return found


def _row(group: str, chosen: np.ndarray, layers: np.ndarray, depth: np.ndarray, windows: Windows) -> dict[str, Any]:
    return {
        "group": group,
        "tokens": int(chosen.sum()),
        "share": float(chosen.mean()),
        "depth": windows.mean(depth, chosen),
        "difference": windows.difference(depth, chosen),
        "per_site": [windows.mean(layer, chosen) for layer in layers],
    }


def named(labels: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The tokens of each label, the largest group first."""
    names, counts = np.unique(labels, return_counts=True)
    return [(str(name), labels == name) for name in names[np.argsort(-counts, kind="stable")] if name]


def _cut(values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Groups of equal size, as far as ties allow, from low to high."""
    known = np.isfinite(values)
    if not known.any():
        return []
    edges = np.unique(np.quantile(values[known], np.linspace(0, 1, GROUPS + 1)[1:-1]))
    place = np.where(known, np.searchsorted(edges, values, side="right"), -1)
    groups = []
    for n in np.unique(place[known]):
        chosen = place == n
        low, high = values[chosen].min(), values[chosen].max()
        groups.append((f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}", chosen))
    return groups
