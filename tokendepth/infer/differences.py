"""Whether a text that was written with drafts is that of plain decoding, and if not, whether rounding explains it."""

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
    """A token of a greedy text where plain decoding of the same text up to there would have written another."""

    position: int
    """Its number among the generated tokens."""
    token: int
    expected: int
    gap: float
    """Between the logits of the two tokens, in plain decoding."""
    rounding: float
    """How far logits there are off at most, against float32 on the same decisions."""
    decisions: int
    """Of routers, up to there, that plain decoding took otherwise."""

    @property
    def explained(self) -> bool:
        """Whether rounding is enough: it can move both logits, or a router's score across its threshold."""
        return self.gap <= 2 * self.rounding or self.decisions > 0


@torch.no_grad()
def greedy_differences(engine: Engine, request: Request) -> list[Difference]:
    """Where the text that `engine` wrote at temperature 0 differs from plain decoding; in float32 nowhere.

    In lower precision a pass over several tokens rounds otherwise than one over a single token does. The text must
    have fitted into the context.
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
