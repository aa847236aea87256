"""What the paper says about its router, checked soft and with skipping."""

from statistics import fmean

from paper.evidence import NOT_RUN, Evidence, collapses, dig, show
from paper.findings.finding import Finding, holds
from paper.tables import PENALTIES, TEXT, TSA, penalty
from paper.verdict import LOOSEST
from tokendepth.report.summary import Stat

MODERATE = 0.3
"""From this rank correlation on, depth counts as following difficulty."""


def without_pressure(e: Evidence) -> Finding:
    label = penalty(0)
    soft, start = e.stat(label, "soft", "active_fraction"), e.stat(TSA, "soft", "active_fraction", of="initial")
    falls = None if soft is None or start is None else soft.mean < start.mean - 2 * (soft.std or 0)
    taken_back = collapses(e, label)
    hard = e.stat(label, "hard", "active_fraction")
    executes = None if taken_back is None or hard is None else not taken_back and hard.mean < 0.99
    published = e.published("penalty", "penalty 0")
    text = (
        "The paper's central finding: even without a penalty, the task alone makes the router save "
        f"{published['tlops_saved']:.1%}. Soft, our active fraction at penalty 0 is {show(soft, '.3f')} after training "
        f"(published {published['active_fraction']}) and {show(start, '.3f')} before it, because of the bias. The "
        "claim holds soft if training lowers it by more than two standard deviations. With skipping, the loss is "
        f"{show(e.stat(label, 'hard', 'loss'))} at {show(hard, '.3f')}, compared with "
        f"{show(e.stat(label, 'soft', 'loss'))} soft. The claim holds with skipping if tokens are skipped and the loss "
        "stays within 2%."
    )
    return Finding('"Routes without pressure"', holds(falls, executes), text)


def difficulty(e: Evidence) -> Finding:
    key = ("rank_correlation", "surprisal of the next")
    found = {mode: e.stat(TSA, "modes", mode, *key, of="routing") for mode in ("soft", "hard")}
    copy, sort = (
        {mode: e.stat(f"synthetic.{task}_tsa", mode, "active_fraction") for mode in ("soft", "hard")}
        for task in ("copy", "sort")
    )
    easy, done = (
        {task: e.stat(f"synthetic.{task}_tsa{TEXT}", *keys) for task in ("copy", "sort")}
        for keys in (("soft", "active_fraction"), ("hard", "accuracy"))
    )
    ran = bool(e.rows(TSA, "routing"))
    answers = [(s is not None and min(s.values) >= MODERATE) if ran else None for s in found.values()]
    share = e.stat(TSA, "modes", "soft", "layer_share_of_variance", of="routing")
    said = [f"{e.published('synthetic', f'{task} TSA')['active_fraction']:.3f}" for task in ("copy", "sort")]
    text = (
        "If depth followed difficulty, a token's depth would rise with the surprisal of the token it has to predict. "
        f"On Shakespeare the rank correlation is {show(found['soft'], '.2f', ran=ran)} soft and "
        f"{show(found['hard'], '.2f', ran=ran)} with skipping; the claim holds from {MODERATE} in every seed. "
        f"{show(share, '.0%')} of the gates' variance is between layers, so the same for every token. The paper also "
        f"argues with copy and sort. Their soft active fractions are {show(copy['soft'], '.3f')} and "
        f"{show(sort['soft'], '.3f')} here (published {' and '.join(said)}), and {show(copy['hard'], '.3f')} and "
        f"{show(sort['hard'], '.3f')} with skipping{_easier(copy['soft'], sort['soft'])}. With the set-up described in "
        f"the paper's text (10,000 steps, half the length) they are {show(easy['copy'], '.3f')} and "
        f"{show(easy['sort'], '.3f')} soft{_easier(easy['copy'], easy['sort'])}. With skipping, that copy model has an "
        f"accuracy of {show(done['copy'], '.4f')} and that sort model {show(done['sort'], '.4f')}."
    )
    return Finding('"Difficulty-proportional"', holds(*answers), text)


def _easier(copy: Stat | None, sort: Stat | None) -> str:
    if copy is None or sort is None:
        return ""
    apart = sort.mean - copy.mean
    return f": the easier task {'uses less depth' if apart > 0.05 else 'does not use less depth'}"


def permissive(e: Evidence) -> Finding:
    answers, said = [], []
    for mode, name in (("soft", "soft"), ("hard", "with skipping")):
        sites = [dig(row, "evaluation", mode, "active_fraction_per_site") for row in e.rows(TSA)]
        means = [fmean(router) for router in zip(*sites, strict=True)][1:]  # the stem has no router
        answers.append(min(means[:2]) >= max(means[-2:]) if len(means) >= 2 else None)
        said.append(f"{name} {', '.join(f'{m:.3f}' for m in means) or NOT_RUN}")
    text = (
        "According to the paper's heat map, the first two routers keep most tokens and the last two are selective. "
        f"Mean active fraction per router on Shakespeare, first to last: {'; '.join(said)}. The claim holds if each of "
        "the first two keeps at least as many tokens as each of the last two."
    )
    return Finding('"Early routers stay permissive"', holds(*answers), text)


def robust(e: Evidence) -> Finding:
    claimed = e.published("claims", "quality range over penalties 0 to 0.1")
    answers, said = [], []
    for mode, name in (("soft", "soft"), ("hard", "with skipping")):
        losses = [
            {row["config"]["train"]["seed"]: row["evaluation"][mode]["loss"] for row in e.rows(penalty(value))}
            for value in PENALTIES
            if value <= 0.1
        ]
        seeds = set.intersection(*(set(by_seed) for by_seed in losses))
        widths = tuple(max(lost) - min(lost) for s in sorted(seeds) if (lost := [by_seed[s] for by_seed in losses]))
        ranges = Stat(widths) if widths else None
        answers.append(None if ranges is None else ranges.mean <= (1 + LOOSEST) * claimed["nats"])
        said.append(f"{name} {show(ranges)}")
    text = (
        f"Published: from penalty 0 to 0.1 the loss varies by {claimed['nats']} nats ({claimed['relative']:.2%}), so "
        f"no tuning is needed. The same range within each of our seeds, in nats: {'; '.join(said)}. The claim holds if "
        f"our mean range is at most {LOOSEST:.0%} wider."
    )
    return Finding('"Robust in the penalty"', holds(*answers), text)
