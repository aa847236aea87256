"""Metrics in the Prometheus text format."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from tokendepth.infer.engine import Token


class Metrics:
    def __init__(self, slots: int) -> None:
        self.slots, self.running, self.waiting = slots, 0, 0
        self.started = time.time()
        self._lock = threading.Lock()
        self._answers: Counter[tuple[str, int]] = Counter()
        self._totals: defaultdict[str, float] = defaultdict(float)

    def count_answer(self, endpoint: str, status: int) -> None:
        with self._lock:
            self._answers[endpoint, status] += 1

    def count_dropped(self) -> None:
        with self._lock:
            self._totals["dropped"] += 1

    def count_step(self, written: Sequence[Sequence[Token]]) -> None:
        """Count a step of the engine; written: the new tokens of each request."""
        tokens = [token for each in written for token in each]
        depth = [token.trace.totals() for token in tokens]
        with self._lock:
            self._totals["steps"] += 1
            self._totals["step_seconds"] += max((sum(token.seconds for token in each) for each in written), default=0.0)
            self._totals["generated"] += len(tokens)
            self._totals["computed"] += sum(totals.tokens for totals in depth)
            extra = sum(token.extra_flops for token in tokens)
            self._totals["flops"] += sum(totals.flops for totals in depth) + extra
            self._totals["flops_dense"] += sum(totals.flops_dense for totals in depth)

    def text(self) -> str:
        with self._lock:
            answers, totals = sorted(self._answers.items()), self._totals.copy()
        lines = ["# HELP tokendepth_answers_total HTTP responses by endpoint and status code."]
        lines.append("# TYPE tokendepth_answers_total counter")
        lines += [f'tokendepth_answers_total{{endpoint="{e}",status="{s}"}} {n}' for (e, s), n in answers]
        for name, kind, words, value in (
            ("slots", "gauge", "Maximum number of requests running at once.", self.slots),
            ("running", "gauge", "Requests running.", self.running),
            ("waiting", "gauge", "Requests waiting for a slot.", self.waiting),
            ("dropped_total", "counter", "Requests cancelled because the client disconnected.", totals["dropped"]),
            ("steps_total", "counter", "Engine steps.", totals["steps"]),
            ("step_seconds_total", "counter", "Time spent in engine steps, in seconds.", totals["step_seconds"]),
            ("generated_tokens_total", "counter", "Tokens generated.", totals["generated"]),
            ("computed_tokens_total", "counter", "Positions computed, including prompts.", totals["computed"]),
            ("flops_total", "counter", "FLOPs executed, including routers.", totals["flops"]),
            ("flops_dense_total", "counter", "FLOPs with nothing skipped.", totals["flops_dense"]),
            ("start_time_seconds", "gauge", "Start time of the server, in seconds since the Unix epoch.", self.started),
        ):
            lines += [
                f"# HELP tokendepth_{name} {words}",
                f"# TYPE tokendepth_{name} {kind}",
                f"tokendepth_{name} {value}",
            ]
        return "\n".join(lines) + "\n"
