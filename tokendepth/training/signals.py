"""Signals that ask training to stop."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

CRASHES = ("SIGABRT", "SIGBUS", "SIGEMT", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
"""Faults in the process itself, after which its state cannot be trusted."""
HARMLESS = (
    "SIGCHLD", "SIGCONT", "SIGINFO", "SIGKILL", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH",
)  # fmt: skip
"""Signals that do not end a process or cannot be caught. All others, real-time ones too, end it (`man 7 signal`)."""


def _numbers(*names: str) -> set[int]:
    return {getattr(signal, name) for name in names if hasattr(signal, name)}


def ending_signals() -> Collection[int]:
    """Signals that would end this process and can be caught.

    Excludes those that are ignored (SIGHUP by `nohup`, SIGPIPE and SIGXFSZ by Python) or handled, as by faulthandler.
    """
    ending = signal.valid_signals() - _numbers(*CRASHES, *HARMLESS) - _taken()
    # Shells start background jobs with these two ignored; one that is sent to the process directly is intentional.
    return {n for n in ending if signal.getsignal(n) is signal.SIG_DFL} | {signal.SIGINT, signal.SIGTERM}


def _taken() -> set[int]:
    """Signals that are ignored or caught. Python knows only its own handlers, Linux knows all."""
    masks = []
    with contextlib.suppress(OSError):
        masks = re.findall(r"^Sig(?:Ign|Cgt):\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {n for n in signal.valid_signals() if any(int(mask, 16) >> (n - 1) & 1 for mask in masks)}


class StopSignals:
    """Turn the first signal that would end the process into a request that the loop honours between steps.

    A second one from the keyboard (Ctrl-C, SIGQUIT) kills the process. Python runs handlers only between bytecode
    instructions, and a backward pass is a single one, so a thread receives signals as they arrive.
    """

    def __init__(self) -> None:
        self.received = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            hear, self.told = os.pipe()
            os.set_blocking(self.told, False)
            threading.Thread(target=self._kill_at_the_second, args=(hear,), daemon=True).start()
            self.before = {number: signal.signal(number, self._note) for number in ending_signals()}
            self.told_before = signal.set_wakeup_fd(self.told, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.before:
            signal.set_wakeup_fd(self.told_before)
            os.close(self.told)  # ends the thread

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def _kill_at_the_second(self, hear: int) -> None:
        asked = False
        while numbers := os.read(hear, 64):
            for number in numbers:
                if asked and number in _numbers("SIGINT", "SIGQUIT"):
                    os._exit(128 + number)
                asked = asked or number in self.before
        os.close(hear)
