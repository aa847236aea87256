"""Generated text in a terminal, with every token on a shade that shows its depth."""

from rich.color import Color, ColorSystem
from rich.console import Console
from rich.style import Style

from tokendepth.report.palette import ACTIVE, INK, PAPER

STEPS = 4
"""Shades in addition to the lightest: quarters of the routed blocks."""


class Shades:
    """From paper for a token that skipped everything to the colour of active tokens for one that skipped nothing.

    Ink on a shade of its own is legible in light and dark terminals; shades differ in lightness, so that no kind of
    colour blindness makes two of them alike. Where stdout is no terminal, or one of few colours, or NO_COLOR is set,
    text stays plain.
    """

    def __init__(self) -> None:
        console = Console()
        enough = {"256": ColorSystem.EIGHT_BIT, "truecolor": ColorSystem.TRUECOLOR}
        self._system = None if console.no_color else enough.get(console.color_system or "")

    @property
    def on(self) -> bool:
        return self._system is not None

    def legend(self) -> str:
        shades = "".join(self.shaded(f" {100 * step // STEPS}% ", step / STEPS) for step in range(STEPS + 1))
        return f"depth: {shades} of the routed blocks processed the token"

    def shaded(self, text: str, depth: float) -> str:
        """`text` on the shade of `depth`, in [0, 1]; line ends stay outside, and nothing else steers the terminal."""
        if self._system is None:
            return text
        style = Style(color=INK, bgcolor=shade(depth))
        return "\n".join(style.render(_printable(line), color_system=self._system) for line in text.split("\n"))


def shade(depth: float) -> Color:
    share = round(depth * STEPS) / STEPS
    mixed = [round(a + (b - a) * share) for a, b in zip(_rgb(PAPER), _rgb(ACTIVE), strict=True)]
    return Color.from_rgb(*mixed)


def _rgb(colour: str) -> list[int]:
    return [int(colour[n : n + 2], 16) for n in (1, 3, 5)]


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)
