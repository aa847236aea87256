"""A run on the page: its server, and the depth of texts at every budget or threshold of its dial."""

import contextlib
import copy
import threading
from collections.abc import Sequence
from typing import Any

from tokendepth.config import method_name
from tokendepth.data.of_run import dataset_of
from tokendepth.errors import UserError
from tokendepth.explore.look import look
from tokendepth.measure import calibrate
from tokendepth.methods import dial_of
from tokendepth.model import Block
from tokendepth.runs.run import Run
from tokendepth.serve.service import Limits, Service
from tokendepth.trace import EXECUTIONS, Execution

LIMITS = Limits(slots=2, queue=4)
SAMPLES = (
    "Every word of a sentence is easy or hard to foresee, and some need more thought than others.\n",
    "<bos>4a7<sep>4a7<eos>",
)
"""Initial text: the first of these that the run's tokenizer can encode."""


class _Stopped(Exception):
    """Raised to end a calibration when the server stops."""


class Explored:
    def __init__(self, run: Run, device: str) -> None:
        self.run, self.dial = run, dial_of(run.config)
        self.service = Service.of(run, device, LIMITS)
        self._own = self.service.engine.model
        # A dial without per-request thresholds changes the model itself, so it gets a copy of the model that generates.
        shared = self.dial is None or self.dial.calibrated
        self._looking = self._own if shared else copy.deepcopy(self._own)
        self._one_at_a_time = threading.Lock()
        self._stopping = threading.Event()
        self.missing: str | None = None
        """Why no further budgets are available; None if they are, or are being calibrated."""
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self.service.name

    def start(self) -> None:
        """Start calibrating the budgets that have no thresholds yet, those near the run's own first."""
        if self.dial is not None and self.dial.calibrated:
            self._thread = threading.Thread(target=self._calibrate, name="calibration", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self.service.worker.stop()
        if self._thread is not None:
            self._thread.join()

    def look(self, text: str, execution: Execution, point: float | None) -> dict[str, Any]:
        """point: a value of the dial, one of `points`; None for the run's own."""
        model, thresholds = self._looking, None
        with self._one_at_a_time:
            if self.dial is not None and self.dial.calibrated:
                thresholds = None if point is None else self.service.budgets[point]
            elif self.dial is not None:
                model.method.set_point(self.dial.own if point is None else point)
            return look(model, self.service.engine.tokenizer, text, execution, thresholds)

    @property
    def executions(self) -> list[Execution]:
        return [name for name in EXECUTIONS if name != "soft" or self._own.method.has_soft]

    @property
    def points(self) -> list[float]:
        """Values of the dial that are available now."""
        if self.dial is None:
            return []
        return sorted(self.service.budgets if self.dial.calibrated else {*self.dial.points, self.dial.own})

    @property
    def facts(self) -> dict[str, Any]:
        """What the page needs before it sends a text."""
        config, method = self.run.config, self._own.method
        return {
            "name": self.name,
            "method": method_name(config.method),
            "executions": self.executions,
            "routed": any(site.routed for site in method.sites(keys=1)),
            "context": config.model.context,
            "sample": self._sample(),
            "dial": None
            if self.dial is None
            else {
                "name": self.dial.name,
                "own": self.dial.own,
                "points": self.points,
                "coming": self._coming(),
                "writes": self.dial.calibrated,
                "missing": self.missing,
            },
        }

    def _sample(self) -> str:
        tokenizer = self.service.engine.tokenizer
        for text in SAMPLES:
            with contextlib.suppress(UserError):
                tokenizer.encode(text)
                return text
        return tokenizer.decode([0, 1, 2])

    def _coming(self) -> int:
        """How many points are still to be calibrated."""
        found = self._thread is None or not self._thread.is_alive()
        return 0 if found or self.dial is None else len(self._wanted(self.dial.points))

    def _wanted(self, points: Sequence[float]) -> list[float]:
        return [point for point in points if point not in self.service.budgets]

    def _calibrate(self) -> None:
        dial = self.dial
        assert dial is not None
        try:
            dataset, model = dataset_of(self.run), copy.deepcopy(self._own)
            for block in (module for module in model.modules() if isinstance(module, Block)):
                block.register_forward_pre_hook(self._check_stop)
            for point in sorted(self._wanted(dial.points), key=lambda value: abs(value - dial.own)):
                calibrate.calibrate(model, dataset, point, roughly=True)
                self.service.budgets = {**self.service.budgets, point: model.method.thresholds}
        except UserError as error:
            self.missing = str(error)
        except _Stopped:
            pass

    def _check_stop(self, *_: object) -> None:
        """Runs before every block: calibrating a large model takes a minute, stopping it should not."""
        if self._stopping.is_set():
            raise _Stopped
