"""Colours, the same in every figure and on the page. Okabe and Ito's set survives colour blindness.

Their black and yellow are left out: one vanishes on a dark page, the other on a light one.
"""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", (0, (4, 1.5)), (0, (1, 1.2)))
LONE_MARKS = ("s", "D", "^")

INK = "#1c2733"
PAPER = "#ffffff"

HALTED, BETWEEN, ACTIVE = "#d9541e", "#f4f0e6", "#159a92"
"""The paper's red and green as vermillion and teal; black text is legible on every blend of them."""


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str | tuple[float, tuple[float, float]]:
    """Rows past the last colour begin again with another line."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def lone_mark(index: int) -> str:
    """The same for what has no line."""
    return LONE_MARKS[index // len(COLOURS) % len(LONE_MARKS)]


def _channels(hexadecimal: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(hexadecimal[1:]))


def blend(share: float) -> str:
    """The colour of a token that is active to this share: halted at 0, active at 1."""
    low, high = (HALTED, BETWEEN) if share < 0.5 else (BETWEEN, ACTIVE)
    weight = share * 2 % 1 if share < 1 else 1
    return "#" + bytes(round(a + (b - a) * weight) for a, b in zip(_channels(low), _channels(high), strict=True)).hex()
