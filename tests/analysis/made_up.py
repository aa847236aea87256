"""An analysis in which nothing is different from anything, to be changed."""

from tokendepth.analysis.summary import NUMBERS


def estimate(value: float | None, low: float | None = None, high: float | None = None) -> dict:
    return {"value": value, "low": low, "high": high}


def nothing() -> dict:
    return estimate(0.01, -0.02, 0.03)


def quiet(seed: int = 0) -> dict:
    """A run in which nothing is different from anything."""
    group = {"tokens": 10, "share": 0.5, "depth": estimate(0.5), "difference": nothing(), "per_site": [estimate(0.5)]}
    groups = [{**group, "group": name} for name in ("letter", "space")]
    site = {name: nothing() for name in ("by_nothing", "by_token", "by_pair", "gain_of_token", "gain_of_previous")}
    return {
        "run": "x", "seed": seed, "tokens": 12345, "windows": 100, "token": "character", "sites": ["block 1"],
        "depth": estimate(0.4, 0.38, 0.42),
        "by": {name: {"groups": groups} for name in ("kind", "position in word")}
        | {name: {"groups": [], "rank_correlation": nothing()} for name in NUMBERS},
        "lookup": [{"entropy": 1.0, "share": estimate(0.6, 0.3, 0.95), "chance": 0.01, **site}],
        "stability": [{"from": d, "to": d, "flips": estimate(0.0, 0.0, 0.0), "per_site": []} for d in (1, 2)],
        "skipped": [
            {"kind": kind, "tokens": 10, "skipped": estimate(0.5), "loss": nothing(), "loss_where_skipped": nothing()}
            for kind in ("all", "letter")
        ],
    }  # fmt: skip
