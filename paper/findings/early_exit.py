"""The comparison with early exit."""

from paper.evidence import NOT_RUN, Evidence, show
from paper.findings.finding import Finding, holds, relative
from paper.tables import DENSE, EARLY_EXIT, TSA
from tokendepth.config import PAPER_THRESHOLDS
from tokendepth.report.summary import Stat


def stem_once(e: Evidence) -> Finding:
    threshold = 0.75
    found = {t: e.at_threshold(EARLY_EXIT, t, "sparse", "active_fraction") for t in PAPER_THRESHOLDS}
    alpha = e.at_threshold(EARLY_EXIT, threshold, "sparse", "active_fraction")
    loss = e.at_threshold(EARLY_EXIT, threshold, "sparse", "loss")
    skipped = e.at_threshold(EARLY_EXIT, threshold, "tlops_skipped")
    layers = e.configs[EARLY_EXIT].model.n_layer
    published = e.published("early-exit", "threshold 0.75")
    text = (
        f"At threshold {threshold} the blocks after the first of our early-exit model process {show(alpha, '.3f')} of "
        f"the tokens. It skips {show(skipped, '.1%')} of the token-layer operations at a loss of {show(loss)} "
        f"(published: {published['active_fraction']}, {published['tlops_saved']:.1%}, {published['loss']})."
    )
    text += (
        " The first block (the stem) cannot be skipped. If the published fraction is a mean over all blocks including "
        "the first, the paper's formula for the saving counts the first block twice. Counted once, the same model "
        f"saves {1 - published['active_fraction']:.1%}, not {published['tlops_saved']:.1%}."
    )
    verdict = NOT_RUN
    if all(found.values()):
        gaps = {"once": 0.0, "twice": 0.0}
        for t, stat in found.items():
            assert stat is not None
            said = e.published("early-exit", f"threshold {t:.2f}")["active_fraction"]
            readings = {"once": stat.mean, "twice": (1 + (layers - 1) * stat.mean) / layers}
            gaps = {name: gap + abs(readings[name] - said) / len(found) for name, gap in gaps.items()}
        near = min(gaps, key=lambda name: gaps[name])
        verdict = f"Neither fits; the published fractions are closer to counting the stem {near}"
        if gaps[near] < 0.01:
            verdict = f"The stem was counted {near}"
        text += (
            f" Over the 13 thresholds the mean distance of the published fractions from ours is {gaps['once']:.3f}, or "
            f"{gaps['twice']:.3f} if our means include the first block."
        )
    return Finding("Early exit: is the first block counted twice?", f"{verdict}.", text)


def read_early(e: Evidence) -> Finding:
    """Did the paper really skip after an exit? Compares both ways of counting with the published losses."""

    def distance(*keys: str) -> Stat | None:
        """Mean distance between our losses and the published ones over the paper's thresholds."""
        ours = {t: e.at_threshold(EARLY_EXIT, t, *keys) for t in PAPER_THRESHOLDS}
        gaps = [abs(s.mean - e.published("early-exit", f"threshold {t:.2f}")["loss"]) for t, s in ours.items() if s]
        return Stat((sum(gaps) / len(gaps),)) if len(gaps) == len(ours) else None

    executed, read = distance("sparse", "loss"), distance("read_early", "loss")
    verdict = NOT_RUN
    if executed and read:
        near = "counting exits without skipping" if read.mean < executed.mean else "real skipping"
        verdict = f"The published losses are closer to {near}"
    low = PAPER_THRESHOLDS[-1]
    published = e.published("early-exit", f"threshold {low:.2f}")["loss"]
    early, skipping = (e.at_threshold(EARLY_EXIT, low, mode, "loss") for mode in ("read_early", "sparse"))
    text = (
        "An exit can be counted without being taken: every token is computed to the end, but its prediction is read "
        "at the first exit that is confident enough. Other tokens then still attend to all of its later states. If the "
        "exit is taken, the token's last state replaces them. "
        f"Loss at threshold {low}: counted {show(early)}, taken {show(skipping)}, published {published}. Mean distance "
        f"to the published losses over the 13 thresholds: counted {_nats(read)}, taken {_nats(executed)}."
    )
    return Finding("Early exit: counted or taken?", f"{verdict}.", text)


def _nats(stat: Stat | None) -> str:
    return NOT_RUN if stat is None else f"{stat.mean:.4f}"


def exit_against_tsa(e: Evidence) -> Finding:
    claimed = e.published("claims", "TSA against early exit at equal active fraction")
    executed, loss = e.stat(TSA, "hard", "active_fraction"), e.stat(TSA, "hard", "loss")
    points = [
        (abs(alpha.mean - executed.mean), threshold, alpha, exited)
        for threshold in PAPER_THRESHOLDS
        if executed is not None
        and (alpha := e.at_threshold(EARLY_EXIT, threshold, "sparse", "active_fraction"))
        and (exited := e.at_threshold(EARLY_EXIT, threshold, "sparse", "loss"))
    ]
    text = (
        f"Published: at equal active fraction, the loss of TSA is {-claimed['relative']:.2%} lower than that of early "
        f"exit. Ours with skipping: TSA has {show(loss)} at active fraction {show(executed, '.3f')}. "
    )
    if not points or loss is None:
        return Finding("TSA against early exit", f"{NOT_RUN}.", text + f"Early exit at that fraction: {NOT_RUN}.")
    _, threshold, alpha, exited = min(points, key=lambda point: point[0])
    soft, soft_alpha = e.stat(TSA, "soft", "loss"), e.stat(TSA, "soft", "active_fraction")
    assert soft is not None
    assert soft_alpha is not None
    _, _, beside_alpha, beside = min(points, key=lambda point: abs(point[2].mean - soft_alpha.mean))
    text += (
        f"The closest early exit (threshold {threshold}) has {show(exited)} at {show(alpha, '.3f')}: TSA's loss is "
        f"{relative(loss, exited)} relative to it. Compared as in the paper, with TSA soft (nothing skipped), TSA has "
        f"{show(soft)} at {show(soft_alpha, '.3f')}, {relative(soft, beside)} relative to early exit's {show(beside)} "
        f"at {show(beside_alpha, '.3f')}."
    )
    return Finding("TSA against early exit", holds(soft.mean < beside.mean, loss.mean < exited.mean), text)


def exit_training_cost(e: Evidence) -> Finding:
    rows = [row for row in e.training if "early_exit_ratio" in row]
    said = [f"{row['early_exit_ratio'][0]:.3f} times the dense step at {row['shape']}" for row in rows]
    dense, full = e.stat(DENSE, "hard", "loss"), e.at_threshold(EARLY_EXIT, 1.0, "sparse", "loss")
    verdict = (
        NOT_RUN if not rows else "Holds" if max(row["early_exit_ratio"][0] for row in rows) <= 1.05 else "Does not hold"
    )
    text = (
        "The paper trains every exit through the output head and states that this costs as much as the baseline. But "
        f"the head is then applied after every block. Measured: {' and '.join(said) or NOT_RUN}; we accept the claim "
        f"up to 1.05. The loss with no exit taken is {show(full)}, that of the dense model {show(dense)}."
    )
    return Finding('"Early exit trains at baseline cost"', f"{verdict}.", text)


def outlier(e: Evidence) -> Finding:
    rows = {t: e.published("early-exit", f"threshold {t:.2f}")["loss"] for t in (0.8, 0.75, 0.7)}
    between = (rows[0.8] + rows[0.7]) / 2
    tsa = e.published("matched", "TSA")["loss"]
    ours = ", ".join(f"{t:.2f}: {show(e.at_threshold(EARLY_EXIT, t, 'sparse', 'loss'))}" for t in rows)
    column = [e.published("early-exit", f"threshold {t:.2f}")["loss"] for t in PAPER_THRESHOLDS]
    at = list(PAPER_THRESHOLDS)
    off = [
        abs(column[i] - column[i - 1] - (column[i + 1] - column[i - 1]) * (at[i] - at[i - 1]) / (at[i + 1] - at[i - 1]))
        for i in range(1, len(at) - 1)
    ]
    scatter = f"{sum(off) / len(off):.4f} on average, and {sorted(off)[-2]:.4f} for the second largest"
    text = (
        f"The paper's comparison uses a single row, {rows[0.75]} at threshold 0.75. Its neighbours are {rows[0.8]} at "
        f"0.80 and {rows[0.7]} at 0.70, where more is skipped. So the row is {rows[0.75] - between:.4f} above the line "
        f"through them; rows deviate from such lines by {scatter}. On the line, early exit would have {between:.4f}, "
        f"and TSA's {tsa} would be {tsa / between - 1:+.2%} relative to it, not {tsa / rows[0.75] - 1:+.2%}. "
        f"Ours: {ours}."
    )
    return Finding("The early-exit row at 0.75 is an outlier", "By the paper's own numbers.", text)
