"""What the numbers say about the paper's claims, one paragraph each, decided by rule and written from results/.

A finding that lacks its numbers says `not run` for each of them and for its verdict; none is ever assumed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from tokendepth.config import PAPER_THRESHOLDS
from tokendepth.report.summary import Stat
from tokendepth.studies import tables
from tokendepth.studies.evidence import BITS, NOT_RUN, Evidence, collapses, dig, show
from tokendepth.studies.tables import DENSE, EARLY_EXIT, ENWIK8_DENSE, ENWIK8_TSA, PENALTIES, TSA, fewer, penalty

MODERATE = 0.3
"""A rank correlation from which we speak of depth that follows difficulty."""


@dataclass(frozen=True)
class Finding:
    title: str
    verdict: str
    text: str


def findings(evidence: Evidence) -> list[Finding]:
    return [make(evidence) for make in ALL]


def _holds(*answers: bool | None) -> str:
    """The verdict on a claim from what was found soft, then hard."""
    names = ("soft", "executed")
    said = [
        f"{name}: {NOT_RUN if answer is None else 'holds' if answer else 'does not hold'}"
        for name, answer in zip(names, answers, strict=True)
    ]
    return "; ".join(said).capitalize() + "."


def _relative(new: Stat | None, old: Stat | None) -> str:
    return NOT_RUN if new is None or old is None else f"{new.mean / old.mean - 1:+.2%}"


# --- execution --------------------------------------------------------------------------------------------------------


def hard_execution(e: Evidence) -> Finding:
    models = {"Shakespeare at penalty 0.001": TSA, "enwik8 at 0.001": ENWIK8_TSA, "Shakespeare at 0.05": penalty(0.05)}
    said = [
        f"{name}: loss {show(e.stat(label, 'soft', 'loss'))} soft at active fraction "
        f"{show(e.stat(label, 'soft', 'active_fraction'), '.3f')}, {show(e.stat(label, 'hard', 'loss'))} executed at "
        f"{show(e.stat(label, 'hard', 'active_fraction'), '.3f')}"
        for name, label in models.items()
    ]
    answers = [a for a in (collapses(e, label) for label in models.values()) if a is not None]
    verdict = NOT_RUN if not answers else "Not supported" if any(answers) else "Holds"
    untrained = show(e.stat(TSA, "controls", "untrained_router_hard", "loss"))
    dice = show(e.stat(TSA, "controls", "random_decisions_hard", "loss"))
    text = (
        "The paper trains a gate that scales every layer's update, counts one minus the gate as saved, and says that "
        "the routing transfers directly to sparse execution; it never evaluates a trained model at its threshold. We "
        "do. "
        + "; ".join(said)
        + f". The controls, on Shakespeare's blocks: with untrained routers, which keep every token, {untrained}; with "
        f"decisions by dice at the same active fractions {dice}. Where the executed loss is more than 2% above the "
        "soft one, the gate had become a volume knob for a layer and not a switch, and the saving is one that cannot "
        "be had."
    )
    return Finding("Soft models, executed", f"{verdict}.", text)


def at_initialisation(e: Evidence) -> Finding:
    soft, hard = (e.stat(TSA, mode, "active_fraction", of="initial") for mode in ("soft", "hard"))
    trained = e.stat(TSA, "soft", "active_fraction")
    layers = e.configs[TSA].model.n_layer
    saved = NOT_RUN if soft is None else f"{(1 - soft.mean) * (layers - 1) / layers:.1%}"
    published = e.published("shakespeare", "TSA")
    text = (
        f"The router's last bias starts at -1, so before a single step the soft active fraction is {show(soft, '.3f')} "
        f"(executed: {show(hard, '.3f')}). By the paper's formula that is {saved} of the "
        f"token-layer operations saved by an untrained model, where the trained one is published with "
        f"{published['tlops_saved']:.1%} at {published['active_fraction']}. Ours after training: "
        f"{show(trained, '.3f')}."
    )
    return Finding("The active fraction before training", "For the reader.", text)


def spread(e: Evidence) -> Finding:
    dense = e.stat(DENSE, "hard", "loss")
    text = f"Dense Shakespeare, the same config under different seeds: {show(dense)}."
    if dense is not None and dense.std is not None:
        width = max(dense.values) - min(dense.values)
        text += (
            f" From best to worst that is {width:.4f} nats, {width / dense.mean:.2%}. The paper's differences, each "
            f"from one seed: {_apart(e, 'shakespeare'):+.4f} for TSA on Shakespeare, {_apart(e, 'enwik8'):+.4f} on "
            f"enwik8, {_apart(e, 'matched', 'early exit'):+.4f} between TSA and early exit."
        )
    text += " Fewer than three seeds prove nothing here, ours no more than others'."
    return Finding("The spread between seeds", "For the reader.", text)


def _apart(e: Evidence, table: str, other: str = "baseline") -> float:
    """By how much TSA's published loss is above another of its table."""
    return e.published(table, "TSA")["loss"] - e.published(table, other)["loss"]


def dense_control(e: Evidence) -> Finding:
    layers = [e.configs[DENSE].model.n_layer, *tables.LAYERS]
    said = [
        f"{n} layers {show(e.stat(DENSE if n == layers[0] else fewer(n), 'hard', 'loss'))}"
        for n in dict.fromkeys(layers)
    ]
    executed, cost = e.stat(TSA, "hard", "loss"), e.stat(TSA, "flops_per_token")
    cheaper = [
        (loss.mean, n)
        for n in tables.LAYERS
        if (loss := e.stat(fewer(n), "hard", "loss"))
        and (own := e.stat(fewer(n), "flops_per_token"))
        and cost is not None
        and own.mean <= cost.mean
    ]
    text = (
        "The control that the paper does not have: leave out layers instead of tokens. Dense Shakespeare with "
        + ", ".join(said)
        + f". TSA, executed, has {show(executed)} and skips {show(e.stat(TSA, 'flops_skipped'), '.1%')} of the FLOPs."
    )
    verdict = NOT_RUN
    if cheaper and executed is not None:
        loss, n = min(cheaper)
        verdict = "TSA loses" if loss < executed.mean else "TSA wins"
        text += f" Of the dense models that cost no more than that, the best has {n} layers and {loss:.4f}."
    return Finding("Dense models with fewer layers", f"{verdict}.", text)


# --- what the router is said to do ------------------------------------------------------------------------------------


def without_pressure(e: Evidence) -> Finding:
    label = penalty(0)
    soft, start = e.stat(label, "soft", "active_fraction"), e.stat(TSA, "soft", "active_fraction", of="initial")
    falls = None if soft is None or start is None else soft.mean < start.mean - 2 * (soft.std or 0)
    taken_back = collapses(e, label)
    hard = e.stat(label, "hard", "active_fraction")
    executes = None if taken_back is None or hard is None else not taken_back and hard.mean < 0.99
    published = e.published("penalty", "penalty 0")
    text = (
        "The paper's central finding: without any penalty the task alone drives the router to save "
        f"{published['tlops_saved']:.1%}. Soft, penalty 0 ends at active fraction {show(soft, '.3f')} (published "
        f"{published['active_fraction']}), and starts at {show(start, '.3f')} by the bias alone; the claim holds soft "
        "if training lowers it by more than two standard deviations. Executed, it has loss "
        f"{show(e.stat(label, 'hard', 'loss'))} at {show(hard, '.3f')}, where soft has "
        f"{show(e.stat(label, 'soft', 'loss'))}; it holds executed if tokens are skipped and the loss stays within 2%."
    )
    return Finding('"Routes without pressure"', _holds(falls, executes), text)


def difficulty(e: Evidence) -> Finding:
    key = ("rank_correlation", "surprisal of the next")
    found = {mode: e.stat(TSA, "modes", mode, *key, of="routing") for mode in ("soft", "hard")}
    copy, sort = (
        {mode: e.stat(f"synthetic.{task}_tsa", mode, "active_fraction") for mode in ("soft", "hard")}
        for task in ("copy", "sort")
    )
    answers = [None if s is None else min(s.values) >= MODERATE for s in found.values()]
    share = e.stat(TSA, "modes", "soft", "layer_share_of_variance", of="routing")
    text = (
        "If depth followed difficulty, a token's depth would rise with the surprisal of what it has to predict. The "
        f"rank correlation on Shakespeare is {show(found['soft'], '.2f')} soft and {show(found['hard'], '.2f')} "
        f"executed; we speak of proportional from {MODERATE} in every seed. Of the gates' variance, "
        f"{show(share, '.0%')} is the layer's own mean, the same for every token. The paper's other ground is copy "
        f"against sort, whose soft active fractions are {show(copy['soft'], '.3f')} and {show(sort['soft'], '.3f')} "
        f"here (published 0.341 and 0.730), executed {show(copy['hard'], '.3f')} and {show(sort['hard'], '.3f')}."
    )
    return Finding('"Difficulty-proportional"', _holds(*answers), text)


def permissive(e: Evidence) -> Finding:
    answers, said = [], []
    for mode, name in (("soft", "soft"), ("hard", "executed")):
        sites = [dig(row, "evaluation", mode, "active_fraction_per_site") for row in e.rows(TSA)]
        means = [fmean(router) for router in zip(*sites, strict=True)][1:]  # the stem has no router
        answers.append(min(means[:2]) >= max(means[-2:]) if len(means) >= 2 else None)
        said.append(f"{name} {', '.join(f'{m:.3f}' for m in means) or NOT_RUN}")
    text = (
        "The paper reads its heat map so that the first two routers keep most tokens and the last two select. Mean "
        f"active fraction per router on Shakespeare, first to last: {'; '.join(said)}. The claim holds if each of the "
        "first two keeps at least as much as each of the last two."
    )
    return Finding('"Early routers stay permissive"', _holds(*answers), text)


def robust(e: Evidence) -> Finding:
    answers, said = [], []
    for mode, name in (("soft", "soft"), ("hard", "executed")):
        losses = [e.stat(penalty(value), mode, "loss") for value in PENALTIES if value <= 0.1]
        known = [stat.mean for stat in losses if stat]
        complete = len(known) == len(losses)
        width = max(known) - min(known) if complete else 0.0
        answers.append(width <= 0.015 if complete else None)
        said.append(f"{name} {f'{width:.4f} nats, {width / min(known):.2%}' if complete else NOT_RUN}")
    text = (
        "Published: from penalty 0 to 0.1 the loss varies by 0.015 nats, 1.04%, so no tuning is needed. Range of our "
        f"means: {'; '.join(said)}."
    )
    return Finding('"Robust in the penalty"', _holds(*answers), text)


# --- early exit -------------------------------------------------------------------------------------------------------


def stem_once(e: Evidence) -> Finding:
    threshold = 0.75
    alpha = e.at_threshold(EARLY_EXIT, threshold, "sparse", "active_fraction")
    loss = e.at_threshold(EARLY_EXIT, threshold, "sparse", "loss")
    skipped = e.at_threshold(EARLY_EXIT, threshold, "tlops_skipped")
    layers = e.configs[EARLY_EXIT].model.n_layer
    published = e.published("early-exit", "threshold 0.75")
    text = (
        f"At threshold {threshold} our early-exit model works on {show(alpha, '.3f')} of the tokens in the blocks "
        f"after the first and skips {show(skipped, '.1%')} of the token-layer operations, at loss {show(loss)} "
        f"(published: {published['active_fraction']}, {published['tlops_saved']:.1%}, {published['loss']})."
    )
    verdict = NOT_RUN
    if alpha is not None:
        twice = (1 + (layers - 1) * alpha.mean) / layers
        near = abs(twice - published["active_fraction"]) < abs(alpha.mean - published["active_fraction"])
        verdict = "Published nearer to the stem counted twice" if near else "Published nearer to the stem counted once"
        text += (
            f" Had we taken the mean over all blocks, the first included, and then put it into the paper's formula, "
            f"which adds the first block again, the active fraction would read {twice:.3f}. The published one is "
            f"nearer to {'that' if near else 'the one that counts the stem once'}."
        )
    return Finding("Early exit, its stem counted once", f"{verdict}.", text)


def exit_against_tsa(e: Evidence) -> Finding:
    executed, loss = e.stat(TSA, "hard", "active_fraction"), e.stat(TSA, "hard", "loss")
    points = [
        (abs(alpha.mean - executed.mean), threshold, alpha, exited)
        for threshold in PAPER_THRESHOLDS
        if executed is not None
        and (alpha := e.at_threshold(EARLY_EXIT, threshold, "sparse", "active_fraction"))
        and (exited := e.at_threshold(EARLY_EXIT, threshold, "sparse", "loss"))
    ]
    text = (
        "Published: at equal active fraction TSA has 0.71% less loss than early exit. TSA, executed: "
        f"{show(loss)} at {show(executed, '.3f')}. "
    )
    if not points or loss is None:
        return Finding("TSA against early exit", f"{NOT_RUN}.", text + f"Early exit at that fraction: {NOT_RUN}.")
    _, threshold, alpha, exited = min(points, key=lambda point: point[0])
    text += (
        f"Early exit, executed, comes nearest to that at threshold {threshold}: {show(exited)} at "
        f"{show(alpha, '.3f')}, so TSA's loss is {_relative(loss, exited)} against it. Soft, TSA has "
        f"{show(e.stat(TSA, 'soft', 'loss'))}, but skips nothing."
    )
    verdict = "Not supported" if loss.mean > exited.mean else "Holds executed"
    return Finding("TSA against early exit", f"{verdict}.", text)


def exit_training_cost(e: Evidence) -> Finding:
    rows = [row for row in e.training if "early_exit_ratio" in row]
    said = [f"{row['early_exit_ratio'][0]:.3f} of the dense step at {row['shape']}" for row in rows]
    dense, full = e.stat(DENSE, "hard", "loss"), e.at_threshold(EARLY_EXIT, 1.0, "sparse", "loss")
    verdict = (
        NOT_RUN if not rows else "Holds" if max(row["early_exit_ratio"][0] for row in rows) <= 1.05 else "Does not hold"
    )
    text = (
        "The paper trains every exit through the output head and says that this costs what the baseline costs. The "
        f"head is then read after every block: measured, {' and '.join(said) or NOT_RUN}; the claim holds up to 1.05. "
        f"Its loss with no exit taken is {show(full)}, the dense model's {show(dense)}."
    )
    return Finding('"Early exit trains at baseline cost"', f"{verdict}.", text)


def outlier(e: Evidence) -> Finding:
    rows = {t: e.published("early-exit", f"threshold {t:.2f}")["loss"] for t in (0.8, 0.75, 0.7)}
    between = (rows[0.8] + rows[0.7]) / 2
    tsa = e.published("matched", "TSA")["loss"]
    ours = ", ".join(f"{t:.2f}: {show(e.at_threshold(EARLY_EXIT, t, 'sparse', 'loss'))}" for t in rows)
    text = (
        f"The comparison rests on one row: {rows[0.75]} at threshold 0.75, between {rows[0.8]} at 0.80 and {rows[0.7]} "
        f"at 0.70, so {rows[0.75] - between:.4f} above the line through its neighbours, while less is skipped than at "
        f"0.70. On that line early exit would have {between:.4f} and TSA's {tsa} would be {tsa / between - 1:+.2%}, "
        f"not {tsa / rows[0.75] - 1:+.2%}. Ours: {ours}."
    )
    return Finding("The early-exit row at 0.75 is an outlier", "By the paper's own numbers.", text)


# --- the paper against itself -----------------------------------------------------------------------------------------


def never_reached(e: Evidence) -> Finding:
    final = min(e.published("enwik8", name)["bits_per_character"] for name in ("baseline", "TSA"))
    said = []
    for name, label in (("dense", ENWIK8_DENSE), ("TSA", ENWIK8_TSA)):
        bits, nats = (e.steps_to(label, 1.8 / unit) for unit in (BITS, 1.0))
        said.append(f"{name} 1.8 bits: {steps(bits)}, 1.8 nats: {steps(nats)}")
    text = (
        "The paper says that both models reach 2.5, 2.0 and 1.8 bits per character at steps 500, 750 and 1,000, and "
        f"prints {final} bits as the better of its two final values, after 5,000 steps: 1.8 bits were never reached. "
        f"Read as nats the statement is possible. Ours, validated every 250 steps on the first 262,144 characters: "
        f"{'; '.join(said)}."
    )
    return Finding("enwik8 never reaches the 1.8 bits of step 1,000", "By the paper's own numbers.", text)


def steps(found: list[int | None]) -> str:
    """One step a seed, or one for all that agree."""
    if not found:
        return NOT_RUN
    said = ["never" if step is None else f"{step:,}" for step in found]
    return said[0] if len(set(said)) == 1 else " / ".join(said)


def two_results(e: Evidence) -> Finding:
    first, second = e.published("shakespeare", "TSA"), e.published("penalty", "penalty 0.001")
    apart = first["loss"] - second["loss"]
    text = (
        f"For penalty 0.001 on Shakespeare the paper prints {first['loss']} at {first['active_fraction']} and "
        f"{second['loss']} at {second['active_fraction']}: {apart:.4f} nats apart, more than the "
        f"{_apart(e, 'shakespeare'):.4f} that TSA is said to cost, and put down to the framework. The baseline row of "
        f"its penalty sweep, called internal to the sweep, has the digits of the other framework's "
        f"({e.published('penalty', 'baseline')['loss']}), so that within the sweep there is no baseline. Ours, all in "
        f"one framework: dense {show(e.stat(DENSE, 'soft', 'loss'))}, penalty 0.001 "
        f"{show(e.stat(TSA, 'soft', 'loss'))} at {show(e.stat(TSA, 'soft', 'active_fraction'), '.3f')}; with MLX's "
        f"uniform weight decay dense {show(e.stat(DENSE + tables.UNIFORM, 'soft', 'loss'))}, penalty 0.001 "
        f"{show(e.stat(penalty(0.001, tables.UNIFORM), 'soft', 'loss'))} at "
        f"{show(e.stat(penalty(0.001, tables.UNIFORM), 'soft', 'active_fraction'), '.3f')}."
    )
    return Finding("Two results for one penalty, and a borrowed baseline", "By the paper's own numbers.", text)


def wall_clock(e: Evidence) -> Finding:
    said = []
    for skip, what in (("ffn", "the feed-forward skipped"), ("block", "the whole block skipped")):
        for positions in ("contiguous", "random"):
            row = e.timed(condition="sparse", active_fraction=0.726, skip=skip, positions=positions)
            said.append(f"{what}, {positions}: {row['speedup']:.3f}x" if row else f"{what}, {positions}: {NOT_RUN}")
    row = e.timed(condition="sparse", active_fraction=0.726, skip="ffn", positions="contiguous")
    verdict = NOT_RUN if row is None else "Holds" if row["speedup"] > 1 else "Not supported"
    soft = e.timed(condition="soft")
    text = (
        "Published at active fraction 0.726: 1.023x, on an untrained model whose active tokens are the first of every "
        f"sequence. Ours at the same shape and batch: {'; '.join(said)}. Soft gating, which skips nothing: "
        f"{NOT_RUN if soft is None else format(soft['speedup'], '.3f') + 'x'}."
    )
    return Finding("Wall-clock", f"{verdict}.", text)


def what_survives(e: Evidence) -> Finding:
    loss, alpha = e.stat(tables.BUDGET, "hard", "loss"), e.stat(tables.BUDGET, "hard", "active_fraction")
    text = (
        "For comparison, our answer to the same question, trained so that its decisions are decisions: budget routing, "
        f"executed, {show(loss)} at active fraction {show(alpha, '.3f')}, "
        f"{show(e.stat(tables.BUDGET, 'flops_skipped'), '.1%')} of the FLOPs skipped; dense "
        f"{show(e.stat(DENSE, 'hard', 'loss'))}. Its training step costs two passes, which is a regulariser of its own "
        "on so small a text; README and log say what to know before believing it."
    )
    return Finding("What survives execution", "For the reader.", text)


ALL: tuple[Callable[[Evidence], Finding], ...] = (
    hard_execution,
    at_initialisation,
    spread,
    dense_control,
    without_pressure,
    difficulty,
    permissive,
    robust,
    stem_once,
    exit_against_tsa,
    exit_training_cost,
    outlier,
    never_reached,
    two_results,
    wall_clock,
    what_survives,
)
