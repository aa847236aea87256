"""Signals that ask a training to stop."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """Turn the first SIGINT or SIGTERM into a request that the loop honours between steps; a SIGINT after it kills.

    Python runs a handler only between two of its own instructions, and a backward pass is one: so a thread of ours
    hears of signals as they come.
    """

    def __init__(self) -> None:
        self.received = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            hear, self.told = os.pipe()
            os.set_blocking(self.told, False)
            threading.Thread(target=self._kill_at_the_second, args=(hear,), daemon=True).start()
            self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
            self.told_before = signal.set_wakeup_fd(self.told, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.before:
            signal.set_wakeup_fd(self.told_before)
            os.close(self.told)  # which ends the thread

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def _kill_at_the_second(self, hear: int) -> None:
        asked = False
        while numbers := os.read(hear, 64):
            for number in numbers:
                if asked and number == signal.SIGINT:
                    os._exit(128 + number)
                asked = asked or number in (signal.SIGINT, signal.SIGTERM)
        os.close(hear)
