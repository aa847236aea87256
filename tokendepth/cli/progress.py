"""What a person sees while a command works on something that says nothing itself."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 4.0
"""Seconds from one sign of life to the next."""


@contextmanager
def working(words: str) -> Iterator[None]:
    """Say what is being done, and that it goes on, every few seconds until it is done."""
    began, done = time.perf_counter(), threading.Event()

    def remind() -> None:
        while not done.wait(EVERY):
            print(f"    still at it after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    print(f"{words} ...", file=sys.stderr, flush=True)
    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield
    finally:
        done.set()
        reminder.join()
