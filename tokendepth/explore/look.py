"""One text through one model: how deep every token goes, how surprising it is, and what was expected instead."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tokendepth.data import Tokenizer
from tokendepth.errors import UserError
from tokendepth.model import LanguageModel
from tokendepth.trace import DepthTrace, Execution, add_up

MOST_TOKENS = 4096
"""Of one text; more would neither be read nor answered at once."""
LIKELIEST = 5
"""Predictions that are shown for each token."""
AT_ONCE = 1024
"""Tokens of one pass, if that is more than one window: logits of a large vocabulary take memory."""


@torch.no_grad()
def look(
    model: LanguageModel,
    tokenizer: Tokenizer,
    text: str,
    execution: Execution,
    thresholds: Sequence[float] | None = None,
) -> dict[str, Any]:
    """A JSON-ready tree. A text longer than the context is read in windows of it, as in an evaluation.

    thresholds: of the routed sites, instead of the model's own.
    """
    ids = tokenizer.encode_prompt(text)
    if not text or not ids:
        raise UserError("there is no text; type at least one character")
    if len(ids) > MOST_TOKENS:
        raise UserError(f"the text has {len(ids):,} tokens; expected {MOST_TOKENS:,} at most; take a part of it")
    device, context = model.norm.weight.device, model.config.context
    column = None if thresholds is None else torch.tensor(thresholds, device=device)[:, None, None]
    traces: list[DepthTrace] = []
    expected: list[tuple[list[float], list[int], float]] = []
    start = time.perf_counter()
    for windows in _passes(ids, context):
        rows = torch.tensor(windows, device=device)
        own = {} if column is None else {"thresholds": column.expand(-1, len(rows), 1)}
        found = model(rows, execution=execution, **own)
        traces.append(found.trace)
        follow = ids[len(expected) + 1 : len(expected) + 1 + rows.numel()]
        expected += _expected(found.logits.flatten(0, 1)[:, : tokenizer.vocab_size], follow)
    seconds = time.perf_counter() - start
    work = torch.cat([trace.work.float().flatten(1) for trace in traces], dim=1).cpu()
    sites, totals = traces[0].sites, add_up([trace.totals() for trace in traces])
    losses = [loss for _, _, loss in expected[: len(ids) - 1]]
    return {
        "execution": execution,
        "ids": ids,
        "pieces": tokenizer.pieces(ids),
        "window": context,
        "sites": [{"name": site.name, "routed": site.routed, "blocks": site.blocks} for site in sites],
        "work": [[round(value, 3) for value in row] for row in work.tolist()],
        "surprisal": [None, *(round(loss, 3) for loss in losses)],
        # What was expected in the place of each token; of the last one, what may follow.
        "expected": [_shown(tokenizer, *each[:2]) for each in expected],
        "loss": sum(losses) / len(losses) if losses else None,
        "active_fraction": totals.active_fraction,
        # Only what ran sparse was skipped; soft and hard compute everything.
        "flops_skipped": totals.flops_skipped if execution == "sparse" else None,
        "seconds": round(seconds, 4),
    }


def _passes(ids: list[int], context: int) -> Iterator[list[list[int]]]:
    """Windows of equal length, some at a time; the last and shorter one is a pass of its own."""
    windows = [ids[n : n + context] for n in range(0, len(ids), context)]
    whole = windows if len(windows[-1]) == context else windows[:-1]
    step = max(1, AT_ONCE // context)
    yield from (whole[n : n + step] for n in range(0, len(whole), step))
    if len(whole) < len(windows):
        yield windows[-1:]


def _expected(logits: Tensor, follow: list[int]) -> list[tuple[list[float], list[int], float]]:
    """For each position the probabilities of the likeliest tokens, these tokens, and the surprisal of what follows.

    The last position of a text has no token after it; its surprisal is 0.
    """
    logs = logits.float().log_softmax(-1)
    top = logs.topk(min(LIKELIEST, logs.shape[-1]))
    after = torch.tensor(follow + [0] * (len(logs) - len(follow)), device=logs.device)
    losses = -logs.gather(1, after[:, None])[:, 0]
    losses[len(follow) :] = 0.0
    return list(zip(top.values.exp().tolist(), top.indices.tolist(), losses.tolist(), strict=True))


def _shown(tokenizer: Tokenizer, shares: list[float], tokens: list[int]) -> list[list[Any]]:
    return [[piece, round(share, 4)] for piece, share in zip(tokenizer.pieces(tokens), shares, strict=True)]
