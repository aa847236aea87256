"""Self-speculation: a model drafts tokens with most of its blocks skipped and verifies them in one ordinary pass.

    engine = SpeculativeEngine(model, tokenizer, draft_thresholds(model, run), slots=1)

The draft model is the same model with other thresholds, so there is no second set of weights. It writes into the same
slots of the cache; before a draft is verified, each sequence is rewound, and the verifying pass overwrites the draft's
entries. Every token comes from the verifying pass, with its depth and log-probabilities. At temperature 0 the tokens
are those of plain decoding; otherwise they are drawn from the same distribution, but the same seed gives other tokens.
The rules and the arithmetic are in `drafting.py`, results in docs/SPECULATION.md.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.config import method_name
from tokendepth.data import Tokenizer
from tokendepth.errors import UserError
from tokendepth.infer.capture import CapturedPass
from tokendepth.infer.drafting import LONGEST, Pace, Speculation, verdict
from tokendepth.infer.engine import Engine
from tokendepth.infer.profiles import remembered
from tokendepth.infer.requests import Found, Request, columns_of, on_host
from tokendepth.infer.sampling import Sampling, pick, with_logprobs
from tokendepth.measure import calibrate
from tokendepth.measure.clock import interleaved
from tokendepth.model import LanguageModel, Output
from tokendepth.progress import Progress
from tokendepth.runs.run import Run
from tokendepth.runs.shapes import POSITIVE, Kind, Object, is_number
from tokendepth.trace import DepthTrace, Execution

Result = TypeVar("Result")

PROMPT, TIMED, REPEATS = 64, (1, 4, LONGEST), 5
"""For timing: prompt tokens, numbers of drafted tokens to verify, and repetitions."""
FACTORS = Kind(
    "lengths and factors",
    lambda value: (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair)) for pair in value)
    ),
)
WORK = Kind("shares of sites", lambda value: isinstance(value, list) and all(map(is_number, value)))
PACE = Object(needed={"draft": POSITIVE, "verify": FACTORS, "draft_work": WORK, "plain_work": WORK})


class _Draft:
    """One request's draft in one step: how many tokens, and the distributions they are drawn from."""

    def __init__(self, slot: int, request: Request, length: int) -> None:
        self.slot, self.request, self.length = slot, request, length
        self.sampler = request.sampler.imagined()
        self.odds: list[Tensor] = []
        self.rows: list[int] = []
        """The request's row in each drafting pass."""


class SpeculativeEngine(Engine):
    """An engine whose requests draft as many tokens as pay off; a step generates one or more tokens per request."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, draft: Sequence[float], **options: Any) -> None:
        """draft: thresholds for drafting, one per routed site. options: as for `Engine`."""
        super().__init__(model, tokenizer, croppable=True, **options)
        self._draft_thresholds = torch.tensor(list(draft), device=self.cache.lengths.device)[:, None, None]
        self._sites = model.method.sites(keys=0)
        self._width = min(self.cache.capacity, LONGEST + 1)
        self._captured_verifying = CapturedPass(self._verify_all, self.cache, self._width) if self._captures else None
        self.pace = Pace()
        """Factors for the estimated costs; `take_pace` measures those of this machine."""

    def prepare(self, prompt: Sequence[int], sampling: Sampling | None = None, **options: Any) -> Request:
        request = super().prepare(prompt, sampling, **options)
        request.speculation = Speculation(self._sites, self.model.head_flops, self.pace)
        return request

    # -- timing

    def take_pace(self, *, show: bool = False) -> None:
        """Use measured pass times of this machine; they are measured once and stored."""
        slots = len(self._slots) if self.fixed else 1  # a fixed engine computes all slots in every pass
        own, draft = self.model.method.thresholds, self._draft_thresholds.flatten().tolist()

        def measure() -> dict[str, Any]:
            with Progress("timing drafts, once for this machine", show=show):
                return self._measured_pace()

        found = remembered("drafting.json", self.model, [slots, self.execution, own, draft], measure, PACE)
        factors = tuple((int(length), factor) for length, factor in found["verify"])
        self.pace = Pace(found["draft"], factors, (tuple(found["draft_work"]), tuple(found["plain_work"])))

    @torch.no_grad()
    def _measured_pace(self) -> dict[str, Any]:
        """Time steps at the same position, rewinding after each; the engine is idle before and after."""
        assert self.idle
        room = self.cache.capacity - 1
        lengths = [length for length in TIMED if length < room]
        if not lengths:
            everything = [1.0] * len(self._sites)
            return {"draft": 1.0, "verify": [[1, 1.0]], "draft_work": everything, "plain_work": everything}
        longest = lengths[-1]
        dice = torch.Generator().manual_seed(0)
        prompt = torch.randint(self._vocabulary, (min(PROMPT, room - longest),), generator=dice).tolist()
        request = self.submit(prompt, Sampling(0.0), max_tokens=room + 1)
        request.stop_ids = frozenset()  # it must not stop, whatever it generates
        self.step()
        slot = self._slots.index(request)

        def drafted(length: int) -> tuple[Tensor, list[DepthTrace]]:
            return self._drafted([_Draft(slot, request, length)])

        def verified(length: int) -> list[Found]:
            drafts, some = [_Draft(slot, request, length)], tokens[:, : length + 1]
            return self._kept(drafts, some, [], *self._verified(drafts, some))

        def plain() -> list[Found]:
            return super(SpeculativeEngine, self)._decode([slot])

        def set_back(step: Callable[..., Result], *given: int) -> Callable[[], Result]:
            def run() -> Result:
                found = step(*given)
                self._rewind([_Draft(slot, request, 0)], [0])
                return found

            return run

        try:
            tokens, (first, *_) = set_back(drafted, longest)()
            drafting = on_host(first)
            out, (row,) = set_back(lambda: self._verified([_Draft(slot, request, longest)], tokens))()
            work = _work([columns_of(on_host(out.trace), row, place, place + 1) for place in range(longest + 1)])
            steps = {"plain": set_back(plain), "draft": set_back(drafted, 1)}
            steps |= {str(length): set_back(verified, length) for length in lengths}
            with self._matrices.used():
                spent = interleaved(steps, REPEATS, self.cache.lengths.device)
        finally:
            self.cancel(request)
        works = {"plain": work[:, 0], "draft": _work([columns_of(drafting, row, 0, 1)])[:, 0]}
        works |= {str(length): work[:, : length + 1].max(1) for length in lengths}
        weights = Speculation(self._sites, self.model.head_flops).weights
        pace = {name: statistics.median(times) / weights(works[name]) for name, times in spent.items()}
        factors = [[length, pace[str(length)] / pace["plain"]] for length in lengths]
        shares = {"draft_work": works["draft"].tolist(), "plain_work": work.mean(1).tolist()}
        return {"draft": pace["draft"] / pace["plain"], "verify": factors, **shares}

    def _decode(self, slots: list[int]) -> list[Found]:
        requests = [self._at(slot) for slot in slots]
        drafts = [_Draft(slot, each, self._length(each)) for slot, each in zip(slots, requests, strict=True)]
        if not any(draft.length for draft in drafts):
            return super()._decode(slots)
        tokens, traces = self._drafted(drafts)
        self._rewind(drafts, [0] * len(drafts))
        return self._kept(drafts, tokens, traces, *self._verified(drafts, tokens))

    def _length(self, request: Request) -> int:
        """How many tokens the request drafts now; there must be room for one more."""
        assert request.speculation is not None
        room = min(self.cache.capacity - request.cached, request.max_tokens - len(request.tokens))
        return request.speculation.next_length(room - 1)

    def _drafted(self, drafts: list[_Draft]) -> tuple[Tensor, list[DepthTrace]]:
        """`[draft, longest + 1]`, on the device: each request's last token and the tokens drafted after it.

        Also returns the trace of each drafting pass.
        """
        longest, device = max(draft.length for draft in drafts), self.cache.lengths.device
        tokens = torch.tensor([[draft.request.ids[-1], *[0] * longest] for draft in drafts], device=device)
        traces = []
        for place in range(longest):
            going_on = [n for n, draft in enumerate(drafts) if draft.length > place]
            cache, rows, running = self._computed([drafts[n].slot for n in going_on])
            last = _spread(_rows(tokens[:, place], going_on), rows, cache.batch)
            thresholds = self._draft_thresholds.expand(-1, cache.batch, -1)
            found = self._decoded(cache, last, running, thresholds)
            logits = _rows(found.logits, rows)[:, : self._vocabulary]
            proposed, odds = pick(logits, [drafts[n].sampler for n in going_on])
            tokens[:, place + 1] = _spread(proposed, going_on, len(drafts))
            for number, (n, row) in enumerate(zip(going_on, rows, strict=True)):
                drafts[n].sampler.note(proposed[number : number + 1])
                drafts[n].rows.append(row)
                if odds is not None:
                    drafts[n].odds.append(odds[number])
            # Copied, since a captured pass overwrites its result every time.
            traces.append(replace(found.trace, work=found.trace.work.clone()))
        return tokens, traces

    def _verified(self, drafts: list[_Draft], tokens: Tensor) -> tuple[Output, list[int]]:
        """One pass over `tokens` with the requests' own thresholds, and the row of each draft in it.

        A `fixed` engine always uses the same width, so that the pass can be captured.
        """
        slots, device = [draft.slot for draft in drafts], tokens.device
        cache, rows, _ = self._computed(slots)
        width = self._width if self.fixed else tokens.shape[1]
        ids = _spread(F.pad(tokens, (0, width - tokens.shape[1])), rows, cache.batch)
        counts, valid = [draft.length + 1 for draft in drafts], None
        if self.fixed or min(counts) < width:
            there = _spread(torch.tensor(counts, device=device), rows, cache.batch)
            valid = torch.arange(width, device=device) < there[:, None]
        thresholds = self._thresholds(self._everyone if cache is self.cache else slots)
        if thresholds is not None:
            thresholds = thresholds.expand(-1, -1, width)
        if self._captured_verifying is not None:
            return self._captured_verifying(ids, valid, thresholds), rows
        return self.model(ids, execution=self.execution, cache=cache, valid=valid, thresholds=thresholds), rows

    def _verify_all(self, ids: Tensor, valid: Tensor | None, thresholds: Tensor | None) -> Output:
        return self.model(ids, execution=self.execution, cache=self.cache, valid=valid, thresholds=thresholds)

    def _kept(
        self, drafts: list[_Draft], tokens: Tensor, traces: list[DepthTrace], out: Output, rows: list[int]
    ) -> list[Found]:
        """Accept each draft up to its first rejected token; add the token that replaces it or follows the last one."""
        logits = [
            out.logits[row, : draft.length + 1, : self._vocabulary].float()
            for row, draft in zip(rows, drafts, strict=True)
        ]
        verdicts = [
            verdict(logits[n], tokens[n, 1 : draft.length + 1], draft.odds, draft.request.sampler)
            for n, draft in enumerate(drafts)
        ]
        known, drafted = torch.stack(verdicts).tolist(), tokens.tolist()
        trace, drafting = on_host(out.trace), [on_host(each) for each in traces]
        found: list[Found] = []
        for n, (draft, (accepted, after)) in enumerate(zip(drafts, known, strict=True)):
            request, chosen = draft.request, [*drafted[n][1 : accepted + 1], after]
            for token in chosen:
                request.sampler.note(token)
            choices = with_logprobs(logits[n][: accepted + 1], chosen, [request.sampler.sampling] * len(chosen))
            columns = [columns_of(trace, rows[n], place, place + 1) for place in range(draft.length + 1)]
            own = [columns_of(each, row, 0, 1) for each, row in zip(drafting, draft.rows, strict=False)]
            extra = sum(each.totals().flops for each in (*own, *columns[accepted + 1 :]))
            found.append(Found(request, choices[0], columns[0], extra))
            found += map(Found, [request] * accepted, choices[1:], columns[1:])
            if own and request.speculation is not None:
                request.speculation.record(accepted, _work(own), _work(columns))
        self._rewind(drafts, [accepted + 1 for accepted, _ in known])
        return found

    def _rewind(self, drafts: list[_Draft], read: list[int]) -> None:
        """Rewind each sequence to its length before this step plus `read` tokens."""
        lengths = [draft.request.cached + count for draft, count in zip(drafts, read, strict=True)]
        self.cache.of([draft.slot for draft in drafts]).rewind(lengths)


def _work(traces: Sequence[DepthTrace]) -> np.ndarray:
    """Work of single-token traces: `[site, token]`."""
    return np.concatenate([trace.work[:, 0] for trace in traces], 1)


def _rows(values: Tensor, rows: list[int]) -> Tensor:
    return values if rows == list(range(len(values))) else values[rows]


def _spread(values: Tensor, rows: list[int], count: int) -> Tensor:
    """Scatter `values` into these of `count` rows; the others are zero."""
    if rows == list(range(count)):
        return values
    spread = values.new_zeros((count, *values.shape[1:]))
    spread[rows] = values
    return spread


def engine_for(
    model: LanguageModel,
    tokenizer: Tokenizer,
    run: Run,
    speculate: bool | float,
    *,
    budget: float | None = None,
    execution: Execution = "sparse",
    slots: int,
) -> Engine:
    """An engine for a run's model; it drafts if `speculate` is True or the share of a draft."""
    if speculate is False:
        return Engine(model, tokenizer, slots=slots, execution=execution)
    if execution != "sparse":
        raise UserError(f"--speculate drafts by skipping, but execution is {execution!r}; expected sparse")
    draft = draft_thresholds(model, run, None if speculate is True else speculate, budget=budget, show=True)
    engine = SpeculativeEngine(model, tokenizer, draft, slots=slots)
    engine.take_pace(show=True)
    return engine


# --- draft thresholds -------------------------------------------------------------------------------------------------


def draft_thresholds(
    model: LanguageModel,
    run: Run,
    share: float | None = None,
    *,
    budget: float | None = None,
    show: bool = False,
) -> list[float]:
    """Thresholds with which the model of `run` drafts for verification at `budget` (default: the run's own).

    share: if the method has a calibrated budget, the share of tokens that the routed blocks process; otherwise the
    share of routed blocks that run, which are the first ones, as in an early exit. 0 skips all routed blocks. None:
    the method's default.
    """
    method, dial = model.method, model.method.dial(model.config, model.method.config)
    sites, name = sum(site.routed for site in method.sites(keys=1)), method_name(run.config.method)
    if not sites or not method.decides_by_threshold:
        raise UserError(f"{run.path} is of method {name}, which has no cheaper pass to draft with; drop --speculate")
    calibrated = dial is not None and dial.calibrated
    full = (budget or dial.own) if dial is not None and calibrated else 1.0
    if share is None:
        share = method.draft_share if method.draft_share < full else 0.0
    if not 0 <= share < full:
        raise UserError(f"--speculate is {share:g}; expected auto, or a number from 0 to below {full:g}, the budget")
    if not share:
        return [math.inf] * sites
    if calibrated:
        return _calibrated(model, run, share, show)
    together = method.sites_per_decision
    if together == sites:
        raise UserError(f"--speculate is {share:g}; expected auto or 0, since this {name} has one decision for all")
    works = together * max(1, round(share * sites / together))
    return [-math.inf] * works + [math.inf] * (sites - works)


def _calibrated(model: LanguageModel, run: Run, share: float, show: bool) -> list[float]:
    """Thresholds calibrated for `share`, without changing the model's own."""
    own = model.method.thresholds
    try:
        calibrate.set_budget(model, run, share, show=show)
        return model.method.thresholds
    except UserError:  # the training text is missing or has changed
        remedy = f"tokendepth calibrate {run.path} --budget {share:g} --corpus text:PATH, or draft with --speculate 0"
        raise UserError(f"{run.path} has no thresholds for drafts at {share:g}; find them: {remedy}") from None
    finally:
        model.method.set_thresholds(own)
