"""A model over a text: depth and loss of each token with skipping, without, and after a change to an earlier token."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.analysis.table import to_numpy
from tokendepth.data import TextDataset
from tokendepth.data.dataset import NO_LOSS
from tokendepth.model import LanguageModel, Output
from tokendepth.progress import Progress

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Tokens:
    """A text with one entry per token, in order; a token with which every text begins (in some models) is left out."""

    ids: np.ndarray
    window: np.ndarray
    """Number of the token's window, the part of the text that the model sees at once."""
    position: np.ndarray
    """Position in its window, from 0."""
    loss: np.ndarray
    """Loss of the next token in nats, with skipping."""
    entropy: np.ndarray
    """Entropy of the prediction of the next token, in nats."""
    work: np.ndarray
    """`[routed site, token]`, with skipping."""
    full_loss: np.ndarray | None
    """Loss of the next token with every token active everywhere; None if the method cannot run like that."""
    flips: np.ndarray
    """`[routed site, token]`: decisions that change when one earlier token of the window is replaced."""
    distance: np.ndarray
    """Distance to that token; 0 or negative for the token itself and those before it."""

    @property
    def surprisal(self) -> np.ndarray:
        """Loss of the token itself, from the prediction before it; NaN for the first token of the text."""
        return np.insert(self.loss[:-1], 0, np.nan)

    @property
    def decisions(self) -> np.ndarray:
        """`[routed site, token]`: whether the token was processed, as `evaluate` counts it."""
        return self.work > 0.5


@torch.no_grad()
def run_over(
    model: LanguageModel, dataset: TextDataset, stream: Iterator[Batch], progress: Progress, *, seed: int = 0
) -> Tokens:
    """Three forward passes over every batch of the stream."""
    routed = [n for n, site in enumerate(model.method.sites(keys=1)) if site.routed]
    dice = np.random.default_rng(seed)
    types = np.unique(dataset.split_ids("train"))
    parts: list[dict[str, np.ndarray]] = []
    windows, can_be_full = 0, True
    for ids, targets in stream:
        valid = (targets != NO_LOSS).cpu().numpy()
        own = model(ids, execution="sparse")
        part = {"loss": _losses(own, targets), "entropy": _entropies(own.logits)}
        part["work"] = to_numpy(own.trace.work)[routed]
        if can_be_full:
            everyone = torch.ones(len(routed), *ids.shape, dtype=torch.bool, device=ids.device)
            full = model(ids, execution="hard", decisions=everyone)
            can_be_full = bool((to_numpy(full.trace.work)[routed][:, valid] == 1).all())
            part["full_loss"] = _losses(full, targets)
        changed, where = replaced(ids, valid, types, dice)
        other = to_numpy(model(changed, execution="sparse").trace.work)[routed]
        part["flips"] = (other > 0.5) != (part["work"] > 0.5)
        part["distance"] = np.arange(ids.shape[1])[None] - where[:, None]
        part["position"] = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        part["window"] = np.broadcast_to(windows + np.arange(len(ids))[:, None], ids.shape)
        part["ids"] = ids.cpu().numpy()
        parts.append({name: values[..., valid] for name, values in part.items()})
        windows += len(ids)
        progress.advance(ids.numel())
    names = [name for name in parts[-1] if name != "full_loss"]
    joined = {name: np.concatenate([part[name] for part in parts], axis=-1) for name in names}
    full_loss = np.concatenate([part["full_loss"] for part in parts]) if can_be_full else None
    return Tokens(**joined, full_loss=full_loss)


def replaced(ids: Tensor, valid: np.ndarray, types: np.ndarray, dice: np.random.Generator) -> tuple[Tensor, np.ndarray]:
    """The windows with one token of each replaced by another token from the training text, and its position."""
    first = valid.argmax(1)  # what every text begins with stays
    where = dice.integers(first, ids.shape[1])
    old = ids.cpu().numpy()[np.arange(len(ids)), where]
    steps = dice.integers(1, len(types), len(ids))
    place = np.searchsorted(types, old).clip(max=len(types) - 1)
    new = types[(place + steps) % len(types)].astype(np.int64)
    new = np.where(new == old, types[(place + steps - 1) % len(types)], new)  # of a token that training never saw
    changed = ids.clone()
    changed[torch.arange(len(ids)), torch.from_numpy(where)] = torch.from_numpy(new).to(ids.device)
    return changed, where


def _losses(out: Output, targets: Tensor) -> np.ndarray:
    logits = out.logits.float().transpose(1, 2)
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=NO_LOSS).cpu().numpy()


def _entropies(logits: Tensor) -> np.ndarray:
    log = F.log_softmax(logits.float(), dim=-1)
    return -(log.exp() * log).sum(-1).cpu().numpy()
