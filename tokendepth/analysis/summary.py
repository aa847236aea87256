"""The results in words: a difference is named only if its confidence interval excludes zero.

With several seeds it must do so for each of them, in the same direction.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokendepth.analysis.windows import RESAMPLES, Estimate, excludes_zero

NUMBERS = {
    "frequency": "more frequent tokens",
    "surprisal of the token": "more surprising tokens",
    "surprisal of the next": "tokens before a more surprising one",
    "entropy of the prediction": "tokens whose prediction is less certain",
    "position in context": "tokens later in the context",
}
STRENGTHS = {0.5: "clearly", 0.3: "moderately", 0.1: "weakly", 0.0: "hardly"}
"""How strongly depth is related to a number, by the minimum rank correlation."""
LOOKUP = 0.9
"""A router is called a lookup table if the token explains at least this share of its decision's entropy."""


def summarise(tree: dict[str, Any]) -> list[str]:
    """A few sentences, each about one question."""
    runs = tree["runs"]
    said = [
        _opening(tree),
        _groups(runs, "kind", "by kind"),
        _groups(runs, "position in word", "by position in the word"),
        *_numbers(runs),
        _lookup(runs),
        _previous(runs),
        _stability(runs),
        _skipped(runs),
        _seeds(tree),
        _closing(runs),
    ]
    return [sentence for sentence in said if sentence]


def direction(estimates: Sequence[Estimate]) -> int:
    """1 or -1 if every interval excludes zero on the same side, else 0."""
    signs = {(1 if (one["value"] or 0) > 0 else -1) if excludes_zero(one) else 0 for one in estimates}
    return signs.pop() if len(signs) == 1 else 0


def shown(estimates: Sequence[Estimate], form: str = ".3f") -> str:
    """One value with its interval, or the range of several seeds."""
    values = [one["value"] for one in estimates if one["value"] is not None]
    if not values:
        return "unknown"
    if len(estimates) > 1:
        low, high = (format(end(values), form) for end in (min, max))
        return low if low == high else f"{low} to {high}"
    low, high = estimates[0]["low"], estimates[0]["high"]
    interval = "" if low is None or high is None else f" ({low:{form}} to {high:{form}})"
    return f"{values[0]:{form}}{interval}"


def _opening(tree: dict[str, Any]) -> str:
    runs, one = tree["runs"], tree["runs"][0]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    return (
        f"{tree['method']} on {one['tokens']:,} tokens of the {tree['split']} split of {_name(tree['corpus'])}, in "
        f"{one['windows']:,} windows of up to {tree['context']}; seed{'s' if len(runs) > 1 else ''} {seeds}. "
        f"With skipping, a routed block processes {shown([run['depth'] for run in runs], '.1%')} of the tokens."
    )


def _groups(runs: Sequence[dict[str, Any]], name: str, words: str) -> str:
    """The group with the most depth and the one with the least, if they differ from the others."""
    found: dict[str, list[Estimate]] = {}
    for run in runs:
        for row in run["by"][name]["groups"]:
            found.setdefault(row["group"], []).append(row["difference"])
    named = {group: e for group, e in found.items() if len(e) == len(runs) and direction(e)}
    if not named:
        return f"Depth {words}: no group is shown to differ from the others."
    order = sorted(named, key=lambda group: sum(one["value"] or 0 for one in named[group]))
    parts = []
    if direction(named[order[-1]]) > 0:
        parts.append(f"more for {order[-1]!r} than for all other tokens, by {shown(named[order[-1]])}")
    if direction(named[order[0]]) < 0:
        less = shown([_absolute(one) for one in named[order[0]]])
        parts.append(f"less for {order[0]!r}, by {less}")
    return f"Depth {words}, largest differences: {'; '.join(parts)}."


def _numbers(runs: Sequence[dict[str, Any]]) -> list[str]:
    said, unclear = [], []
    for name, who in NUMBERS.items():
        estimates = [run["by"][name]["rank_correlation"] for run in runs]
        if not (sign := direction(estimates)):
            unclear.append(name)
            continue
        least = min(abs(one["value"]) for one in estimates)
        how = next(word for limit, word in STRENGTHS.items() if least >= limit)
        more = f"{how} more" if sign > 0 else f"{how} less"
        said.append(f"{who} get {more} depth, rank correlation {shown(estimates, '+.2f')}")
    sentences = [f"{_capital('; '.join(said))}."] if said else []
    if unclear:
        sentences.append(f"No relation is claimed between depth and {', '.join(unclear)}.")
    return sentences


def _varied(runs: Sequence[dict[str, Any]]) -> list[int]:
    """Sites whose decisions vary in every run."""
    sites = range(len(runs[0]["sites"]))
    return [n for n in sites if all(run["lookup"][n]["share"]["value"] is not None for run in runs)]


def _lookup(runs: Sequence[dict[str, Any]]) -> str:
    sites = _varied(runs)
    names = runs[0]["sites"]
    if not sites:
        return "In no block do the routers of all runs decide differently for different tokens."
    shares = {n: [run["lookup"][n]["share"] for run in runs] for n in sites}
    values = [one["value"] for estimates in shares.values() for one in estimates]
    chance = max(run["lookup"][n]["chance"] for run in runs for n in sites)
    words = (
        f"The token itself explains {_range(values, '.0%')} of the entropy of a router's decision (beyond chance, "
        f"which would appear to explain at most {chance:.2%})"
    )
    tables = [n for n in sites if all(one["low"] is not None and one["low"] >= LOOKUP for one in shares[n])]
    others = [n for n in sites if all(one["high"] is not None and one["high"] < LOOKUP for one in shares[n])]
    if tables:
        words += f"; {_are([names[n] for n in tables])} close to a lookup table"
    if others:
        words += f"; {_are([names[n] for n in others])} not a lookup table"
    return f"{words}."


def _previous(runs: Sequence[dict[str, Any]]) -> str:
    gains = [[run["lookup"][n]["gain_of_previous"] for run in runs] for n in _varied(runs)]
    if not gains:
        return ""
    helped = [estimates for estimates in gains if direction(estimates) > 0]
    if not helped:
        return "At no routed block is the previous token shown to help a table predict decisions on other text."
    values = [one["value"] for estimates in helped for one in estimates]
    return (
        f"With the previous token, a table predicts more decisions on other text at {len(helped)} of {len(gains)} "
        f"routed blocks: for {_range(values, '.1%')} more of the tokens."
    )


def _stability(runs: Sequence[dict[str, Any]]) -> str:
    rows = [run["stability"] for run in runs]
    near, far = ([row[end]["flips"] for row in rows] for end in (0, -1))
    if all(one["value"] == 0 for row in rows for bin in row for one in [bin["flips"]]):
        return f"After one {runs[0]['token']} is replaced, no later decision flipped."
    last = rows[0][-1]
    words = f"After one {runs[0]['token']} is replaced, {shown(near, '.2%')} of the decisions on the next one flip"
    return f"{words}, and {shown(far, '.2%')} at a distance of {last['from']:,} to {last['to']:,}."


def _skipped(runs: Sequence[dict[str, Any]]) -> str:
    if any(run["skipped"] is None for run in runs):
        return "This method cannot run with every token active, so the cost of skipping is not measured."
    tables = [{row["kind"]: row for row in run["skipped"]} for run in runs]
    whole = [table["all"]["loss"] for table in tables]
    sign = direction(whole)
    if not sign:
        words = "With every token active everywhere, the loss is not shown to differ"
    else:
        words = f"With every token active everywhere, the loss is {'lower' if sign > 0 else 'higher'} by "
        words += f"{shown([_absolute(one) for one in whole], '.4f')} nats per token"
    kinds = [kind for kind in tables[0] if kind != "all" and all(kind in table for table in tables)]
    costs = {kind: [table[kind]["loss_where_skipped"] for table in tables] for kind in kinds}
    dear = [kind for kind in kinds if direction(costs[kind]) > 0]
    if dear:
        most = max(dear, key=lambda kind: min(one["value"] or 0 for one in costs[kind]))
        words += f"; after a skipped {most!r} it is lower by {shown(costs[most], '.4f')}, the largest difference"
    return f"{words}."


def _absolute(estimate: Estimate) -> Estimate:
    """The absolute value of an estimate whose interval excludes zero."""
    value, low, high = (None if end is None else abs(end) for end in estimate.values())
    ends = (low, high) if low is None or high is None else (min(low, high), max(low, high))
    return {"value": value, "low": ends[0], "high": ends[1]}


def _seeds(tree: dict[str, Any]) -> str:
    pairs = tree["agreement"]
    if not pairs:
        return "Only one seed: the results may not hold for others."
    names = tree["runs"][0]["sites"]
    kappas = {name: [pair["per_site"][n]["kappa"] for pair in pairs] for n, name in enumerate(names)}
    alike = [name for name in names if direction(kappas[name]) > 0]
    if not alike:
        return "At no routed block are all pairs of seeds shown to agree on tokens more often than chance."
    values = [one["value"] for name in alike for one in kappas[name]]
    return (
        f"Seeds agree more often than chance on which tokens to process at {len(alike)} of {len(names)} routed blocks: "
        f"Cohen's kappa {_range(values, '.2f')} there (0 is chance, 1 identical decisions)."
    )


def _closing(runs: Sequence[dict[str, Any]]) -> str:
    everywhere = f" in all {len(runs)} seeds" if len(runs) > 1 else ""
    return (
        f"Confidence intervals are 95%, from {RESAMPLES} resamples of whole windows; a difference is reported if its "
        f"interval excludes zero{everywhere}. By chance, about one in twenty does so in one seed."
    )


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(end(values), form) for end in (min, max))
    return low if low == high else f"{low} to {high}"


def _name(corpus: str) -> str:
    """The name of a corpus; for a text file without its folder."""
    return Path(corpus.removeprefix("text:")).name


def _are(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
