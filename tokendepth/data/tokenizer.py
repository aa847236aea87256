"""Text to token ids and back: characters, bytes, or the symbols of copy and sort. BPE is in bpe.py."""

import codecs
import functools
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tokendepth.errors import UserError, did_you_mean

PAD, BOS, SEP, EOS = range(4)
SPECIALS = ("<pad>", "<bos>", "<sep>", "<eos>")
SYMBOLS = "0123456789abcdefghijklmnopqr"  # in ASCII order, so that sorted ids read as sorted text

NEWLINE_PIECE = "↵"


class Tokenizer(ABC):
    kind: ClassVar[str]
    begins: tuple[int, ...] = ()
    """Ids that begin every text, such as the beginning-of-text token of some imported models."""
    stops: tuple[int, ...] = ()
    """Ids that end a generated text."""
    chat_template: str | None = None
    """Jinja template that turns a conversation into one text; None if the model is not a chat model."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integers that hold the vocabulary."""
        return np.min_scalar_type(self.vocab_size - 1)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`; a UserError names the first character without a token."""

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text for a model to continue."""
        return self.encode(text)

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str: ...

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that one token adds to a text; in some tokenizers only a part of a character."""

    def spellings(self) -> list[bytes]:
        """`token_bytes` of every token."""
        return [self.token_bytes(token) for token in range(self.vocab_size)]

    @abstractmethod
    def pieces(self, ids: Iterable[int]) -> list[str]:
        """One printable string per token, for heat maps."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable tree that `tokenizer_from_dict` turns back into an equal tokenizer."""
        return {"kind": self.kind}


class TextStream:
    """Decode tokens one at a time. Bytes of an incomplete character wait for the next token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._utf8.decode(self.tokenizer.token_bytes(token))

    def end(self) -> str:
        """The rest: a replacement character if the last character is incomplete, else nothing."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True)
class CharTokenizer(Tokenizer):
    """One token per character; `chars` are in ascending order and the index of each is its id."""

    chars: str
    kind: ClassVar[str] = "char"

    @property
    def vocab_size(self) -> int:
        return len(self.chars)

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {char: index for index, char in enumerate(self.chars)}

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[char] for char in text]
        except KeyError as missing:
            remedy = f"is not among the corpus's {self.vocab_size}; leave it out, or train with --data.tokens byte"
            raise no_token(text, text.index(missing.args[0]), remedy) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(_spell(self.chars, ids))

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [_printable(char) for char in _spell(self.chars, ids)]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "chars": self.chars}


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8."""

    kind: ClassVar[str] = "byte"

    @property
    def vocab_size(self) -> int:
        return 256

    def encode(self, text: str) -> list[int]:
        try:
            # Command-line bytes that are not UTF-8 arrive as lone surrogates; this turns them back into the bytes.
            return list(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError as error:
            raise no_token(text, error.start, "is half a surrogate pair, not a character; leave it out") from None

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(map(int, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [_printable(chr(i)) if i < 128 else f"\\x{i:02x}" for i in bytes(map(int, ids))]


@dataclass(frozen=True)
class SymbolTokenizer(Tokenizer):
    """Four special tokens, written like `<bos>` in text, and the 28 symbols of copy and sort."""

    kind: ClassVar[str] = "symbol"
    _spellings: ClassVar[tuple[str, ...]] = (*SPECIALS, *SYMBOLS)
    _token: ClassVar[re.Pattern[str]] = re.compile("|".join((*SPECIALS, f"[{SYMBOLS}]")))

    @property
    def vocab_size(self) -> int:
        return len(self._spellings)

    def encode(self, text: str) -> list[int]:
        ids, position = [], 0
        while position < len(text):
            token = self._token.match(text, position)
            if token is None:
                remedy = f"is not a symbol; expected 0-9, a-r or one of {' '.join(SPECIALS)}; leave it out"
                raise no_token(text, position, remedy)
            ids.append(self._spellings.index(token[0]))
            position = token.end()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(_spell(self._spellings, ids))

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return _spell(self._spellings, ids)


_KEYS = {
    "char": ["chars", "kind"],
    "byte": ["kind"],
    "symbol": ["kind"],
    "bpe": ["kind", "tokenizer"],
    "imported": ["begins", "chat_template", "kind", "stops", "tokenizer"],
}


def tokenizer_from_dict(tree: object) -> Tokenizer:
    """Inverse of `to_dict`. Strict: the kind must be known, and exactly its keys present."""
    if not isinstance(tree, dict):
        raise UserError(f"a tokenizer must be a JSON object, not {type(tree).__name__}; restore it from a copy")
    kind = tree.get("kind")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UserError(f"tokenizer.kind is {kind!r:.40}: no such tokenizer; {did_you_mean(str(kind), _KEYS)}")
    if sorted(map(str, tree)) != _KEYS[kind]:
        raise UserError(f"a {kind} tokenizer must have the keys {_KEYS[kind]}, not {list(tree)!r:.60}; restore a copy")
    if kind == "char":
        return CharTokenizer(_checked_chars(tree["chars"]))
    if kind in ("bpe", "imported"):
        from tokendepth.data.bpe import BPETokenizer, tokenizers_library
        from tokendepth.data.imported import ImportedTokenizer

        tokenizers_library()  # if it is missing, no copy helps
        try:
            return BPETokenizer.from_tree(tree["tokenizer"]) if kind == "bpe" else ImportedTokenizer.from_dict(tree)
        except UserError as error:
            raise UserError(f"the tokenizer is damaged: {error}; restore a copy") from None
    return ByteTokenizer() if kind == "byte" else SymbolTokenizer()


def _checked_chars(chars: object) -> str:
    if not isinstance(chars, str) or not chars:
        raise UserError(f"tokenizer.chars is {chars!r:.40}; expected text of at least one character; restore a copy")
    for before, char in itertools.pairwise(chars):
        if before >= char:
            raise UserError(f"tokenizer.chars has {char!r} after {before!r}; expected ascending order; restore a copy")
    if any("\ud800" <= char <= "\udfff" for char in chars):
        raise UserError("tokenizer.chars has half of a surrogate pair; expected whole characters; restore a copy")
    return chars


def check_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    ids = [int(i) for i in ids]
    assert all(0 <= i < vocab_size for i in ids), f"ids outside the vocabulary of {vocab_size}"
    return ids


def _spell(spellings: Sequence[str], ids: Iterable[int]) -> list[str]:
    return [spellings[i] for i in check_ids(ids, len(spellings))]


def _printable(char: str) -> str:
    if char == "\n":
        return NEWLINE_PIECE
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def printable_bytes(spelling: bytes) -> str:
    """Printable text; bytes that are not a whole character are shown as hexadecimal: \\xe2."""
    return "".join(map(_printable, spelling.decode("utf-8", "backslashreplace")))


def no_token(text: str, position: int, remedy: str) -> UserError:
    return UserError(f"the character {text[position]!r} at position {position} of the text {remedy}")
