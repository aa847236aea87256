"""Streaming text up to a stop string, without ever showing a part of one."""

from collections.abc import Sequence

from tokendepth.data import TextStream, Tokenizer
from tokendepth.errors import UserError


class ShownText:
    """Converts tokens to text as they arrive. A possible beginning of a stop string is held back until it is none.

    The stop string that is complete first ends the text; if several end at the same place, the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if any(not string for string in stop):
            raise UserError("a stop string is empty; leave it out, or give at least one character")
        self._stream, self._stop, self._waiting = TextStream(tokenizer), tuple(stop), ""
        self._longest = max(map(len, stop), default=0)
        self.stopped = False

    def add(self, token: int) -> str:
        """The new text that can be shown after this token."""
        return self._shown(self._stream.add(token))

    def end(self) -> str:
        """The text still held back, unless a stop string ended the text."""
        if self.stopped:
            return ""
        last = self._shown(self._stream.end())
        return last if self.stopped else last + self._waiting

    def _shown(self, new: str) -> str:
        text = self._waiting + new
        found = [(at + len(string), at) for string in self._stop if (at := text.find(string)) >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)[1]]
        waiting = next((n for n in range(min(self._longest - 1, len(text)), 0, -1) if self._may_stop(text[-n:])), 0)
        self._waiting = text[len(text) - waiting :]
        return text[: len(text) - waiting]

    def _may_stop(self, tail: str) -> bool:
        return any(string.startswith(tail) for string in self._stop)
