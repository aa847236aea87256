"""What the savings are worth with real skipping, compared with controls."""

from paper import tables
from paper.evidence import NOT_RUN, Evidence, collapses, show
from paper.findings.finding import Finding, apart
from paper.tables import DENSE, ENWIK8_TSA, TSA, fewer, penalty
from tokendepth.report.tables import piped


def hard_execution(e: Evidence) -> Finding:
    models = {
        "Shakespeare, penalty 0.001": TSA,
        "enwik8, penalty 0.001": ENWIK8_TSA,
        "Shakespeare, penalty 0.05": penalty(0.05),
    }
    answers = [a for a in (collapses(e, label) for label in models.values()) if a is not None]
    verdict = NOT_RUN if not answers else "Not supported" if any(answers) else "Holds"
    kept = show(e.stat(TSA, "controls", "untrained_router_hard", "active_fraction"), ".0%")
    lines = {
        "loss, soft (nothing skipped)": (("soft", "loss"), ".4f", "runs"),
        "active fraction, soft": (("soft", "active_fraction"), ".3f", "runs"),
        "loss, with skipping": (("hard", "loss"), ".4f", "runs"),
        "active fraction, with skipping": (("hard", "active_fraction"), ".3f", "runs"),
        "control: untrained routers": (("controls", "untrained_router_hard", "loss"), ".4f", "runs"),
        "control: kept tokens keep their soft weight": (("controls", "kept_weights_hard", "loss"), ".4f", "runs"),
        "control: random decisions": (("controls", "random_decisions_hard", "loss"), ".4f", "runs"),
        "share of the gates' variance between layers": (
            ("modes", "soft", "layer_share_of_variance"),
            ".0%",
            "routing",
        ),
    }
    rows = [["", *models], ["---"] + ["--:"] * len(models)]
    for words, (keys, form, of) in lines.items():
        rows.append([words, *(show(e.stat(label, *keys, of=of), form) for label in models.values())])
    text = (
        "The paper trains a gate that scales every layer's update, counts one minus the gate as saved, and states that "
        "the routing transfers directly to sparse execution. It never evaluates a trained model at its threshold. We "
        f"do. Controls: untrained routers keep {kept} of the tokens whole, so that row shows what rounding the weights "
        "up to 1 costs without any skipping. The next one makes the trained decisions, but tokens that are kept keep "
        "the weight they were trained with. Random decisions have the same active fractions. If most of the gates' "
        "variance is between layers, the gate is a volume knob for a layer rather than a switch for a token. A saving "
        "whose execution costs more than 2% of the loss is called not supported below."
    )
    return Finding("TSA with real skipping", f"{verdict}.", text, piped(rows))


def at_initialisation(e: Evidence) -> Finding:
    soft, hard = (e.stat(TSA, mode, "active_fraction", of="initial") for mode in ("soft", "hard"))
    trained = e.stat(TSA, "soft", "active_fraction")
    layers = e.configs[TSA].model.n_layer
    saved = NOT_RUN if soft is None else f"{(1 - soft.mean) * (layers - 1) / layers:.1%}"
    published = e.published("shakespeare", "TSA")
    text = (
        "The router's last bias starts at -1, so before the first training step the soft active fraction is already "
        f"{show(soft, '.3f')} (with skipping: {show(hard, '.3f')}). By the paper's formula, this untrained model saves "
        f"{saved} of the token-layer operations. The published trained model saves {published['tlops_saved']:.1%} at "
        f"active fraction {published['active_fraction']}. Ours has {show(trained, '.3f')} after training."
    )
    return Finding("The active fraction before training", "Note.", text)


def spread(e: Evidence) -> Finding:
    dense = e.stat(DENSE, "hard", "loss")
    text = f"Dense Shakespeare, the same config with different seeds: {show(dense)}."
    if dense is not None and dense.std is not None:
        width = max(dense.values) - min(dense.values)
        text += (
            f" From best to worst that is {width:.4f} nats, {width / dense.mean:.2%}. The differences in the paper are "
            f"each from one seed: {apart(e, 'shakespeare'):+.4f} for TSA on Shakespeare, {apart(e, 'enwik8'):+.4f} on "
            f"enwik8, {apart(e, 'matched', 'early exit'):+.4f} between TSA and early exit."
        )
    text += " With fewer than three seeds, differences of this size prove nothing, neither in the paper nor here."
    return Finding("The spread between seeds", "Note.", text)


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
        "A control that the paper does not have: remove layers instead of skipping tokens. Dense Shakespeare models: "
        + ", ".join(said)
        + f". TSA with skipping has {show(executed)} and skips {show(e.stat(TSA, 'flops_skipped'), '.1%')} of FLOPs."
    )
    verdict = NOT_RUN
    if cheaper and executed is not None:
        loss, n = min(cheaper)
        verdict = "TSA loses" if loss < executed.mean else "TSA wins"
        text += f" Of the dense models that cost no more, the best has {n} layers and a loss of {loss:.4f}."
    return Finding("Dense models with fewer layers", f"{verdict}.", text)


def wall_clock(e: Evidence) -> Finding:
    said = []
    for skip, what in (("ffn", "the feed-forward skipped"), ("block", "the whole block skipped")):
        for positions in ("contiguous", "random"):
            row = e.timed(condition="sparse", active_fraction=0.726, skip=skip, positions=positions)
            said.append(f"{what}, {positions}: {row['speedup']:.3f}x" if row else f"{what}, {positions}: {NOT_RUN}")
    row = e.timed(condition="sparse", active_fraction=0.726, skip="ffn", positions="contiguous")
    verdict = NOT_RUN if row is None else f"{'Holds' if row['speedup'] > 1 else 'Does not hold'} on {row['device']}"
    soft = e.timed(condition="soft")
    published = e.published("throughput", "sparse TSA at 0.726")["speedup"]
    text = (
        f"Published speed-up at active fraction 0.726: {published}x, for an untrained model whose active tokens are "
        f"the first of every sequence. Ours with the same shape and batch: {'; '.join(said)}. Soft gates, which skip "
        f"nothing: {NOT_RUN if soft is None else format(soft['speedup'], '.3f') + 'x'}. All follow the paper's "
        "protocol: float32, not compiled, and each block waits for its number of tokens. Timings of the same shape "
        "with compiled code and our kernels, on CPU and GPU and with trained decisions, are in [SPEED.md](SPEED.md)."
    )
    return Finding("Wall-clock", f"{verdict}.", text)


def what_survives(e: Evidence) -> Finding:
    loss, alpha = e.stat(tables.BUDGET, "hard", "loss"), e.stat(tables.BUDGET, "hard", "active_fraction")
    scales = [
        f"{relative.mean:+.1%} at {size} and active fraction {show(e.stat(label, 'hard', 'active_fraction'), '.3f')}"
        for size in tables.SIZES
        if (relative := e.against(label := tables.scaled(size, "budget"), tables.scaled(size, "dense"), "hard", "loss"))
    ]
    text = (
        "For comparison, our own method, budget routing, is trained with hard decisions. On Shakespeare with skipping "
        f"it has {show(loss)} at active fraction {show(alpha, '.3f')}, with "
        f"{show(e.stat(tables.BUDGET, 'flops_skipped'), '.1%')} of the FLOPs skipped; dense has "
        f"{show(e.stat(DENSE, 'hard', 'loss'))}. But it is trained with two forward passes per step, and dense models "
        "trained that way are better still at the same FLOPs ([RESULTS.md](RESULTS.md)). On enwik8 with skipping, the "
        f"loss relative to dense models of the same size (scaling study below) is {', '.join(scales) or NOT_RUN}."
    )
    return Finding("Budget routing, for comparison", "Note.", text)
