"""Initial weights of a run: random ones, or those of a finished dense run, which may then also act as its teacher.

A retrofitted model is the base with routers, or with fewer blocks. Trained parameters have `requires_grad`; low-rank
updates are `LowRank` parametrisations of the blocks' matrices until `merge` folds them into the weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tokendepth.config import RunConfig, method_name
from tokendepth.data import Dataset
from tokendepth.errors import UserError
from tokendepth.measure.block_changes import sample
from tokendepth.measure.evaluate import load_model
from tokendepth.methods import build
from tokendepth.methods.base import divergence
from tokendepth.model import Block, LanguageModel
from tokendepth.retrofit_config import RetrofitConfig
from tokendepth.runs.base import open_base
from tokendepth.runs.run import Run

BLOCKS = "method.blocks."
FIT_AT_ONCE = 4
"""Sequences per forward pass."""


class Teacher:
    """The untouched model, without gradients or dropout."""

    def __init__(self, model: LanguageModel, weight: float) -> None:
        self.model, self.weight = model, weight
        """Weight of the divergence from the teacher; the task's loss has the rest."""

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """The teacher's logits `[batch, time, vocabulary]`."""
        return self.model(ids).logits

    def blend(self, task: Tensor, told: Tensor, logits: Tensor, counted: Tensor, share: Tensor) -> Tensor:
        """Weighted sum of `task` and the divergence from the teacher's logits `told`, over the `counted` tokens."""
        if not self.weight:
            return task
        distance = (divergence(told, logits) * counted).sum() * share
        return (1 - self.weight) * task + self.weight * distance


@dataclass(frozen=True)
class Start:
    model: LanguageModel
    base: LanguageModel | None = None
    """The untouched model of a retrofit."""
    teacher: Teacher | None = None


def start(config: RunConfig, dataset: Dataset, device: torch.device) -> Start:
    """The model of `config` with its initial weights, in training mode."""
    model = build(config, dataset.tokenizer.spellings())
    if config.retrofit is None:
        return Start(model.to(device).train())
    base = load_model(open_base(config.retrofit), torch.device("cpu"))
    take_weights(model, base, config.retrofit.dropped)
    set_trained(model, config.retrofit, config.train.seed)
    base = base.to(device).requires_grad_(False)
    teaches = config.retrofit.distill > 0 or model.method.wants_teacher
    teacher = Teacher(base, config.retrofit.distill) if teaches else None
    fit(model.to(device).eval(), sample(dataset, config.model.context)[0])
    return Start(model.train(), base, teacher)


@torch.no_grad()
def fit(model: LanguageModel, ids: Tensor) -> None:
    """Initialise the new parameters of `model` from its hidden states for `ids`."""
    entering = (model.entering(part.to(model.norm.weight.device), "hard") for part in ids.split(FIT_AT_ONCE))
    first, ctx = next(entering)
    model.method.fit(chain([first], (hidden for hidden, _ in entering)), ctx)


def check_base(run: Run) -> None:
    """Raise UserError if routers cannot be added to the model of `run`."""
    run.verify()
    if (name := method_name(run.config.method)) != "dense":
        raise UserError(f"{run.path} is of method {name}; expected a dense model, into which routers are put; name one")


@torch.no_grad()
def take_weights(model: LanguageModel, base: LanguageModel, dropped: Iterable[int] = ()) -> None:
    """Copy the weights of the dense `base`, except its `dropped` blocks, into `model`; new parameters stay as built."""
    own, dropped = model.state_dict(), set(dropped)
    kept = [n for n in range(base.config.n_layer) if n not in dropped]
    number = {str(n): str(place) for place, n in enumerate(kept)}
    for name, weight in base.state_dict().items():
        if name.startswith(BLOCKS):
            n, rest = name.removeprefix(BLOCKS).split(".", 1)
            if int(n) in dropped:
                continue
            name = f"{BLOCKS}{number[n]}.{rest}"
        if name not in own or own[name].shape != weight.shape:
            raise UserError(f"the base does not fit this model at {name}; retrofit it again in another --out")
        own[name].copy_(weight)


# --- trained parameters -----------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """LoRA: W + B A, with B = 0 at first."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        rank = min(rank, rows, columns)
        self.a = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.b @ self.a).to(weight.dtype)


def set_trained(model: LanguageModel, config: RetrofitConfig, seed: int) -> None:
    """Freeze the parameters that are not trained, and add low-rank updates if the config asks for them."""
    if config.trains == "all":
        return
    model.requires_grad_(False)
    added = [parameter for module in model.method.additions() for parameter in module.parameters()]
    for parameter in added:
        parameter.requires_grad_(True)
    if config.trains == "lora":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(np.random.SeedSequence([seed, 1]).generate_state(1)[0]))
            for linear in _matrices(model):
                parametrize.register_parametrization(linear, "weight", LowRank(linear.weight, config.rank))
    elif not added:
        name = method_name(model.method.config)
        raise UserError(
            f"retrofit.trains is 'routers', but {name} has none that learn: nothing would be trained; take all or lora"
        )


def _matrices(model: LanguageModel) -> list[nn.Linear]:
    """The linear layers of attention and feed-forward networks."""
    blocks = (module for module in model.method.modules() if isinstance(module, Block))
    parts = (part for block in blocks for part in (block.attention, block.ffn))
    return [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]


def merge(model: LanguageModel) -> None:
    """Fold low-rank updates into the weights, which leaves an ordinary model."""
    for module in [module for module in model.modules() if parametrize.is_parametrized(module, "weight")]:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
