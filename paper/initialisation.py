"""What a model's routers do before training: the active fraction that training starts from."""

from typing import Any

from tokendepth import data
from tokendepth.config import RunConfig, to_dict
from tokendepth.measure.evaluate import batches, measure
from tokendepth.methods import build
from tokendepth.runs.machine import choose_device, environment
from tokendepth.training.loop import resolve

TOKENS = 2**14


def at_initialisation(config: RunConfig, *, device: str = "auto", tokens: int = TOKENS) -> dict[str, Any]:
    """Loss and active fraction of the untrained model on validation text, soft and hard."""
    where, dataset = choose_device(device), data.load(config.data)
    config = resolve(config, dataset)
    model = build(config).to(where).eval()
    found = {
        execution: measure(
            model,
            batches(dataset, "val", config.model.context, where, tokens),
            lambda ids, execution=execution: model(ids, execution=execution),
        )
        for execution in ("soft", "hard")
    }
    figures = {name: {"loss": m.loss, "active_fraction": m.depth.active_fraction} for name, m in found.items()}
    return {"config": to_dict(config), **figures, "evaluated_on": environment(where)}
