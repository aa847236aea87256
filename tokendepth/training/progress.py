"""Training progress: one live line in a terminal; in a log plain lines, and one per validation."""

import contextlib
import time
from collections.abc import Iterator
from typing import Self

from tokendepth.progress import Progress, console


def loss_in_words(loss: float, bits_per_byte: float | None) -> str:
    """Nats per token and, for text, bits per byte, which can be compared across tokenizers."""
    return f"{loss:.4f}" + (f" ({bits_per_byte:.4f} bits per byte)" if bits_per_byte is not None else "")


class TrainingProgress(Progress):
    """Steps, loss, active fraction, tokens per second and time left."""

    def __init__(self, title: str, steps: int, done: int, *, show: bool) -> None:
        super().__init__(title, steps, unit="steps", done=done, show=show)
        self.steps = steps
        self.tokens_per_s = 0.0
        self._clock = time.perf_counter()

    def __enter__(self) -> Self:
        super().__enter__()
        if self.show and not self.live:
            console.print(f"{self.title}: training, {self.steps} steps", markup=False, soft_wrap=True)
        return self

    @contextlib.contextmanager
    def pause(self, doing: str) -> Iterator[None]:
        """Show `doing`; time spent inside does not count towards tokens per second."""
        numbers = self.note
        self.update(note=doing)
        yield
        self.update(note=numbers)
        self._clock = time.perf_counter()

    def step(self, step: int, tokens: int, loss: float, active_fraction: float) -> None:
        now = time.perf_counter()
        rate = tokens / max(now - self._clock, 1e-9)
        self._clock = now
        self.tokens_per_s = rate if not self.tokens_per_s else 0.95 * self.tokens_per_s + 0.05 * rate
        numbers = f"loss {loss:.3f}  active {active_fraction:.3f}  {self.tokens_per_s:,.0f} tokens/s"
        self.update(step, note=numbers)

    def validation(self, step: int, row: dict[str, float]) -> None:
        """`row` has the keys of a row in metrics.jsonl."""
        if self.show and not self.live:
            loss = loss_in_words(row["val_loss"], row.get("val_bits_per_byte"))
            numbers = f"validation loss {loss}, active {row['val_active_fraction']:.3f}"
            if self.tokens_per_s:  # 0 until the first step
                numbers += f", {self.tokens_per_s:,.0f} tokens/s"
            console.print(f"{self.title}: step {step}/{self.steps}, {numbers}", markup=False, soft_wrap=True)
