"""What a person sees while training: one live line in a terminal, a plain line per validation elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(stderr=True, highlight=False)


def loss_in_words(loss: float, bits_per_byte: float | None) -> str:
    """Nats per token and, of a text, bits per byte, by which different tokens compare."""
    return f"{loss:.4f}" + (f" ({bits_per_byte:.4f} bits per byte)" if bits_per_byte is not None else "")


class TrainingProgress:
    """Step, loss, active fraction, tokens per second and time left."""

    def __init__(self, title: str, steps: int, done: int, *, show: bool) -> None:
        self.title, self.show, self.live = title, show, show and console.is_terminal
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("step {task.completed}/{task.total}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.live,
        )
        self.task = self.bar.add_task(title, total=steps, completed=done, numbers="")
        self.steps = steps
        self.tokens_per_s = 0.0
        self._clock = time.perf_counter()

    def __enter__(self) -> "TrainingProgress":
        self.bar.start()
        if self.show and not self.live:
            console.print(f"{self.title}: training, {self.steps} steps", markup=False, soft_wrap=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def resume_clock(self) -> None:
        """Call after a pause that is not training, such as a validation."""
        self._clock = time.perf_counter()

    def step(self, step: int, tokens: int, loss: float, active_fraction: float) -> None:
        now = time.perf_counter()
        rate = tokens / max(now - self._clock, 1e-9)
        self._clock = now
        self.tokens_per_s = rate if not self.tokens_per_s else 0.95 * self.tokens_per_s + 0.05 * rate
        numbers = f"loss {loss:.3f}  active {active_fraction:.3f}  {self.tokens_per_s:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, numbers=numbers)

    def validation(self, step: int, row: dict[str, float]) -> None:
        """`row`: as metrics.jsonl has it."""
        if self.show and not self.live:
            loss = loss_in_words(row["val_loss"], row.get("val_bits_per_byte"))
            numbers = f"validation loss {loss}, active {row['val_active_fraction']:.3f}"
            numbers += f", {self.tokens_per_s:,.0f} tokens/s"
            console.print(f"{self.title}: step {step}/{self.steps}, {numbers}", markup=False, soft_wrap=True)
