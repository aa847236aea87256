"""What the savings are worth once they are executed, and what stands beside them."""

from paper import tables
from paper.evidence import NOT_RUN, Evidence, collapses, show
from paper.findings.finding import Finding, apart
from paper.tables import DENSE, ENWIK8_TSA, TSA, fewer, penalty


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

    kept = show(e.stat(TSA, "controls", "untrained_router_hard", "active_fraction"), ".0%")

    def controls(control: str) -> str:
        return ", ".join(show(e.stat(label, "controls", control, "loss")) for label in models.values())

    shares = ", ".join(
        show(e.stat(label, "modes", "soft", "layer_share_of_variance", of="routing"), ".0%")
        for label in models.values()
    )
    text = (
        "The paper trains a gate that scales every layer's update, counts one minus the gate as saved, and says that "
        "the routing transfers directly to sparse execution; it never evaluates a trained model at its threshold. We "
        "do. " + "; ".join(said) + ". Controls, in the same order. The same blocks with untrained routers, which keep "
        f"{kept} of the tokens whole: {controls('untrained_router_hard')}; against soft, that is what rounding the "
        "weights up to 1 does without any skipping. The same decisions, with tokens that stay keeping their "
        f"weight as they were trained: {controls('kept_weights_hard')}. Dice in the routers' place, at the same "
        f"fractions: {controls('random_decisions_hard')}. Of the gates' variance, {shares} is the layer's mean alone: "
        "where that is most of it, the gate is a volume knob for a layer rather than a switch for a token. A saving "
        "whose execution costs more than 2% of the loss is called not supported below."
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
    return Finding("The active fraction before training", "Note.", text)


def spread(e: Evidence) -> Finding:
    dense = e.stat(DENSE, "hard", "loss")
    text = f"Dense Shakespeare, the same config under different seeds: {show(dense)}."
    if dense is not None and dense.std is not None:
        width = max(dense.values) - min(dense.values)
        text += (
            f" From best to worst that is {width:.4f} nats, {width / dense.mean:.2%}. The paper's differences, each "
            f"from one seed: {apart(e, 'shakespeare'):+.4f} for TSA on Shakespeare, {apart(e, 'enwik8'):+.4f} on "
            f"enwik8, {apart(e, 'matched', 'early exit'):+.4f} between TSA and early exit."
        )
    text += " Fewer than three seeds prove nothing here, ours no more than others'."
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


def wall_clock(e: Evidence) -> Finding:
    said = []
    for skip, what in (("ffn", "the feed-forward skipped"), ("block", "the whole block skipped")):
        for positions in ("contiguous", "random"):
            row = e.timed(condition="sparse", active_fraction=0.726, skip=skip, positions=positions)
            said.append(f"{what}, {positions}: {row['speedup']:.3f}x" if row else f"{what}, {positions}: {NOT_RUN}")
    row = e.timed(condition="sparse", active_fraction=0.726, skip="ffn", positions="contiguous")
    verdict = NOT_RUN if row is None else f"{'Holds' if row['speedup'] > 1 else 'Not'} on {row['device']}"
    soft = e.timed(condition="soft")
    published = e.published("throughput", "sparse TSA at 0.726")["speedup"]
    text = (
        f"Published at active fraction 0.726: {published}x, on an untrained model whose active tokens are the first of "
        f"every sequence. Ours at the same shape and batch: {'; '.join(said)}. Soft gating, which skips nothing: "
        f"{NOT_RUN if soft is None else format(soft['speedup'], '.3f') + 'x'}. This is the paper's protocol: float32, "
        "the library called op by op, each block waiting for its count of tokens. What compiled code and our kernels "
        "make of the same shape, on a CPU and on a GPU, with trained decisions too, is in [SPEED.md](SPEED.md)."
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
        "For comparison, our answer to the same question, trained so that its decisions are decisions: budget routing, "
        f"executed, {show(loss)} at active fraction {show(alpha, '.3f')}, "
        f"{show(e.stat(tables.BUDGET, 'flops_skipped'), '.1%')} of the FLOPs skipped; dense "
        f"{show(e.stat(DENSE, 'hard', 'loss'))}. Its training step costs two passes, which is a regulariser of its own "
        "on so small a text ([README](../README.md)). On enwik8, executed against dense of the same size in the "
        f"scaling study below, which tells how thresholds were found: {', '.join(scales) or NOT_RUN} ([log](LOG.md))."
    )
    return Finding("What survives execution", "Note.", text)
