"""The paper against itself."""

from paper import tables
from paper.evidence import BITS, NOT_RUN, Evidence, show
from paper.findings.finding import Finding, apart, steps
from paper.tables import DENSE, ENWIK8_DENSE, ENWIK8_TSA, TSA, penalty
from tokendepth.report.summary import Stat


def never_reached(e: Evidence) -> Finding:
    final = min(e.published("enwik8", name)["bits_per_character"] for name in ("baseline", "TSA"))
    said_steps = e.published("convergence", "enwik8, baseline and TSA")["steps"]
    said = []
    for name, label in (("dense", ENWIK8_DENSE), ("TSA", ENWIK8_TSA)):
        bits, nats = (e.steps_to(label, 1.8 / unit) for unit in (BITS, 1.0))
        said.append(f"{name} 1.8 bits: {steps(bits)}, 1.8 nats: {steps(nats)}")
    text = (
        f"The paper says that both models reach {', '.join(said_steps)} bits per character at steps "
        f"{', '.join(f'{step:,}' for step in said_steps.values())}, and "
        f"prints {final} bits as the better of its two final values, after 5,000 steps: 1.8 bits were never reached. "
        f"Read as nats the statement is possible. Ours, validated every 250 steps on the first 262,144 characters of "
        f"the split, where they end at {show(_last(e, ENWIK8_DENSE), '.4f')} and {show(_last(e, ENWIK8_TSA), '.4f')} "
        f"bits: {'; '.join(said)}. Over the whole split, on which they are judged below, they end at "
        f"{show(e.stat(ENWIK8_DENSE, 'hard', 'bits_per_character'))} and "
        f"{show(e.stat(ENWIK8_TSA, 'soft', 'bits_per_character'))}."
    )
    return Finding("enwik8 never reaches the 1.8 bits of step 1,000", "By the paper's own numbers.", text)


def enwik8_text(e: Evidence) -> Finding:
    """Where our loss and the published one part most: what was it measured on?"""
    published = e.published("enwik8", "baseline")["bits_per_character"]
    whole = e.stat(ENWIK8_DENSE, "hard", "bits_per_character")
    part, in_bytes = _last(e, ENWIK8_DENSE), e.stat(ENWIK8_DENSE, "hard", "bits_per_byte")
    text = (
        f"Dense enwik8, the same models: {show(whole)} bits per character over the five million characters of the "
        f"validation split ({show(in_bytes)} bits per byte), {show(part)} over its first 262,144; published "
        f"{published}, from 20 random batches of an unnamed part. Numbers taken on different text do not compare. And "
        "bits per character are not the bits per byte in which enwik8 is "
        "usually reported: some of its characters take several bytes."
    )
    return Finding("What the enwik8 loss depends on", f"{NOT_RUN if whole is None else 'Note'}.", text)


def _last(e: Evidence, label: str) -> Stat | None:
    """Bits per character at the last validation during training."""
    values = tuple(row["history"][-1]["val_loss"] * BITS for row in e.rows(label) if row.get("history"))
    return Stat(values) if values else None


def two_results(e: Evidence) -> Finding:
    first, second = e.published("shakespeare", "TSA"), e.published("penalty", "penalty 0.001")
    difference = first["loss"] - second["loss"]
    text = (
        f"For penalty 0.001 on Shakespeare the paper prints {first['loss']} at {first['active_fraction']} and "
        f"{second['loss']} at {second['active_fraction']}: {difference:.4f} nats apart, more than the "
        f"{apart(e, 'shakespeare'):.4f} that TSA is said to cost, and put down to the framework. The baseline row of "
        f"its penalty sweep, called internal to the sweep, has the digits of the other framework's "
        f"({e.published('penalty', 'baseline')['loss']}), so that within the sweep there is no baseline. Ours, all in "
        f"one framework: dense {show(e.stat(DENSE, 'soft', 'loss'))}, penalty 0.001 "
        f"{show(e.stat(TSA, 'soft', 'loss'))} at {show(e.stat(TSA, 'soft', 'active_fraction'), '.3f')}; with MLX's "
        f"uniform weight decay dense {show(e.stat(DENSE + tables.UNIFORM, 'soft', 'loss'))}, penalty 0.001 "
        f"{show(e.stat(penalty(0.001, tables.UNIFORM), 'soft', 'loss'))} at "
        f"{show(e.stat(penalty(0.001, tables.UNIFORM), 'soft', 'active_fraction'), '.3f')}."
    )
    return Finding("Two results for one penalty, and a borrowed baseline", "By the paper's own numbers.", text)
