"""What a model is trained and evaluated on: a corpus, and what one token is. Standard library only."""

import re
from dataclasses import dataclass

from tokendepth.checks import check, check_range, check_types, printable
from tokendepth.errors import UserError, did_you_mean

CORPORA = ("stdlib", "shakespeare", "enwik8", "copy", "sort")
SYNTHETIC_CORPORA = ("copy", "sort")
DEFAULT_SOURCE_LENGTH = 20
NO_CORPUS = "none"
OWN_TOKENS = "own"
TOKENS = ("char", "byte", "bpe:N", "tokenizer:PATH")
SMALLEST_BPE = 256  # the alphabet: one token for each byte
LARGEST_BPE = 1_000_000


@dataclass(frozen=True)
class DataConfig:
    corpus: str = "stdlib"
    """stdlib, shakespeare, enwik8, copy, sort, or text:PATH for any UTF-8 file; none for imports without one."""
    tokens: str = "char"
    """What one token is: char, byte (for any file), bpe:N (N tokens, trained on the corpus), tokenizer:PATH (a
    tokenizer.json), or own (the tokenizer in the run folder; imported models only)."""
    source_length: int | None = None
    """Length of the source sequence, for copy and sort only (default 20)."""

    def __post_init__(self) -> None:
        check_types(self, "data")
        if self.corpus == "text:":
            raise UserError(
                "data.corpus is 'text:'; expected a path after the colon; set it with --data.corpus text:PATH"
            )
        if not self.corpus.startswith("text:") and self.corpus not in (*CORPORA, NO_CORPUS):
            hint = did_you_mean(self.corpus, (*CORPORA, "text:PATH"))
            if any(sign in self.corpus for sign in "/\\."):
                hint = f"write 'text:{self.corpus}' for a file of your own"
            raise UserError(f"data.corpus is {self.corpus!r}: no such corpus; {hint} (set it with --data.corpus)")
        if self.source_length is not None:
            expected = "no value, since only copy and sort have a source length"
            check(self.synthetic, "data.source_length", self.source_length, expected)
            check_range("data.source_length", self.source_length, 3, 10_000)
        self._check_tokens()

    def _check_tokens(self) -> None:
        kind, colon, value = self.tokens.partition(":")
        if self.tokens not in ("char", "byte", OWN_TOKENS) and not (colon and kind in ("bpe", "tokenizer")):
            hint = did_you_mean(self.tokens, TOKENS)
            if self.tokens.endswith(".json"):
                hint = f"write 'tokenizer:{printable(self.tokens)}' for a tokenizer of your own"
            raise UserError(f"data.tokens is {self.tokens!r}: no such tokens; {hint} (set it with --data.tokens)")
        if kind == "bpe":
            digits = re.fullmatch("0|[1-9][0-9]*", value)
            check(digits is not None, "data.tokens", self.tokens, "a whole number after the colon, as in bpe:8192")
            size = int(value[:9])  # enough to tell; Python refuses to convert thousands of digits
            expected = f"{SMALLEST_BPE} tokens or more, since each of the {SMALLEST_BPE} bytes is a token"
            check(size >= SMALLEST_BPE, "data.tokens", self.tokens, expected)
            check(size <= LARGEST_BPE, "data.tokens", self.tokens, f"{LARGEST_BPE:,} tokens or fewer")
        if kind == "tokenizer" and not value:
            raise UserError(
                "data.tokens is 'tokenizer:'; expected a path after the colon; set it with --data.tokens tokenizer:PATH"
            )
        if self.synthetic:
            check(self.tokens == "char", "data.tokens", self.tokens, f"'char', since {self.corpus} has its own tokens")

    @property
    def synthetic(self) -> bool:
        return self.corpus in SYNTHETIC_CORPORA

    @property
    def token_kind(self) -> str:
        """char, byte, bpe, tokenizer or own."""
        return self.tokens.partition(":")[0]

    @property
    def bpe_size(self) -> int:
        """N of bpe:N."""
        assert self.token_kind == "bpe"
        return int(self.tokens.removeprefix("bpe:"))
