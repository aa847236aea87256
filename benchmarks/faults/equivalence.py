"""What a model computes does not depend on how: skipping or masked, cached or whole, together or alone, padded or not.

In float32, for every method, on the classic block and on a modern one. An error is the largest difference of a logit,
as a share of the largest logit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.faults.lively import enlivened, relative_error, routed_sites, with_router_logits
from benchmarks.faults.outcome import Outcome, Tell
from tokendepth.cache import KVCache
from tokendepth.config import METHOD_CONFIGS, ACTConfig, EarlyExitConfig, ModelConfig, RunConfig, TrainConfig
from tokendepth.methods import METHODS, build
from tokendepth.model import LanguageModel, Output
from tokendepth.trace import Execution

TOLERANCE = 1e-5
TIME, VOCABULARY = 16, 11
SPELLINGS = [b" " if token % 2 else b"a" for token in range(VOCABULARY)]
CLASSIC = ModelConfig(32, 4, 4, 64, TIME, 0.0, VOCABULARY)
MODERN = replace(
    CLASSIC, d_ff=48, norm="rms", positions="rotary", n_kv_head=2, qk_norm=True, ffn="swiglu", ffn_bias=False
)
LESS_SURE = {"early_exit": EarlyExitConfig(threshold=0.4), "act": ACTConfig(epsilon=0.2)}
"""Untrained, hardly a token is as sure as the defaults ask for."""
SPREAD = {"act": 2.0}
SEEDS = 50


@dataclass
class Found:
    """Over all that was computed for one model."""

    decisions: int = 0
    flips: int = 0
    given: float = 0.0
    """The largest error with decisions given."""
    router: float = 0.0
    """The largest error of a router's logits."""
    distance: float = 0.0
    """The largest difference between the two logits of a flip; the threshold is between them."""
    others: float = 0.0
    """The largest error of cached, batched and padded passes."""


def equivalence(folder: Path, count: int, tell: Tell) -> Outcome:
    """`count` free decisions, over all methods, and the other ways to compute the same."""
    outcome, largest = Outcome(), Found()
    cases = [(name, kind) for name in METHODS for kind in ("classic", "modern")]
    deciding = sum(2 for name in METHODS if name != "dense")
    for name, kind in cases:
        with outcome.guard(f"{name}, {kind}"):
            found = _compared(lively(name, MODERN if kind == "modern" else CLASSIC), -(-count // deciding))
            _check(outcome, f"{name}, {kind}", found)
            largest.decisions += found.decisions
            largest.flips += found.flips
            for figure in ("given", "router", "distance", "others"):
                setattr(largest, figure, max(getattr(largest, figure), getattr(found, figure)))
        outcome.attempts = largest.decisions
        tell(outcome.attempts, count)
    outcome.figures = {
        "flips": largest.flips,
        "largest difference, decisions given": largest.given,
        "largest difference of a router's logit": largest.router,
        "largest distance of a flip from the threshold": largest.distance,
        "largest difference, cached, batched or padded": largest.others,
        "models": len(cases),
    }
    return outcome


def _check(outcome: Outcome, name: str, found: Found) -> None:
    outcome.check(found.given <= TOLERANCE, f"{name}: sparse is not hard with decisions given: {found.given:.1e}")
    outcome.check(found.router <= TOLERANCE, f"{name}: a router's logits differ by {found.router:.1e}")
    outcome.check(found.distance <= TOLERANCE, f"{name}: a decision flipped {found.distance:.1e} from the threshold")
    outcome.check(found.others <= TOLERANCE, f"{name}: cached, batched or padded differs by {found.others:.1e}")


def lively(name: str, model: ModelConfig) -> LanguageModel:
    """The first seed at which every site processes some of the tokens, but not all."""
    method = LESS_SURE.get(name) or METHOD_CONFIGS[name]()
    for seed in range(SEEDS):
        config = RunConfig(model=model, method=method, train=TrainConfig(seed=seed))
        found = enlivened(build(config, SPELLINGS).eval(), _tokens(64), SPREAD.get(name, 1.0))
        work = _passed(found, _tokens(64), "hard").trace.work[routed_sites(found)].mean((1, 2))
        if all(0.2 <= float(share) <= 0.8 for share in work):
            return found
    raise AssertionError(f"{name}: no seed below {SEEDS} decides both ways")


def _compared(model: LanguageModel, decisions: int) -> Found:
    found, sites = Found(), routed_sites(model)
    sequences = -(-decisions // (TIME * max(1, len(sites))))
    batch = min(1024, max(8, sequences))
    for seed in range(-(-sequences // batch)):
        ids = _tokens(batch, seed=seed)
        _free(model, ids, found)
        _given(model, ids[:64], found, seed)
    for execution in ("hard", "sparse"):
        for error in _other_ways(model, _tokens(8, seed=1000), execution):
            found.others = max(found.others, error)
    return found


@torch.no_grad()
def _passed(model: LanguageModel, ids: Tensor, execution: Execution, **options: object) -> Output:
    return model(ids, execution=execution, **options)


def _free(model: LanguageModel, ids: Tensor, found: Found) -> None:
    """Every router decides; after a flip the later ones of that sequence read another state and are not judged."""
    hard, of_hard = with_router_logits(model, lambda: _passed(model, ids, "hard"))
    sparse, of_sparse = with_router_logits(model, lambda: _passed(model, ids, "sparse"))
    same = torch.ones(len(ids), dtype=torch.bool)
    sites = routed_sites(model)
    if not of_hard:  # what decides is not computed, so it cannot be rounded
        found.flips += int((hard.trace.work != sparse.trace.work).sum())
        found.decisions += hard.trace.work[sites].numel()
    for at, one, other in zip(np.array_split(sites, len(of_hard) or 1), of_hard, of_sparse, strict=False):
        found.router = max(found.router, relative_error(other[same], one[same]))
        flipped = (hard.trace.work[at] != sparse.trace.work[at]) & same[:, None]
        apart = (one - other).abs().reshape(*one.shape[:2], -1).amax(2)  # a router may have a logit for each expert
        found.distance = max(found.distance, float((apart * flipped.any(0)).max()))
        same &= ~flipped.any(2).any(0)
        found.flips += int(flipped.sum())
        found.decisions += flipped.numel()
    found.given = max(found.given, relative_error(sparse.logits[same], hard.logits[same]))


def _given(model: LanguageModel, ids: Tensor, found: Found, seed: int) -> None:
    shape = (len(routed_sites(model)), *ids.shape)
    decisions = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < (0.1, 0.4, 0.9)[seed % 3]
    together = model.method.sites_per_decision
    decisions = decisions[::together].repeat_interleave(together, 0)
    how = {"decisions": decisions} if shape[0] else {}
    hard, sparse = (_passed(model, ids, execution, **how) for execution in ("hard", "sparse"))
    found.given = max(found.given, relative_error(sparse.logits, hard.logits))
    if not torch.equal(hard.trace.work, sparse.trace.work):
        found.given = float("inf")


def _other_ways(model: LanguageModel, ids: Tensor, execution: Execution) -> Iterator[float]:
    """The errors of a cache, of sequences alone and of padding on the left; infinite where a decision differs."""
    whole = _passed(model, ids, execution)
    for chunks in ((7, *[1] * (TIME - 7)), (3, 5, TIME - 8)):
        cache = KVCache(model.config, len(ids), TIME, layers=model.method.cache_layers, like=model.norm.weight.detach())
        parts = [_passed(model, part, execution, cache=cache) for part in ids.split(list(chunks), dim=1)]
        logits, work = (torch.cat([part.logits for part in parts], 1), torch.cat([p.trace.work for p in parts], 2))
        yield _error(logits, work, whole)
    lengths = [1 + (5 * number) % TIME for number in range(len(ids))]
    padded = torch.stack([row.roll(TIME - length) for row, length in zip(ids, lengths, strict=True)])
    valid = torch.arange(TIME) >= TIME - torch.tensor(lengths)[:, None]
    together = _passed(model, padded, execution, valid=valid)
    for number, length in enumerate(lengths):
        alone = _passed(model, ids[number : number + 1, :length], execution)
        yield _error(
            whole.logits[number : number + 1, :length], whole.trace.work[:, number : number + 1, :length], alone
        )
        work = together.trace.work[:, number : number + 1, -length:]
        yield _error(together.logits[number : number + 1, -length:], work, alone)


def _error(logits: Tensor, work: Tensor, expected: Output) -> float:
    return relative_error(logits, expected.logits) if torch.equal(work, expected.trace.work) else float("inf")


def _tokens(batch: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, TIME), generator=torch.Generator().manual_seed(seed))
