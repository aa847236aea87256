"""First answers to what the TSA paper leaves open: routing by token type, and scale. Also: steps to a loss."""

from statistics import fmean

from paper.comparison import wrapped
from paper.evidence import BITS, NOT_RUN, Evidence, collapses, show
from paper.findings.finding import steps
from paper.shares import Shares, off, older
from paper.tables import DENSE, ENWIK8_DENSE, ENWIK8_TSA, ROUTING, SIZES, TSA, penalty, scaled
from tokendepth.config import BudgetConfig
from tokendepth.report.summary import Stat

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
    """Mean depth of each group, and how depth correlates with surprisal."""
    titles = ["model", "mode", "correlation with surprisal", "with the next token's surprisal", "standard deviation"]
    lines = [f"| {' | '.join([*titles, 'variance between layers'])} |", "|---|---|--:|--:|--:|--:|"]
    for label in ROUTING:
        ran = bool(e.rows(label, "routing"))
        for mode, name in (("soft", "soft"), ("hard", "with skipping")):
            found = {
                ".2f": [("rank_correlation", f"surprisal of the {which}") for which in ("token", "next")],
                ".3f": [("spread_of_depth",)],
                ".0%": [("layer_share_of_variance",)],
            }
            cells = [
                show(e.stat(label, "modes", mode, *keys, of="routing"), form, ran=ran)
                for form, numbers in found.items()
                for keys in numbers
            ]
            lines.append(f"| {NAMES[label]} | {name} | {' | '.join(cells)} |")
    text = (
        wrapped(
            "A token's depth is its mean work over the routed blocks: its gate when soft, 0 or 1 with skipping. This "
            "table has the rank correlation of depth with surprisal, its standard deviation over tokens, and the share "
            "of the gates' variance that is between layers, so the same for all tokens:"
        )
        + "\n\n"
        + "\n".join(lines)
    )
    return (
        f"{text}\n\nShare of the text and mean depth by group of tokens, at penalty 0.001 over all seeds:\n\n"
        f"{_groups(e)}\n\n**First answer.** {_answer(e)}"
    )


def _groups(e: Evidence) -> str:
    titles = ["by", "group"]
    titles += [
        f"{corpus}: {what}" for corpus in ("Shakespeare", "enwik8") for what in ("share", "soft", "with skipping")
    ]
    lines = [f"| {' | '.join(titles)} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    groups = {label: _by_group(e, label) for label in (TSA, ENWIK8_TSA)}
    known = dict.fromkeys(key for found in groups.values() for key in found)
    kinds = list(dict.fromkeys(kind for kind, _ in known))
    for key in sorted(known, key=lambda key: kinds.index(key[0])):
        cells = []
        for found in groups.values():
            stats = found.get(key)
            absent = ["none" if found else NOT_RUN] * 3
            cells += absent if stats is None else [f"{stats[0].mean:.1%}", *(depth.text(".3f") for depth in stats[1:])]
        lines.append(f"| {' | '.join([*key, *cells])} |")
    return "\n".join(lines if len(lines) > 2 else [*lines, f"| {NOT_RUN} |" + " |" * 7])


def _by_group(e: Evidence, label: str) -> dict[tuple[str, str], list[Stat]]:
    """By kind and group: share of the tokens, depth soft and with skipping, each over the seeds."""
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for row in e.rows(label, "routing"):
        for group in row["groups"]:
            numbers = (group["share"], fmean(group["soft"]), fmean(group["hard"]))
            found.setdefault((group["kind"], group["group"]), []).append(numbers)
    return {key: [Stat(values) for values in zip(*seeds, strict=True)] for key, seeds in found.items()}


def _answer(e: Evidence) -> str:
    said = []
    for label, name in ((TSA, "Shakespeare"), (ENWIK8_TSA, "enwik8")):
        found = _by_group(e, label)
        classes = {group: stats for (kind, group), stats in found.items() if kind == "character class"}
        if not classes:
            said.append(f"- {name}: {NOT_RUN}.")
            continue
        for place, mode in ((1, "soft"), (2, "with skipping")):
            order = sorted(classes, key=lambda group: classes[group][place].mean)
            width = classes[order[-1]][place].mean - classes[order[0]][place].mean
            said.append(
                f"- {name}, {mode}: least for {order[0]}, most for {order[-1]} ({width:.3f} apart)"
                + _by_surprise(found, place)
                + "."
            )
    said = [wrapped(line) for line in said]
    expected = "The paper expects predictable characters to stop early and hard ones to go deep. Ours:"
    return f"{expected}\n\n" + "\n".join(said)


def _by_surprise(found: dict[tuple[str, str], list[Stat]], place: int) -> str:
    kind = "surprisal of the next"
    ends = [found.get((kind, f"{which} quarter")) for which in ("lowest", "highest")]
    if None in ends:
        return ""
    easy, hard = (stats[place].mean for stats in ends if stats)
    return f"; {easy:.3f} before the most predictable quarter of characters, {hard:.3f} before the least predictable"


def scaling(e: Evidence) -> str:
    titles = [
        "size",
        "model",
        "parameters",
        "loss, soft",
        "active, soft",
        "loss, with skipping",
        "active, with skipping",
    ]
    lines = [f"| {' | '.join([*titles, 'FLOPs skipped'])} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
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
        soft, budget = (
            e.against(scaled(size, method), scaled(size, "dense"), mode, "loss")
            for method, mode in (("tsa", "soft"), ("budget", "hard"))
        )
        said.append(
            f"- {size}: TSA soft {show(soft, '+.1%')}; with skipping it "
            f"{NOT_RUN if answer is None else 'loses its quality' if answer else 'keeps its quality'}; budget with "
            f"skipping {show(budget, '+.1%')}"
        )
    shares = [
        Shares.of(method, method.budget, row["evaluation"]["hard"]["active_fraction_per_site"], row["evaluated_on"])
        for size in SIZES
        if isinstance(method := e.configs[label := scaled(size, "budget")].method, BudgetConfig)
        for row in e.rows(label)
    ]
    note = older(shares)
    return (
        wrapped(
            "`python -m paper reproduce scaling`: enwik8, 1,500 steps of the paper's recipe, one seed, measured on the "
            "first 1,048,576 characters of the validation split. This is only a first look: 1,500 steps are far from "
            "convergence."
        )
        + "\n\n"
        + "\n".join(lines)
        + (f"\n\n{wrapped(f'{note} Their shares are {off(shares)}.')}" if note else "")
        + "\n\n**First answer**, from a single seed. Loss relative to the dense model of the same size:\n\n"
        + "\n".join(said)
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
        wrapped(
            "The step of the first validation at or below a loss. Models are validated every 250 steps on the first "
            "262,144 characters of the split. If seeds differ, there is one number per seed."
        )
        + "\n\n"
        + "\n".join(lines)
    )
