"""Run a text through a model: each token's depth and surprisal, and what the model predicted."""

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
"""Tokens per text; more would be too slow for an interactive page."""
LIKELIEST = 5
"""Predictions shown for each token."""
AT_ONCE = 1024
"""Tokens per forward pass (at least one window), since the logits of a large vocabulary take memory."""


@torch.no_grad()
def look(
    model: LanguageModel,
    tokenizer: Tokenizer,
    text: str,
    execution: Execution,
    thresholds: Sequence[float] | None = None,
) -> dict[str, Any]:
    """JSON-ready results. A text longer than the context is split into windows, as in an evaluation.

    thresholds: one per routed site, instead of the model's own.
    """
    ids = tokenizer.encode_prompt(text)
    if not text or not ids:
        raise UserError("the text is empty; type at least one character")
    if len(ids) > MOST_TOKENS:
        raise UserError(f"the text has {len(ids):,} tokens; expected at most {MOST_TOKENS:,}; use a part of it")
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
        # Entry t: predictions for token t + 1; the last one, for what may follow the text.
        "expected": [_shown(tokenizer, *each[:2]) for each in expected],
        "loss": sum(losses) / len(losses) if losses else None,
        "active_fraction": totals.active_fraction,
        # Only sparse execution skips; soft and hard compute everything.
        "flops_skipped": totals.flops_skipped if execution == "sparse" else None,
        "seconds": round(seconds, 4),
    }


def _passes(ids: list[int], context: int) -> Iterator[list[list[int]]]:
    """Batches of windows of equal length; a shorter last window is a batch of its own."""
    windows = [ids[n : n + context] for n in range(0, len(ids), context)]
    whole = windows if len(windows[-1]) == context else windows[:-1]
    step = max(1, AT_ONCE // context)
    yield from (whole[n : n + step] for n in range(0, len(whole), step))
    if len(whole) < len(windows):
        yield windows[-1:]


def _expected(logits: Tensor, follow: list[int]) -> list[tuple[list[float], list[int], float]]:
    """For each position: the highest probabilities, their tokens, and the surprisal of the token that follows.

    The last position of a text has no next token; its surprisal is 0.
    """
    logs = logits.float().log_softmax(-1)
    top = logs.topk(min(LIKELIEST, logs.shape[-1]))
    after = torch.tensor(follow + [0] * (len(logs) - len(follow)), device=logs.device)
    losses = -logs.gather(1, after[:, None])[:, 0]
    losses[len(follow) :] = 0.0
    return list(zip(top.values.exp().tolist(), top.indices.tolist(), losses.tolist(), strict=True))


def _shown(tokenizer: Tokenizer, shares: list[float], tokens: list[int]) -> list[list[Any]]:
    return [[piece, round(share, 4)] for piece, share in zip(tokenizer.pieces(tokens), shares, strict=True)]
