"""Depth by token type on validation text: an open question of the TSA paper, with numbers.

A token's depth is the mean of its work over the routed blocks: under soft the gate's weight, under hard the share of
blocks that ran. It is compared with two surprisals: of the token itself, given its past, and of the next token, which
the depth is spent on predicting. Groups are those that the paper names (spaces, punctuation, characters in mid-word)
and those that it leaves open (frequency, surprisal).
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tokendepth.analysis.attributes import CHARACTER_KINDS, POSITIONS, Spelled, frequencies
from tokendepth.analysis.windows import ranks
from tokendepth.data import CharTokenizer, TextDataset
from tokendepth.data.of_run import dataset_of
from tokendepth.errors import UserError
from tokendepth.measure.evaluate import batches, load_model
from tokendepth.runs.machine import choose_device, environment
from tokendepth.runs.run import Run
from tokendepth.trace import Execution

TOKENS = 2**17
"""Enough for a few hundred in every group."""
FREQUENCIES = {"below 0.5%": 0.0, "0.5% to 2%": 0.005, "2% to 5%": 0.02, "5% and more": 0.05}
"""Token types by their minimum share of the text."""
QUARTERS = ("lowest quarter", "second quarter", "third quarter", "highest quarter")
ORDER = (*CHARACTER_KINDS, *POSITIONS, *FREQUENCIES, *QUARTERS)


def measure(run: Run, *, device: str = "auto", tokens: int = TOKENS) -> dict[str, Any]:
    """Depth by group, its correlation with surprisal, and how much of it depends only on the layer; soft and hard."""
    where, dataset = choose_device(device), dataset_of(run)
    if not isinstance(dataset, TextDataset) or not isinstance(dataset.tokenizer, CharTokenizer):
        raise UserError(f"{run.path} was not trained on the characters of a text; token types are known only for those")
    model = load_model(run, where)
    modes: tuple[Execution, ...] = ("soft", "hard") if model.method.has_soft else ("hard",)
    routed = [n for n, site in enumerate(model.method.sites(keys=1)) if site.routed]
    ids, nats, work = [], [], {mode: [] for mode in modes}
    with torch.no_grad():
        for inputs, targets in batches(dataset, "val", model.config.context, where, tokens):
            outs = {mode: model(inputs, execution=mode) for mode in modes}
            # Surprisal under the first mode: soft where there is one, since the router was trained under it.
            logits = outs[modes[0]].logits.float()
            nats.append(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").cpu().numpy().ravel())
            ids.append(inputs.cpu().numpy().ravel())
            for mode in modes:
                work[mode].append(outs[mode].trace.work[routed].flatten(1).cpu().numpy())
    text, of_next = np.concatenate(ids), np.concatenate(nats)
    of_token = np.concatenate([[np.nan], of_next[:-1]])  # windows follow each other, so it is known for all but one
    gates = {mode: np.concatenate(parts, axis=1) for mode, parts in work.items()}
    spelled = Spelled(text, dataset.tokenizer.spellings())
    groups = {
        "character class": spelled.kinds(),
        "position in word": spelled.positions(),
        "frequency": _frequencies(text, dataset),
        "surprisal of the token": _quarters(of_token),
        "surprisal of the next": _quarters(of_next),
    }
    return {
        "tokens": len(text),
        "groups": [
            {"kind": kind, "group": name, "share": float(chosen.mean()), **_depth(gates, chosen)}
            for kind, labels in groups.items()
            for name in ORDER
            if (chosen := labels == name).any()
        ],
        "modes": {mode: _summary(gate, of_token, of_next) for mode, gate in gates.items()},
        "evaluated_on": environment(where),
    }


def _depth(gates: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, Any]:
    """Mean work in each router's block, over the chosen tokens."""
    return {mode: [float(w) for w in gate[:, chosen].mean(1)] for mode, gate in gates.items()}


def _summary(gate: np.ndarray, of_token: np.ndarray, of_next: np.ndarray) -> dict[str, Any]:
    depth, layers, known = gate.mean(0), gate.mean(1), ~np.isnan(of_token)
    total = float(gate.var())
    return {
        "per_router": [float(layer) for layer in layers],
        "spread_of_depth": float(depth.std()),
        "layer_share_of_variance": float(layers.var()) / total if total else None,
        "rank_correlation": {
            "surprisal of the token": rank_correlation(depth[known], of_token[known]),
            "surprisal of the next": rank_correlation(depth, of_next),
        },
    }


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's, with ties sharing their mean rank; None if one of the two is constant."""
    a, b = ranks(a), ranks(b)
    if not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


# --- groups: one label per token, empty if it is in none --------------------------------------------------------------


def _frequencies(text: np.ndarray, dataset: TextDataset) -> np.ndarray:
    shares = frequencies(text, dataset.split_ids("train"), dataset.tokenizer.vocab_size)
    return np.array(list(FREQUENCIES))[np.searchsorted(list(FREQUENCIES.values()), shares, side="right") - 1]


def _quarters(nats: np.ndarray) -> np.ndarray:
    known = ~np.isnan(nats)
    edges = np.quantile(nats[known], (0.25, 0.5, 0.75))
    labels = np.array(QUARTERS)[np.searchsorted(edges, nats, side="right").clip(max=3)]
    labels[~known] = ""
    return labels
