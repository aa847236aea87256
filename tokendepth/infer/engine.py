"""The engine: continuous batching. Each request has a slot of one cache and advances by one token per step.

    engine = Engine(model, tokenizer, slots=8)
    request = engine.submit(tokenizer.encode("def "), Sampling(temperature=0.8), max_tokens=50)
    for token in engine.stream(request):
        print(token.text, end="")

A request that ends or is cancelled frees its slot for the next waiting request, which starts at the next step while the
others continue. A request's tokens do not depend on the other requests.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokendepth.cache import KVCache
from tokendepth.checks import check_range
from tokendepth.data import Tokenizer
from tokendepth.errors import UserError
from tokendepth.infer.capture import CapturedPass
from tokendepth.infer.requests import Found, Reason, Request, Token, columns_of, on_host
from tokendepth.infer.sampling import Sampler, Sampling, choose
from tokendepth.infer.stopping import ShownText
from tokendepth.model import LanguageModel
from tokendepth.ops.few_rows.eager import PackedMatrices
from tokendepth.runs.machine import memory_bytes
from tokendepth.trace import DepthTrace, Execution

MOST_TOKENS = 10**9


# --- one pass ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """Result of a forward pass over some slots."""

    logits: Tensor
    """`[slots, vocabulary]`"""
    trace: DepthTrace


def prefill(
    model: LanguageModel,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    execution: Execution,
    thresholds: Tensor | None = None,
) -> Pass:
    """Read one prompt into each slot of `cache`, all of them empty; shorter prompts are padded on the right.

    With a `fixed` cache the width is a power of two or the capacity, to keep the number of shapes small.
    """
    device, lengths = cache.lengths.device, [len(prompt) for prompt in prompts]
    longest = max(lengths)
    width = min(cache.capacity, 1 << (longest - 1).bit_length()) if cache.fixed else longest
    ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
    last = torch.tensor(lengths, device=device) - 1
    valid = None
    if min(lengths) < width:
        valid = torch.arange(width, device=device) <= last[:, None]
    if thresholds is not None:
        thresholds = thresholds.expand(-1, -1, width)
    out = model(ids, execution=execution, cache=cache, valid=valid, thresholds=thresholds, read=last)
    cache.bound(lengths)  # the pass had to assume that padding may count
    return Pass(out.logits[:, 0], out.trace)


def decode_one(
    model: LanguageModel,
    cache: KVCache,
    tokens: Tensor,
    execution: Execution,
    running: Tensor | None = None,
    thresholds: Tensor | None = None,
) -> Pass:
    """Read `tokens` `[slots]`, the last token of each slot of `cache`, and predict the next ones.

    running: `[slots]`, False for idle slots, whose token is ignored; None: all run.
    """
    valid = None if running is None else running[:, None]
    out = model(tokens[:, None], execution=execution, cache=cache, valid=valid, thresholds=thresholds)
    return Pass(out.logits[:, -1], out.trace)


# --- many requests ----------------------------------------------------------------------------------------------------


class Engine:
    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        slots: int = 8,
        execution: Execution = "sparse",
        fixed: bool | None = None,
        croppable: bool = False,
    ) -> None:
        """`slots` requests run at once; further ones wait in a queue.

        `fixed`: every decoding step covers all slots and all columns of the cache, so its shape never changes. This is
        the default on a GPU, where constant shapes are fastest; elsewhere only running requests are computed.
        `croppable`: see `KVCache`.
        """
        check_range("slots", slots, 1)
        like = model.embedding.weight
        self.model, self.tokenizer = model, tokenizer
        self.execution: Execution = execution
        self.fixed = like.is_cuda if fixed is None else fixed
        context = model.config.context
        self.cache = KVCache(
            model.config, slots, context, layers=model.method.cache_layers, like=like.detach(), fixed=self.fixed,
            croppable=croppable,
        )  # fmt: skip
        # One CUDA graph over all slots, if a step never synchronises with the host.
        self._captures = self.fixed and like.is_cuda and execution == "sparse" and model.can_be_captured
        self._captured = CapturedPass(self._decode_all, self.cache) if self._captures else None
        # A copy of the weights in the layout that products of few rows need, if there is enough memory.
        size = sum(weight.nbytes for weight in model.parameters())
        packs = not like.is_cuda and 4 * size <= memory_bytes(like.device)
        self._matrices = PackedMatrices(model.parameters() if packs else ())
        self._vocabulary = tokenizer.vocab_size  # the model's own may be padded to a larger size
        self._slots: list[Request | None] = [None] * slots
        self._waiting: deque[Request] = deque()

    # -- requests

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None, **options: Any) -> Request:
        """Prepare and enqueue a request; arguments as for `prepare`."""
        return self.enqueue(self.prepare(prompt, sampling, **options))

    def enqueue(self, request: Request) -> Request:
        """The request starts as soon as a slot is free."""
        self._waiting.append(request)
        return request

    def prepare(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        rolls: bool = False,
        thresholds: Sequence[float] | None = None,
    ) -> Request:
        """A checked request to continue `prompt` until `max_tokens`, a stop string or a stop token; not enqueued yet.

        Any thread may call this while another one steps. Without `max_tokens` a request ends when the context is full.
        rolls: when the context is full, restart from its second half, so that every token sees at least half a context
        and few are recomputed. thresholds: one per routed site, for this request only, such as a calibrated budget's.
        """
        sampling, ids = sampling or Sampling(), [int(token) for token in prompt]
        context, size = self.model.config.context, self._vocabulary
        if not ids:
            raise UserError("the prompt is empty; give at least one token")
        if len(ids) > context:
            raise UserError(f"the prompt has {len(ids)} tokens, but this model's context is {context}; give fewer")
        if wrong := [token for token in (*ids, *sampling.logit_bias, *stop_ids) if not 0 <= token < size]:
            raise UserError(f"token id {wrong[0]} is out of range; expected 0 to {size - 1}, this model's vocabulary")
        if max_tokens is None:
            max_tokens = MOST_TOKENS if rolls else context
        check_range("tokens", max_tokens, 1, MOST_TOKENS)
        assert thresholds is None or self.model.method.live_thresholds() is not None, "this method has none to set"
        device = self.cache.lengths.device
        return Request(
            tuple(ids), max_tokens, frozenset([*stop_ids, *self.tokenizer.stops]), rolls,
            None if thresholds is None else torch.tensor(thresholds, device=device),
            Sampler(sampling, ids, size, device), ShownText(self.tokenizer, stop), ids=ids,
        )  # fmt: skip

    def cancel(self, request: Request) -> None:
        """End the request now; no effect if it has already ended."""
        if request.reason is None:
            self._end(request, "cancelled")

    def stream(self, request: Request) -> Iterator[Token]:
        """Yield the request's tokens as they are generated; other requests advance, too."""
        given = 0
        while True:
            while given < len(request.tokens):
                given += 1
                yield request.tokens[given - 1]
            if request.reason is not None:
                return
            self.step()

    @property
    def running(self) -> list[Request]:
        return [request for request in self._slots if request is not None]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.running

    # -- a step

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Admit waiting requests, generate a token for every running one, and return the requests that advanced."""
        start = time.perf_counter()
        going_on = [n for n, request in enumerate(self._slots) if request and request.cached < self.cache.capacity]
        beginning = [n for n, request in enumerate(self._slots) if request and n not in going_on]
        self.cache.free(beginning)
        for slot in beginning:
            request = self._at(slot)
            request.cached = 0
        beginning += self._admit()
        found: list[Found] = []
        with self._matrices.used():
            if going_on:
                found += self._decode(going_on)
            if beginning:
                found += self._prefill(beginning)
        seconds = time.perf_counter() - start
        counts = Counter(each.request for each in found)
        for each in found:
            if each.request.reason is None:  # drafted tokens after a stop are dropped
                self._take(each, seconds / counts[each.request])
        return list(counts)

    def _admit(self) -> list[int]:
        """Move waiting requests into free slots; returns those slots."""
        admitted = []
        for slot, taken in enumerate(self._slots):
            if taken is None and self._waiting:
                self._slots[slot] = self._waiting.popleft()
                admitted.append(slot)
        return admitted

    def _prefill(self, slots: list[int]) -> list[Found]:
        requests = [self._at(slot) for slot in slots]
        half = max(1, self.cache.capacity // 2)
        prompts = [request.ids[-half:] if request.tokens else request.ids for request in requests]
        found = prefill(self.model, self.cache.of(slots), prompts, self.execution, self._thresholds(slots))
        return self._chosen(requests, found, range(len(slots)), [len(prompt) for prompt in prompts])

    def _decode(self, slots: list[int]) -> list[Found]:
        requests = [self._at(slot) for slot in slots]
        cache, rows, running = self._computed(slots)
        last = [0] * cache.batch
        for row, request in zip(rows, requests, strict=True):
            last[row] = request.ids[-1]
        thresholds = self._thresholds(self._everyone if cache is self.cache else slots)
        found = self._decoded(cache, torch.tensor(last, device=cache.lengths.device), running, thresholds)
        return self._chosen(requests, found, rows, [1] * len(slots))

    def _decoded(self, cache: KVCache, tokens: Tensor, running: Tensor | None, thresholds: Tensor | None) -> Pass:
        """As `decode_one`; the result of a captured pass is overwritten by the next one."""
        if self._captured is not None and cache is self.cache:
            return self._captured(tokens, running, thresholds)
        return decode_one(self.model, cache, tokens, self.execution, running, thresholds)

    def _decode_all(self, tokens: Tensor, running: Tensor | None, thresholds: Tensor | None) -> Pass:
        return decode_one(self.model, self.cache, tokens, self.execution, running, thresholds)

    def _computed(self, slots: list[int]) -> tuple[KVCache, list[int], Tensor | None]:
        """The cache for a pass over these slots, their rows in it, and a mask of running rows (None: all).

        A `fixed` engine computes all slots in every pass, others only the given ones.
        """
        if slots == self._everyone:
            return self.cache, slots, None
        if not self.fixed:
            return self.cache.of(slots), list(range(len(slots))), None
        running = torch.tensor([slot in slots for slot in self._everyone], device=self.cache.lengths.device)
        return self.cache, slots, running

    @property
    def _everyone(self) -> list[int]:
        return list(range(len(self._slots)))

    def _chosen(self, requests: list[Request], found: Pass, rows: Sequence[int], lengths: list[int]) -> list[Found]:
        """The next token of each request; `rows` are their rows in the pass, `lengths` their numbers of columns."""
        logits = found.logits if len(rows) == len(found.logits) else found.logits[list(rows)]
        choices = choose(logits[:, : self._vocabulary], [request.sampler for request in requests])
        trace = on_host(found.trace)
        columns = [columns_of(trace, row, 0, length) for row, length in zip(rows, lengths, strict=True)]
        return list(map(Found, requests, choices, columns))

    def _thresholds(self, slots: Sequence[int]) -> Tensor | None:
        """`[routed site, slots, 1]` if any request has its own thresholds; all other slots get the method's."""
        requests = [self._slots[slot] for slot in slots]
        if all(request is None or request.thresholds is None for request in requests):
            return None
        own = self.model.method.live_thresholds()
        assert own is not None
        columns = [own if request is None or request.thresholds is None else request.thresholds for request in requests]
        return torch.stack(columns, 1)[..., None]

    def _take(self, found: Found, seconds: float) -> None:
        request, choice = found.request, found.choice
        request.ids.append(choice.token)
        request.cached += found.trace.work.shape[2]
        full = request.cached == self.cache.capacity and not request.rolls
        text, reason = "", None
        if choice.token in request.stop_ids:
            reason = "stop"
        else:
            text = request.shown.add(choice.token)
            if request.shown.stopped:
                reason = "stop"
            elif len(request.tokens) + 1 == request.max_tokens or full:
                reason = "length"
        if reason is not None:
            text += request.shown.end()
        request.tokens.append(Token(choice, text, found.trace, seconds, found.extra_flops))
        if reason is not None:
            self._end(request, reason)

    def _end(self, request: Request, reason: Reason) -> None:
        request.reason = reason
        if request in self._slots:
            slot = self._slots.index(request)
            self._slots[slot] = None
            self.cache.free([slot])
        elif request in self._waiting:
            self._waiting.remove(request)

    def _at(self, slot: int) -> Request:
        request = self._slots[slot]
        assert request is not None
        return request
