"""What a report reads from a run folder. It is read once, so that table, figures and page agree during training."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokendepth.config import NO_CORPUS, RunConfig
from tokendepth.errors import UserError
from tokendepth.runs.run import Run

MARKS = {"\n": "↵", " ": "·", "\t": "→"}
LINE_ENDS = ("\n", "↵")
"""A line end, and the mark by which tokenizers show one."""
BREAKS = (" ", "\t", *LINE_ENDS)
"""White space, which separates words."""


def printable(text: str) -> str:
    """`text` with a box for each character that cannot be drawn or encoded: control characters, lone surrogates."""
    return "".join(c if c.isprintable() else "▯" for c in text)


def visible(piece: str) -> str:
    """A token for display: marks stand for white space and for an empty token."""
    return printable("".join(MARKS.get(c, c) for c in piece)) or "∅"


def first_word(pieces: list[str]) -> int:
    """Index of the first token that certainly begins a word; 0 if there is no white space."""
    before = ""
    for t, piece in enumerate(pieces):
        parted = before.endswith(BREAKS) or piece.startswith(BREAKS)  # " word" is one token of a BPE
        if parted and piece.lstrip("".join(BREAKS))[:1].isalnum():
            return t
        before = piece
    return 0


def as_number(value: object) -> float | None:
    """`value` if it is a finite number, else None, which is shown as a dash."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


@dataclass(frozen=True)
class Passage:
    """A text with every router's decision for each token; None for a mode that the method does not have."""

    pieces: list[str]
    sites: list[str]
    soft: list[list[float]] | None
    hard: list[list[float]] | None
    surprisal: list[float | None]

    @classmethod
    def from_word(
        cls,
        pieces: list[str],
        sites: list[str],
        soft: list[list[float]] | None,
        hard: list[list[float]] | None,
        surprisal: list[float | None],
    ) -> "Passage":
        """The passage from its first whole word on, since a split may begin in the middle of a word."""
        first = first_word(pieces)
        soft, hard = (grid and [row[first:] for row in grid] for grid in (soft, hard))
        return cls(pieces[first:], sites, soft, hard, surprisal[first:])

    @property
    def modes(self) -> dict[str, list[list[float]]]:
        return {name: grid for name, grid in (("soft", self.soft), ("hard", self.hard)) if grid is not None}


@dataclass(frozen=True)
class Record:
    name: str
    path: Path
    config: RunConfig
    metrics: list[dict[str, Any]]
    evaluation: dict[str, Any]
    """Empty if the run was not evaluated."""
    env: dict[str, Any]
    finished: bool

    @classmethod
    def read(cls, run: Run) -> "Record":
        evaluation, env = run.evaluation or {}, run.env or {}
        return cls(printable(run.name), run.path, run.config, run.metrics(), evaluation, env, run.finished)

    @property
    def routed(self) -> bool:
        """Whether it has routers; assumed for a run that was not evaluated."""
        said = self.field("routed")
        return said if isinstance(said, bool) else self.number("router_parameters") != 0

    @property
    def has_soft(self) -> bool:
        """Whether soft differs from hard; assumed if an older evaluation does not record it."""
        return self.routed and self.field("has_soft") is not False

    @property
    def corpus(self) -> str:
        """The corpus and, unless they are characters, its tokens: losses over different tokens cannot be compared.

        A user's file is shown by its name, without folders.
        """
        data = self.config.data
        kind, _, rest = data.tokens.partition(":")
        rest = self.env.get("imported_from", rest) if self.imported else rest
        tokens = "" if kind == "char" else f" ({kind}{' ' + Path(rest).name if rest else ''})"
        name = data.corpus if data.corpus != NO_CORPUS else self.field("corpus") or "no text"
        return printable(Path(name.removeprefix("text:")).name + tokens)

    @property
    def imported(self) -> bool:
        """Whether it was imported, so that its training is not known here."""
        return "imported_from" in self.env

    @property
    def step(self) -> int:
        return self.metrics[-1]["step"] if self.metrics else 0

    def field(self, *keys: str) -> Any:
        """A nested field of the evaluation; None if any part of the path is missing."""
        value: Any = self.evaluation
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def number(self, *keys: str) -> float | None:
        return as_number(self.field(*keys))

    def needed(self, *keys: str) -> float:
        """Like `number`, for a field that must exist."""
        number = self.number(*keys)
        assert number is not None, f"{self.name} has no {'.'.join(keys)}"
        return number

    def numbers(self, *keys: str) -> list[float]:
        """A list of numbers; empty if any of them is missing."""
        values = self.field(*keys)
        values = [as_number(v) for v in values] if isinstance(values, list) else []
        return [] if None in values else [v for v in values if v is not None]

    @property
    def times_overlap(self) -> bool:
        """Whether the quartiles of dense and sparse times overlap, so that neither is clearly faster."""
        dense, sparse = (self.numbers("time", f"{mode}_ms") for mode in ("dense", "sparse"))
        return len(dense) == len(sparse) == 3 and sparse[1] <= dense[2] and dense[1] <= sparse[2]

    def curve(self, x: str, y: str) -> list[tuple[float, float]]:
        """Points from the metrics rows that have both values."""
        points = ((as_number(row.get(x)), as_number(row.get(y))) for row in self.metrics)
        return [(a, b) for a, b in points if a is not None and b is not None]

    @property
    def passage(self) -> Passage | None:
        tree = self.field("passage")
        if not isinstance(tree, dict) or not tree.get("sites") or not tree.get("pieces"):
            return None
        pieces, sites = [str(p) for p in tree["pieces"]], [printable(str(s)) for s in tree["sites"]]
        surprisal = tree.get("surprisal")
        if not isinstance(surprisal, list) or len(surprisal) != len(pieces):
            surprisal = [None] * len(pieces)
        soft, hard = (self._grid(tree.get(mode), mode, len(sites), len(pieces)) for mode in ("soft", "hard"))
        soft = soft if self.has_soft else None  # otherwise it repeats the decisions
        if not (soft or hard):
            return None
        return Passage.from_word(pieces, sites, soft, hard, [as_number(s) for s in surprisal])

    def _grid(self, grid: Any, mode: str, sites: int, tokens: int) -> list[list[float]] | None:
        if grid is None:
            return None
        try:
            fits = len(grid) == sites and all(len(row) == tokens and all(0 <= v <= 1 for v in row) for row in grid)
        except TypeError:
            fits = False
        if not fits:
            raise UserError(
                f"{self.path / 'eval.json'}: passage.{mode} is not {sites} rows of {tokens} numbers from 0 to 1; "
                f"repeat tokendepth evaluate {self.path}"
            )
        return grid
