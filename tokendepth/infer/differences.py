"""Compare text generated with drafts to plain decoding: where they differ, can rounding explain it?"""

import copy
from dataclasses import dataclass

import numpy as np
import torch

from tokendepth.cache import KVCache
from tokendepth.infer.engine import Engine, decode_one, prefill
from tokendepth.infer.requests import Request
from tokendepth.infer.sampling import Sampler


@dataclass(frozen=True)
class Difference:
    """A greedily generated token for which plain decoding, given the same preceding text, has another."""

    position: int
    """Index among the generated tokens."""
    token: int
    expected: int
    gap: float
    """Difference between the two tokens' logits in plain decoding."""
    rounding: float
    """Largest error of the logits at this position, relative to float32 with the same decisions."""
    decisions: int
    """Router decisions up to this position that differ in plain decoding."""

    @property
    def explained(self) -> bool:
        """Whether rounding suffices: it can move both logits, or push a router's score across its threshold."""
        return self.gap <= 2 * self.rounding or self.decisions > 0


@torch.no_grad()
def greedy_differences(engine: Engine, request: Request) -> list[Difference]:
    """Where the text that `engine` generated at temperature 0 differs from plain decoding; in float32, nowhere.

    In lower precision, a pass over several tokens rounds differently from a pass over one. The text must have fitted
    into the context.
    """
    model, size = engine.model, engine.tokenizer.vocab_size
    prompt, written = list(request.prompt), [token.choice.token for token in request.tokens]
    ids = torch.tensor([[*prompt, *written]], device=model.norm.weight.device)
    thresholds = None if request.thresholds is None else request.thresholds[:, None, None]
    cache = KVCache(
        model.config, 1, model.config.context, layers=model.method.cache_layers, like=model.norm.weight.detach()
    )
    passes = [prefill(model, cache, [prompt], "sparse", thresholds)]
    for place in range(len(prompt), ids.shape[1] - 1):
        passes.append(decode_one(model, cache, ids[:, place], "sparse", None, thresholds))
    logits, work = torch.cat([each.logits for each in passes]), torch.cat([each.trace.work for each in passes], 2)
    routed = [number for number, site in enumerate(passes[0].trace.sites) if site.routed]
    forced = model.forcing(work[routed].bool()) if routed else {}
    exact = copy.deepcopy(model).float()(ids[:, :-1], execution="hard", **forced).logits[0, len(prompt) - 1 :]
    rounding = (logits.float() - exact).abs().amax(-1).tolist()
    own = np.concatenate([token.trace.work[:, 0] for token in request.tokens], 1)
    flips = (own != work[:, 0].float().cpu().numpy()).sum(0).cumsum()[len(prompt) - 1 :].tolist()

    sampler = Sampler(request.sampler.sampling, prompt, size, ids.device)
    differences = []
    for position, token in enumerate(written):
        adjusted = sampler.adjusted(logits[position, :size].float())
        sampler.note(token)
        expected = int(adjusted.argmax())
        if expected != token:
            gap = float(adjusted[expected] - adjusted[token])
            differences.append(Difference(position, token, expected, gap, rounding[position], flips[position]))
    return differences
