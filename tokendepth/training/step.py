"""One optimiser step: the gradient of a global batch, checked before it is applied.

Losses are sums over tokens, divided by the number of tokens in the whole batch. Without dropout, the result therefore
does not depend on how the batch is split by accumulation and ranks, up to rounding. The exceptions are methods that
compute a statistic over each micro-batch (`Method.batch_statistic`).
"""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import TrainConfig
from tokendepth.data.dataset import NO_LOSS
from tokendepth.errors import UserError
from tokendepth.model import Block, LanguageModel
from tokendepth.training.ranks import Ranks
from tokendepth.training.retrofit import Teacher

MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS_THAT_REPAY_COMPILING = 25_000
"""Compiling takes half a minute and saves about a millisecond per step (docs/LOG.md)."""


class NotFinite(UserError):
    """A loss, gradient or weight is not finite; nothing was updated."""


@dataclass(frozen=True)
class Stats:
    """Losses, gradient norm and work of one step, over its global batch."""

    task: float
    depth: float
    grad_norm: float
    work: tuple[float, ...]
    """Number of tokens processed at each site of the trace (soft: the sum of their weights)."""


class OptimiserStep:
    def __init__(
        self,
        model: LanguageModel,
        config: TrainConfig,
        device: torch.device,
        ranks: Ranks,
        teacher: Teacher | None = None,
        *,
        routers_first: float = 0.0,
    ) -> None:
        self.model, self.config, self.device, self.ranks, self.teacher = model, config, device, ranks, teacher
        on_gpu = device.type == "cuda"
        bfloat16 = config.dtype == "bfloat16" or (config.dtype == "auto" and on_gpu and torch.cuda.is_bf16_supported())
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
        worth_compiling = on_gpu and config.steps >= STEPS_THAT_REPAY_COMPILING and find_spec("triton") is not None
        self.compiled = config.compile == "on" or (config.compile == "auto" and worth_compiling)
        self.cross_entropy = _summed_cross_entropy
        if self.compiled:
            compile_blocks(model)
            self.cross_entropy = torch.compile(_summed_cross_entropy, dynamic=False)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._flatten()
        new = {parameter for module in model.method.additions() for parameter in module.parameters()}
        self.others = [g for p, g in zip(self.parameters.values(), self.gradients, strict=True) if p not in new]
        self.frozen_steps = math.ceil(routers_first * config.steps) if new else 0
        """First steps, which update only the method's new parameters, such as routers."""

    def uncompiled(self) -> contextlib.AbstractContextManager:
        """Run the model eagerly inside: it was compiled only for the shape of a training batch."""
        return torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()

    def _flatten(self) -> None:
        """Make trained weights views of one flat buffer and their gradients views of another, decayed ones first.

        Zeroing, norm, clipping, all-reduce and AdamW then take one or two calls each. In small models the overhead of
        calls, not arithmetic, determines the time per step.
        """
        decays = {f"{name}.weight" for name, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        if self.config.decay == "all":
            decays = set(dict(self.model.named_parameters()))
        trained = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self.parameters = dict(sorted(trained, key=lambda item: item[0] not in decays))
        weights = torch.zeros(sum(map(_room, self.parameters.values())), device=self.device)
        for parameter, view in zip(self.parameters.values(), self._by_parameter(weights), strict=True):
            parameter.data = view.copy_(parameter.data)
        # The sums of a step (task loss, depth loss, work per site) follow the gradient in the same buffer.
        sites = len(self.model.method.sites(keys=1))
        self.sums = torch.zeros(len(weights) + 2 + sites, device=self.device)
        self.gradient, self.stats = self.sums[: len(weights)], self.sums[len(weights) :]
        self.gradients = self._by_parameter(self.gradient)
        self.share = torch.zeros((), device=self.device)
        decayed = sum(_room(p) for name, p in self.parameters.items() if name in decays)
        groups = []
        # As in the appendix of the TSA paper, biases, norms and embeddings are not decayed by default.
        for part, decay in ((slice(None, decayed), self.config.weight_decay), (slice(decayed, None), 0.0)):
            if not len(weights[part]):
                continue
            weight = nn.Parameter(weights[part])
            weight.grad = self.gradient[part]
            groups.append({"params": [weight], "weight_decay": decay, "decay": decay})
        self.adam = torch.optim.AdamW(groups, lr=self.config.lr, betas=(0.9, 0.95), fused=True)

    def _by_parameter(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([_room(p) for p in self.parameters.values()])
        return [part[: p.numel()].view_as(p) for part, p in zip(parts, self.parameters.values(), strict=True)]

    def __call__(self, inputs: np.ndarray, targets: np.ndarray, *, step: int, lr: float) -> Stats:
        """Take step number `step` on this rank's part of the global batch."""
        self.begin(inputs, targets, step=step)
        return self.finish(lr=lr)

    def begin(self, inputs: np.ndarray, targets: np.ndarray, *, step: int) -> None:
        """Start computing the gradient of step number `step`. On a GPU this returns before it is ready."""
        self.step = step
        # Dropout depends only on seed, step and rank, so a resumed run needs no saved random state.
        self.dropout_seed = int(np.random.SeedSequence([self.config.seed, step, self.ranks.rank]).generate_state(1)[0])
        torch.manual_seed(self.dropout_seed)
        self.model.method.set_progress(step / self.config.steps)
        self.share.fill_(1 / self.ranks.total(int((targets != NO_LOSS).sum())))
        self.sums.zero_()
        batch = torch.from_numpy(np.stack([inputs, targets]))
        for micro_batch in batch.chunk(self.config.accumulate, dim=1):
            self._accumulate(micro_batch)
        self.ranks.sum(self.sums)
        if step < self.frozen_steps:
            torch._foreach_zero_(self.others)

    def finish(self, *, lr: float) -> Stats:
        """Wait for the gradient, check it and apply it."""
        *seen, grad_norm = torch.cat([self.stats, self.gradient.norm()[None]]).tolist()
        task, depth, *work = seen
        if not math.isfinite(task + depth + grad_norm):
            raise NotFinite(self._not_finite(self.step, task, grad_norm))
        if grad_norm > self.config.clip:
            self.gradient.mul_(self.config.clip / grad_norm)
        for group in self.adam.param_groups:
            group["lr"] = lr
            group["weight_decay"] = 0.0 if self.step < self.frozen_steps else group["decay"]
        self.adam.step()
        return Stats(task, depth, grad_norm, tuple(work))

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """`[task, depth, work per site...]`: what one micro-batch adds to the sums of the whole batch."""
        with self.autocast:
            told = None if self.teacher is None else self.teacher(inputs)
            out = self.model(inputs, targets=targets, teacher=told)
        task = self.cross_entropy(out.logits, targets) * self.share
        if self.teacher is not None and told is not None:
            task = self.teacher.blend(task, told, out.logits, targets != NO_LOSS, self.share)
        # Micro-batches have equal sizes, so the mean over the batch is the mean of their means.
        parts = self.config.accumulate * self.ranks.world
        depth = sum(out.losses.values(), torch.zeros_like(task)) / parts
        return torch.cat([torch.stack([task, depth]), out.trace.work.sum((1, 2))])

    def _add_gradient(self, batch: Tensor) -> None:
        losses = self.losses(batch[0], batch[1])
        torch._foreach_add_(self.gradients, torch.autograd.grad(losses[:2].sum(), list(self.parameters.values())))
        self.stats.add_(losses.detach())

    def _accumulate(self, batch: Tensor) -> None:
        """Add a micro-batch's gradient and losses to the sums. On a GPU that is one graph launch."""
        if self.device.type != "cuda":
            self._add_gradient(batch)
            return
        if self.graph is None:
            self.graph = self._captured(batch)
        self.held_batch.copy_(batch)
        self.graph.replay()

    def _captured(self, batch: Tensor) -> torch.cuda.CUDAGraph:
        self.held_batch = batch.to(self.device)
        before = self.sums.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # lazy initialisations must not be captured
            for _ in range(2):
                self._add_gradient(self.held_batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._add_gradient(self.held_batch)
        self.sums.copy_(before)
        torch.manual_seed(self.dropout_seed)  # the passes above have advanced it
        return graph

    def _not_finite(self, step: int, loss: float, norm: float) -> str:
        bad = _first_not_finite("weight", self.parameters, self.parameters.values())
        if not bad and math.isfinite(loss):
            bad = _first_not_finite("gradient", self.parameters, self.gradients)
        return (
            f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}, first not finite: {bad or 'the loss'}; stopped "
            "before the update; what was saved is intact: continue from it with --resume; if it happens again, "
            "train again in another --out with a lower --train.lr or --train.clip, or check the data"
        )

    # -- state, as plain named tensors

    def state(self) -> dict[str, np.ndarray]:
        """Weights and moments by parameter name. AdamW's step count is that of the run and not part of it."""
        kinds = {"model": [p.detach() for p in self.parameters.values()]}
        for moment in MOMENTS:
            parts = [
                self.adam.state[p].get(moment, torch.zeros_like(p)) for g in self.adam.param_groups for p in g["params"]
            ]
            kinds[moment] = self._by_parameter(torch.cat(parts))
        return {
            f"{kind}.{name}": tensor.float().cpu().numpy()
            for kind, tensors in kinds.items()
            for name, tensor in zip(self.parameters, tensors, strict=True)
        }

    def load_state(self, tensors: dict[str, np.ndarray], step: int) -> None:
        flat = {kind: torch.zeros_like(self.gradient) for kind in ("model", *MOMENTS)}
        for kind, buffer in flat.items():
            for (name, parameter), view in zip(self.parameters.items(), self._by_parameter(buffer), strict=True):
                view.copy_(fitting(tensors, f"{kind}.{name}", parameter))
        for parameter, saved in zip(self.parameters.values(), self._by_parameter(flat["model"]), strict=True):
            parameter.data.copy_(saved)
        done = 0
        for group in self.adam.param_groups:
            (part,) = group["params"]
            here = slice(done, done := done + part.numel())
            count = torch.tensor(float(step), device=self.device)
            self.adam.state[part] = {"step": count, **{moment: flat[moment][here].clone() for moment in MOMENTS}}


def _first_not_finite(kind: str, names: Iterable[str], tensors: Iterable[Tensor]) -> str:
    pairs = zip(names, tensors, strict=True)
    return next((f"{kind} {name}" for name, tensor in pairs if not tensor.isfinite().all()), "")


def compile_blocks(model: LanguageModel) -> None:
    """Compile each block by itself, in place.

    Blocks share their code, so a model of any depth needs one graph per kind of block, and most of these graphs are the
    same for every method. Compiling whole models takes minutes for each method.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)  # every kind and shape counts
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(dynamic=False)


def _summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def _room(parameter: Tensor) -> int:
    """Its size in a flat buffer, padded to a multiple of 256 bytes, since compiled code expects aligned weights."""
    return -(-parameter.numel() // 64) * 64


def fitting(tensors: dict[str, np.ndarray], name: str, like: Tensor) -> Tensor:
    if name not in tensors or tensors[name].shape != tuple(like.shape):
        raise UserError(
            f"the checkpoint does not fit this model at {name}; it belongs to another run: choose another --out"
        )
    return torch.from_numpy(tensors[name].copy()).to(like.device)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of step number `step` (from 0): linear warmup, then cosine decay to a tenth of the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    turned = math.pi * (step - config.warmup) / (config.steps - config.warmup)
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(turned)))
