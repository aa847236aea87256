"""Subword tokens with the `tokenizers` library: byte-level BPE trained on a corpus, or any tokenizer.json.

A corpus is encoded in segments, so that it never has to be in memory as a whole. Where a segment ends depends only on
the text, not on the pieces in which it was read, so the ids do not depend on those pieces either. A segment ends
between two words or two lines, where no token of a common tokenizer crosses. Each segment is encoded together with the
last characters of the one before, whose ids are then dropped. The ids are therefore those of the whole text encoded at
once, even for tokenizers that prepend a space to every input.
"""

import functools
import hashlib
import itertools
import json
import re
import types
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tokendepth.data.tokenizer import Tokenizer, check_ids, no_token, printable_bytes
from tokendepth.errors import UserError

SEGMENT = 1 << 15
"""Characters after which a segment ends at the next boundary."""
LONGEST_SEGMENT = 1 << 18
"""Characters after which a segment ends in any case: after its last complete line, or else right there."""
# Before the single space between two words, or between two lines, neither of them empty or indented. Next to a longer
# run of spaces a cut is not safe: how many tokenizers split such a run depends on what follows it.
BOUNDARY = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=\S\n)(?=\S)")
OVERLAP = 32  # characters of the previous segment
BATCH = 8  # segments that are encoded in parallel

TRAINING_BYTES = 50_000_000
DISTINCT_BYTES = 5_000_000

# Pre-tokens, which merges never cross: contractions, words, numbers of up to three digits, signs, line ends, spaces. A
# word includes the space before it. Every run is bounded, otherwise text without spaces would be one endless word. Not
# GPT-2's pattern, because here no match may depend on what follows a line end.
WORDS = (
    r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}\p{M}]{1,64}| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]{1,64}"
    r"|(?:\r?\n){1,16}|[^\S\n]{1,64}(?!\S)|\s{1,64}"
)

LARGEST_VOCABULARY = 10_000_000


def tokenizers_library() -> types.ModuleType:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "BPE tokens need the package tokenizers, not installed; pip install 'tokendepth[data]'"
        ) from None
    return tokenizers


def check_characters(text: str) -> None:
    if half := re.search("[\ud800-\udfff]", text):
        raise no_token(text, half.start(), "is half a surrogate pair, not a character; leave it out") from None


@dataclass(frozen=True)
class BPETokenizer(Tokenizer):
    """A Hugging Face tokenizer: usually BPE, but any kind that their library reads.

    Byte-level ones, such as those that `bpe:N` trains, decode to exactly the text that was encoded. Others may drop or
    change characters that they have no tokens for; the bytes of a corpus are therefore counted in its text.
    """

    text: str
    """The tokenizer.json."""
    kind: ClassVar[str] = "bpe"

    @classmethod
    def from_tree(cls, tree: object) -> "BPETokenizer":
        """From a parsed tokenizer.json. The UserError names only the fault; the caller adds the file and the remedy."""
        if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
            raise UserError("not a tokenizer.json of Hugging Face: it has no model")
        tokenizer = cls(json.dumps(tree, separators=(",", ":")))
        _ = tokenizer.vocab_size  # so that a bad tokenizer raises here
        return tokenizer

    @functools.cached_property
    def _library(self) -> Any:
        tree = json.loads(self.text)
        tree |= {"truncation": None, "padding": None}  # some files would truncate every text
        tree["model"] = {**tree["model"]}
        if "dropout" in tree["model"]:
            tree["model"]["dropout"] = None  # would make the ids random
        library = tokenizers_library()
        try:
            parsed = library.Tokenizer.from_str(json.dumps(tree))
        except BaseException as error:  # a panic in the Rust library is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(f"not a tokenizer.json of Hugging Face ({_line(error)})") from None
        parsed.encode_special_tokens = True  # "</s>" in a corpus is ordinary text
        return parsed

    @property
    def vocab_size(self) -> int:
        return len(self._spellings)

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    # -- text to ids

    def encode(self, text: str) -> list[int]:
        return self._encode_all([text])[0]

    def with_special_tokens(self, text: str) -> list[int]:
        """Like `encode`, with the special tokens that the file adds to every text, such as one for its beginning."""
        return self._library.encode(text, add_special_tokens=True).ids

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
        """Encode a long text given in pieces. Yields arrays of ids, each with the number of bytes that it encodes."""
        before = ""
        for batch in _batches(segments(pieces), BATCH):
            leads = [before, *(segment[-OVERLAP:] for segment in batch[:-1])]
            before = batch[-1][-OVERLAP:]
            together = self._encode_all([lead + segment for lead, segment in zip(leads, batch, strict=True)])
            for segment, ids, lead_ids in zip(batch, together, self._encode_all(leads), strict=True):
                if ids[: len(lead_ids)] != lead_ids:  # one of its tokens crosses the cut
                    ids, lead_ids = self.encode(segment), []
                yield np.array(ids[len(lead_ids) :], self.dtype), len(segment.encode())

    def _encode_all(self, batch: list[str]) -> list[list[int]]:
        try:
            found = self._library.encode_batch_fast(batch, add_special_tokens=False)
        except TypeError:
            for text in batch:
                check_characters(text)
            raise
        except Exception as error:
            raise UserError(
                f"the tokenizer cannot encode the text ({_line(error)}); choose another with --data.tokens"
            ) from error
        return [encoding.ids for encoding in found]

    # -- ids to text

    def decode(self, ids: Iterable[int]) -> str:
        ids = check_ids(ids, self.vocab_size)
        if '"ByteLevel"' in self._decoder:
            return b"".join(self._spellings[token] for token in ids).decode("utf-8", "replace")
        return self._library.decode(ids, skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        (token,) = check_ids([token], self.vocab_size)
        return self._spellings[token]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [printable_bytes(self.token_bytes(token)) or f"<{token}>" for token in map(int, ids)]

    @functools.cached_property
    def _spellings(self) -> tuple[bytes, ...]:
        """The bytes of each token; empty for ids that the file does not use."""
        added = self._library.get_added_tokens_decoder()
        vocabulary = {token: name for name, token in self._library.get_vocab(with_added_tokens=True).items()}
        size = 1 + max(vocabulary, default=-1)
        if not 1 <= size <= LARGEST_VOCABULARY:
            raise UserError(f"a tokenizer of {size} tokens; expected 1 to {LARGEST_VOCABULARY}")
        found = [b""] * size
        for token, name in vocabulary.items():
            found[token] = name.encode() if token in added else self._spelled(name)
        return tuple(found)

    def _spelled(self, name: str) -> bytes:
        if '"ByteLevel"' in self._decoder and all(char in BYTE_OF for char in name):
            return bytes(BYTE_OF[char] for char in name)
        if '"ByteFallback"' in self._decoder and (byte := re.fullmatch("<0x([0-9A-F]{2})>", name)):
            return bytes.fromhex(byte[1])
        if '"WordPiece"' in self._decoder:
            return (name[2:] if name.startswith("##") else " " + name).encode()
        if '"Metaspace"' in self._decoder or "▁" in self._decoder:
            name = name.replace("▁", " ")
        return name.encode()

    @functools.cached_property
    def _decoder(self) -> str:
        """The decoder section of the tree, which defines how tokens are joined, as JSON text."""
        return json.dumps(json.loads(self.text).get("decoder"), ensure_ascii=False)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "tokenizer": json.loads(self.text)}


def _byte_spellings() -> dict[str, int]:
    """How byte-level tokenizers spell bytes: printable ones as themselves, the others as U+0100 and up."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in prints)
    return {chr(byte): byte for byte in prints} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_spellings()


# --- training ---------------------------------------------------------------------------------------------------------


def train_bpe(pieces: Iterable[str], size: int) -> BPETokenizer:
    """Train a byte-level BPE with `size` tokens, or fewer if no other pair of tokens occurs twice.

    Deterministic: the library counts pairs and breaks ties by the order of the tokens. It reads the first 50 MB, or
    less once it has seen 5 MB of distinct words, since its memory grows with those: about ten bytes per byte of most
    texts. In text without spaces, such as Chinese, all words are distinct.
    """
    library = tokenizers_library()
    tokenizer = library.Tokenizer(library.models.BPE())
    pre = library.pre_tokenizers
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre.Sequence([pre.Split(library.Regex(WORDS), "isolated"), byte_level])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_enough(segments(pieces)), trainer)
    return BPETokenizer.from_tree(json.loads(tokenizer.to_str()))


def _enough(texts: Iterable[str]) -> Iterator[str]:
    """As many of the first `texts` as are enough for training."""
    seen = bytearray(1 << 24)  # one flag per word, by checksum; collisions hardly matter
    read = distinct = 0
    for text in texts:
        yield text
        read += len(text.encode())
        for word in {word.encode() for word in text.split()}:
            mark = zlib.crc32(word) >> 8
            if not seen[mark]:
                seen[mark] = 1
                distinct += len(word)
        if read >= TRAINING_BYTES or distinct >= DISTINCT_BYTES:
            return


# --- segments ---------------------------------------------------------------------------------------------------------


def segments(pieces: Iterable[str]) -> Iterator[str]:
    """Cut the text at places that depend only on its characters, not on how it is cut into pieces."""
    text = ""
    for piece in pieces:
        text += piece
        start = 0
        while end := _end(text, start):
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


def _end(text: str, start: int) -> int | None:
    """Where the segment that begins at `start` ends; None if more text is needed to decide."""
    limit = start + LONGEST_SEGMENT
    if found := BOUNDARY.search(text, start + SEGMENT, limit):
        return found.start()
    if len(text) < limit:
        return None
    return text.rfind("\n", start, limit) + 1 or limit


def _batches(items: Iterable[str], size: int) -> Iterator[list[str]]:
    items = iter(items)
    while batch := list(itertools.islice(items, size)):
        yield batch


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:80]
