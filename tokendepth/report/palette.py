"""Colours for all figures and pages: one for each method, and a calm pair for active and skipped tokens.

Any two methods can be distinguished with every kind of colour blindness (a test measures this). None is red or orange,
which are reserved for what is bad.
"""

from collections.abc import Sequence
from dataclasses import dataclass

INK = "#1c2733"
PAPER = "#ffffff"
ALARM = "#d5480a"
"""For bad results, such as a loss that was never reached."""

ACTIVE, SKIPPED = "#159a92", "#8c99a638"
"""Colours of tokens in a block. Skipping is a success, so skipped tokens get the quiet colour."""


@dataclass(frozen=True)
class Look:
    colour: str
    marker: str
    """Figures do not rely on colour alone."""
    on_dark: str
    """The colour on a dark page, where `colour` may be hard to see."""


LOOKS = {
    "dense": Look("#8c939b", "o", "#8c939b"),
    "tsa": Look("#b42c92", "s", "#c23aa0"),
    "budget": Look("#3a74d4", "o", "#3f7ce0"),
    "early_exit": Look("#225f4d", "^", "#dff9ef"),
    "mod": Look("#10acfa", "D", "#10acfa"),
    "mor": Look("#cba63a", "P", "#cba63a"),
    "act": Look("#103065", "X", "#b8ccec"),
    "itt": Look("#5a1b00", "v", "#fcc89f"),
    "switch": Look("#827525", "*", "#827525"),
    "span": Look("#000514", "p", "#57f002"),
    "random": Look(INK, "x", INK),  # the control for routed methods; INK becomes light on a dark page
}
UNKNOWN = Look("#a4b7a7", "h", "#a4b7a7")
"""For methods without an entry above."""
DASHES = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
MARKERS = ("^", "D", "v", "<", ">", "P", "X", "*")


def look(kind: str) -> Look:
    return LOOKS.get(kind, UNKNOWN)


@dataclass(frozen=True)
class RowLook:
    """How one row of a table is drawn: in its method's colour, with a marker and dash not used by another such row."""

    colour: str
    dash: str | tuple
    marker: str


def row_looks(kinds: Sequence[str]) -> list[RowLook]:
    """One look per row, given the rows' methods in order."""
    found: list[RowLook] = []
    for place, kind in enumerate(kinds):
        nth = list(kinds[:place]).count(kind)
        markers = [look(kind).marker, *(marker for marker in MARKERS if marker != look(kind).marker)]
        found.append(RowLook(look(kind).colour, DASHES[nth % len(DASHES)], markers[nth % len(markers)]))
    return found
