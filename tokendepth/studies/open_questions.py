"""What the paper leaves open, first answered with numbers: routing by token type, and scale. And how fast it learns."""

from statistics import fmean

from tokendepth.studies.evidence import BITS, NOT_RUN, Evidence, collapses, show
from tokendepth.studies.findings import steps
from tokendepth.studies.tables import DENSE, ENWIK8_DENSE, ENWIK8_TSA, ROUTING, SIZES, TSA, penalty, scaled

LEVELS = (2.5, 2.0, 1.8)
MODELS = {
    "Shakespeare, dense": DENSE,
    "Shakespeare, TSA": TSA,
    "enwik8, dense": ENWIK8_DENSE,
    "enwik8, TSA": ENWIK8_TSA,
}
NAMES = {
    TSA: "Shakespeare, penalty 0.001",
    penalty(0): "Shakespeare, penalty 0",
    penalty(0.05): "Shakespeare, penalty 0.05",
    ENWIK8_TSA: "enwik8, penalty 0.001",
}


def open_questions(evidence: Evidence) -> list[tuple[str, str]]:
    return [
        ("Depth by token type", token_types(evidence)),
        ("Scale", scaling(evidence)),
    ]


def token_types(e: Evidence) -> str:
    """Mean depth of each group, and how depth goes with surprisal."""
    lines = ["| model | mode | depth and surprisal of the token | of the next | spread over tokens | layer's share |"]
    lines.append("|---|---|--:|--:|--:|--:|")
    for label in ROUTING:
        for mode, name in (("soft", "soft"), ("hard", "executed")):
            pick = [
                show(e.stat(label, "modes", mode, "rank_correlation", f"surprisal of the {which}", of="routing"), ".2f")
                for which in ("token", "next")
            ]
            spread = show(e.stat(label, "modes", mode, "spread_of_depth", of="routing"), ".3f")
            share = show(e.stat(label, "modes", mode, "layer_share_of_variance", of="routing"), ".0%")
            lines.append(f"| {NAMES[label]} | {name} | {pick[0]} | {pick[1]} | {spread} | {share} |")
    text = (
        "A token's depth is the mean of its work over the routed blocks. First its rank correlation with surprisal, "
        "its standard deviation over tokens, and the share of the gates' variance that is the layer's mean alone, the "
        "same for all tokens:\n\n" + "\n".join(lines)
    )
    return f"{text}\n\nThen its mean by group, on Shakespeare at penalty 0.001, over all seeds:\n\n{_groups(e)}"


def _groups(e: Evidence) -> str:
    lines = ["| by | group | share of tokens | depth, soft | depth, executed |", "|---|---|--:|--:|--:|"]
    found: dict[tuple[str, str], list[tuple[float, float | None, float]]] = {}
    for row in e.rows(TSA, "routing"):
        for group in row["groups"]:
            means = (fmean(group["soft"]) if "soft" in group else None, fmean(group["hard"]))
            found.setdefault((group["kind"], group["group"]), []).append((group["share"], *means))
    for (kind, group), seeds in found.items():
        share, soft, hard = (
            fmean(value for value in column if value is not None) for column in zip(*seeds, strict=True)
        )
        lines.append(f"| {kind} | {group} | {share:.1%} | {soft:.3f} | {hard:.3f} |")
    return "\n".join(lines if found else [*lines, f"| {NOT_RUN} | | | | |"])


def scaling(e: Evidence) -> str:
    lines = [
        "| size | model | parameters | loss, soft | active, soft | loss, executed | active, executed | FLOPs skipped |"
    ]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    said = []
    for size in SIZES:
        for method in ("dense", "tsa", "budget"):
            label = scaled(size, method)
            soft = (
                [show(e.stat(label, "soft", "loss")), show(e.stat(label, "soft", "active_fraction"), ".3f")]
                if method == "tsa"
                else ["\u2014", "\u2014"]
            )
            executed = [show(e.stat(label, "hard", "loss")), show(e.stat(label, "hard", "active_fraction"), ".3f")]
            cells = [size, method, show(e.stat(label, "parameters"), ",.0f"), *soft, *executed]
            lines.append(f"| {' | '.join([*cells, show(e.stat(label, 'flops_skipped'), '.1%')])} |")
        answer = collapses(e, scaled(size, "tsa"))
        said.append(f"{size}: {NOT_RUN if answer is None else 'collapses' if answer else 'survives'}")
    return (
        "`tokendepth reproduce scaling`: enwik8, 1,500 steps of the paper's recipe, one seed, the first 1,048,576 "
        "characters of the validation split: a first look, trained far from the end.\n\n"
        + "\n".join(lines)
        + f"\n\nTSA, executed at its threshold: {'; '.join(said)}."
    )


def convergence(e: Evidence) -> str:
    published = e.published("convergence", "enwik8, baseline and TSA")["steps"]
    head = [f"{level} {unit}" for unit in ("bits", "nats") for level in LEVELS]
    lines = [f"| model | {' | '.join(head)} |", "|---|" + "--:|" * len(head)]
    said = [f"{published[str(level)]:,}" for level in LEVELS]
    lines.append(f"| enwik8, published | {' | '.join(said)} | | | |")
    for name, label in MODELS.items():
        cells = [steps(e.steps_to(label, level / unit)) for unit in (BITS, 1.0) for level in LEVELS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return (
        "The step of the first validation, one every 250 steps on the first 262,144 characters of the split, at or "
        "below a loss; one number a seed where seeds differ.\n\n" + "\n".join(lines)
    )
