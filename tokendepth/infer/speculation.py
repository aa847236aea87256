"""Self-speculation: a model drafts tokens with most of its blocks skipped, and verifies them in one ordinary pass.

    engine = SpeculativeEngine(model, tokenizer, draft_thresholds(model, run), slots=1)

The draft is the same model with other thresholds, so there is no second set of weights, and it writes into the same
slots of the cache: before a draft is verified, each sequence is set back to where it was, and the verifying pass
overwrites what the draft has left. Every token that a request gets is the verifying pass's, with its depth and its
log-probabilities: at temperature 0 the tokens of plain decoding, else drawn from the same distribution, though not the
same tokens for the same seed. `drafting.py` has the rules and the arithmetic, docs/SPECULATION.md what to expect.
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
"""Of timing passes: tokens that are read first, drafted tokens that are verified, and how often."""
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
    """Of one request in one step: so many tokens to draft, and what they were drawn from."""

    def __init__(self, slot: int, request: Request, length: int) -> None:
        self.slot, self.request, self.length = slot, request, length
        self.sampler = request.sampler.imagined()
        self.odds: list[Tensor] = []
        self.rows: list[int] = []
        """The request's row in each drafting pass."""


class SpeculativeEngine(Engine):
    """An engine whose requests draft, each as many tokens as pay for it; a step writes one token or more."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, draft: Sequence[float], **options: Any) -> None:
        """draft: the thresholds of a draft, one for each routed site; options as of `Engine`."""
        super().__init__(model, tokenizer, croppable=True, **options)
        self._draft_thresholds = torch.tensor(list(draft), device=self.cache.lengths.device)[:, None, None]
        self._sites = model.method.sites(keys=0)
        self._width = min(self.cache.capacity, LONGEST + 1)
        self._captured_verifying = CapturedPass(self._verify_all, self.cache, self._width) if self._captures else None
        self.pace = Pace()
        """What costs are multiplied by; `take_pace` sets that of this machine."""

    def prepare(self, prompt: Sequence[int], sampling: Sampling | None = None, **options: Any) -> Request:
        request = super().prepare(prompt, sampling, **options)
        request.speculation = Speculation(self._sites, self.model.head_flops, self.pace)
        return request

    # -- what passes take here

    def take_pace(self, *, show: bool = False) -> None:
        """Let requests go by what passes take on this machine: measured at the first time, then remembered."""
        slots = len(self._slots) if self.fixed else 1  # of a fixed engine all slots are computed in every pass
        own, draft = self.model.method.thresholds, self._draft_thresholds.flatten().tolist()

        def measure() -> dict[str, Any]:
            with Progress("timing drafts, once for this machine", show=show):
                return self._measured_pace()

        found = remembered("drafting.json", self.model, [slots, self.execution, own, draft], measure, PACE)
        factors = tuple((int(length), factor) for length, factor in found["verify"])
        self.pace = Pace(found["draft"], factors, (tuple(found["draft_work"]), tuple(found["plain_work"])))

    @torch.no_grad()
    def _measured_pace(self) -> dict[str, Any]:
        """Of steps over the same text, which are set back after each; an engine that is idle stays so."""
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
        request.stop_ids = frozenset()  # it is to go on, whatever it writes
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
        """How many tokens the request drafts now: there has to be room for them and for one more."""
        assert request.speculation is not None
        room = min(self.cache.capacity - request.cached, request.max_tokens - len(request.tokens))
        return request.speculation.next_length(room - 1)

    def _drafted(self, drafts: list[_Draft]) -> tuple[Tensor, list[DepthTrace]]:
        """`[draft, longest + 1]`: the last token of each request, and those drafted after it, left on the device.

        And the trace of each drafting pass.
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
            # Copied, since a captured pass writes to the same place every time.
            traces.append(replace(found.trace, work=found.trace.work.clone()))
        return tokens, traces

    def _verified(self, drafts: list[_Draft], tokens: Tensor) -> tuple[Output, list[int]]:
        """One pass over `tokens` at the requests' own thresholds, and the row of each draft in it.

        In a `fixed` engine its width is always the same, and so it can be captured.
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
        """Each draft up to the first token that is rejected, and what comes instead of it or after the last one."""
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
        """Set each sequence back to what it held before this step, and `read` tokens more."""
        lengths = [draft.request.cached + count for draft, count in zip(drafts, read, strict=True)]
        self.cache.of([draft.slot for draft in drafts]).rewind(lengths)


def _work(traces: Sequence[DepthTrace]) -> np.ndarray:
    """`[site, token]`"""
    return np.concatenate([trace.work[:, 0] for trace in traces], 1)


def _rows(values: Tensor, rows: list[int]) -> Tensor:
    return values if rows == list(range(len(values))) else values[rows]


def _spread(values: Tensor, rows: list[int], count: int) -> Tensor:
    """`values` at these of `count` rows, zeros elsewhere."""
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
    """The engine of a run's model, which drafts where `speculate` is True or names the share of a draft."""
    if speculate is False:
        return Engine(model, tokenizer, slots=slots, execution=execution)
    if execution != "sparse":
        raise UserError(f"--speculate drafts by skipping, but execution is {execution!r}; expected sparse")
    draft = draft_thresholds(model, run, None if speculate is True else speculate, budget=budget, show=True)
    engine = SpeculativeEngine(model, tokenizer, draft, slots=slots)
    engine.take_pace(show=True)
    return engine


# --- what a draft is --------------------------------------------------------------------------------------------------


def draft_thresholds(
    model: LanguageModel,
    run: Run,
    share: float | None = None,
    *,
    budget: float | None = None,
    show: bool = False,
) -> list[float]:
    """Thresholds at which the model of `run` drafts for a verification at `budget`, by default the run's own.

    share: of the tokens that the routed blocks work on, where the method has such a budget; elsewhere of the routed
    blocks, the first of which work on every token, as in an early exit. At 0 all of them are skipped. None: the
    method's own choice.
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
    if method.one_decision:
        raise UserError(f"--speculate is {share:g}; expected auto or 0, since this {name} has one decision for all")
    works = max(1, round(share * sites))
    return [-math.inf] * works + [math.inf] * (sites - works)


def _calibrated(model: LanguageModel, run: Run, share: float, show: bool) -> list[float]:
    """As for any other budget; the model keeps its own thresholds."""
    own = model.method.thresholds
    try:
        calibrate.set_budget(model, run, share, show=show)
        return model.method.thresholds
    except UserError:  # its text is not here, or is another one by now
        remedy = f"tokendepth calibrate {run.path} --budget {share:g} --corpus text:PATH, or draft with --speculate 0"
        raise UserError(f"{run.path} has no thresholds for drafts at {share:g}; find them: {remedy}") from None
    finally:
        model.method.set_thresholds(own)
