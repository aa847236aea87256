"""Loads a dataset by name: stdlib, shakespeare, enwik8, text:PATH, copy or sort."""

import contextlib
import functools
import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from tokendepth.config import DEFAULT_SOURCE_LENGTH, NO_CORPUS, OWN_TOKENS, DataConfig
from tokendepth.data.bpe import BPETokenizer, tokenizers_library
from tokendepth.data.build import Ends, TokenStream, bpe_stream, byte_stream, char_stream
from tokendepth.data.dataset import Dataset
from tokendepth.data.fetch import PUBLISHED, fetch
from tokendepth.data.source import Source, read_pieces
from tokendepth.data.store import keep_tokens, load_tokens
from tokendepth.data.synthetic import SyntheticDataset
from tokendepth.data.text import TextDataset
from tokendepth.data.tokenizer import ByteTokenizer, CharTokenizer, SymbolTokenizer, Tokenizer, tokenizer_from_dict
from tokendepth.errors import UserError
from tokendepth.runs.files import open_regular, read_bytes

LARGEST_CORPUS = 10**11  # bytes; anything larger is probably a disk image named by mistake
LARGEST_TOKENIZER = 10**8  # bytes; the largest in use have about a third of that
STDLIB_BYTES, STDLIB_PIECE = 1_000_000, 2048
# Installed packages, tests, and files that are tables rather than code.
NOT_STDLIB = {
    "__pycache__", "dist-packages", "encodings", "idlelib", "lib-dynload", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "turtledemo",
}  # fmt: skip


def load(config: DataConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """The corpus with the tokens of its config, or with those of an existing `tokenizer`."""
    if config.corpus == NO_CORPUS:
        raise UserError(f"data.corpus is {NO_CORPUS!r}: there is no text; name one with --data.corpus text:PATH")
    if config.synthetic:
        return SyntheticDataset(config.corpus, config.source_length or DEFAULT_SOURCE_LENGTH)
    if published := PUBLISHED.get(config.corpus):
        # The SHA-256 is known beforehand, so a corpus in the cache does not need its source.
        ends = published.train_and_val
        return _load_text(config, tokenizer, config.corpus, published.sha256, lambda: fetch(published), ends)
    if config.corpus == "stdlib":
        source, label = Source.of_bytes("stdlib", stdlib_text()), "stdlib"
    else:
        source, label = _text_file(config.corpus), "text"
    sha256 = source.sha256()
    return _load_text(config, tokenizer, label, sha256, lambda: source.expecting(sha256))


def _load_text(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    label: str,
    sha256: str,
    source: Callable[[], Source],
    train_and_val: Ends | None = None,
) -> TextDataset:
    tokens, stream = _tokens(config, tokenizer)
    # The label is part of the key, because a copy of enwik8 read as text:PATH has the same SHA-256 but other splits.
    key = f"{label}-{tokens}-{sha256}"
    dataset = load_tokens(key, config.corpus)
    if dataset is None:
        dataset = keep_tokens(key, stream(source(), sha256, train_and_val=train_and_val))
    return dataset


def _tokens(config: DataConfig, tokenizer: Tokenizer | None) -> tuple[str, Callable[..., TokenStream]]:
    """A part of the cache key that identifies the kind of tokens, and the function that makes them."""
    if config.tokens == "byte":
        return "byte", byte_stream
    if tokenizer is None and config.tokens == "char":
        return "char", char_stream
    if tokenizer is None and config.token_kind == "bpe":
        tokenizers_library()  # fails before anything is read
        return f"bpe-{config.bpe_size}", functools.partial(bpe_stream, bpe=config.bpe_size)
    own = tokenizer or read_tokenizer(config.tokens)
    if isinstance(own, CharTokenizer):
        alphabet = hashlib.sha256(own.chars.encode()).hexdigest()
        return f"char-{alphabet}", functools.partial(char_stream, tokenizer=own)
    assert isinstance(own, BPETokenizer)
    return f"tokenizer-{own.sha256}", functools.partial(bpe_stream, bpe=own)


def vocab_size(config: DataConfig) -> int:
    """The number of tokens; reads a file only if the answer depends on it."""
    if config.synthetic:
        return SymbolTokenizer().vocab_size
    if config.tokens == "byte":
        return ByteTokenizer().vocab_size
    if config.token_kind in ("tokenizer", OWN_TOKENS):
        return read_tokenizer(config.tokens).vocab_size
    if published := PUBLISHED.get(config.corpus):
        if config.tokens == "char":
            return published.char_vocabulary
        if config.bpe_size <= published.bpe_vocabulary:
            return config.bpe_size
    return load(config).tokenizer.vocab_size


# --- the standard library ---------------------------------------------------------------------------------------------


def stdlib_text() -> bytes:
    """About a megabyte of Python's own source, from whole ASCII files; the same for every copy of a Python version.

    Of every ten pieces of the files, eight come first, then the ninth ones, then the tenth ones: each split has text of
    every module. In the order of the files, validation text was that of other modules than training text, and a budget
    of 0.2 was 0.17 there.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in _stdlib_files(root):
        with _file_faults(f"data.corpus is 'stdlib' and {path} a part of it", "choose another --data.corpus"):
            source = read_bytes(path).replace(b"\r\n", b"\n")  # Windows ships the same files with CRLF
        if source.isascii():
            parts.append(source)
            size += len(source)
        if size >= STDLIB_BYTES:
            break
    if not parts:
        raise UserError(f"data.corpus is 'stdlib', but {root} has no .py files; choose another --data.corpus")
    pieces = list(_pieces(b"".join(parts)))
    train = (piece for number, piece in enumerate(pieces) if number % 10 < 8)
    return b"".join([*train, *pieces[8::10], *pieces[9::10]])


def _pieces(text: bytes) -> Iterator[bytes]:
    """Whole lines, at least STDLIB_PIECE bytes of them except in the last piece."""
    lines, size = [], 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= STDLIB_PIECE:
            yield b"".join(lines)
            lines, size = [], 0
    yield b"".join(lines)


def _stdlib_files(root: Path) -> Iterator[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB and not name.startswith("config-")]
        for name in names:
            # sitecustomize and _sysconfigdata differ between machines
            if name.endswith(".py") and not name.startswith(("sitecustomize", "_sysconfigdata")):
                found.append(Path(folder, name).relative_to(root))
    return (root / path for path in sorted(found, key=Path.as_posix))


# --- the user's own files ---------------------------------------------------------------------------------------------


def _text_file(corpus: str) -> Source:
    path = Path(os.path.expanduser(corpus.removeprefix("text:")))  # shells do not expand ~ after text:
    said, a_file = f"data.corpus is {corpus!r}", "give the path of a text file as text:PATH"
    size = _regular_file(path, said, a_file)

    def check(found: int) -> None:
        if found > LARGEST_CORPUS:
            raise UserError(f"{said}: more than {LARGEST_CORPUS // 10**9} GB; name a part of it, in a file of its own")

    def pieces() -> Generator[bytes, None, None]:
        found = 0
        with _file_faults(said, a_file), open_regular(path) as file:
            for piece in read_pieces(file, LARGEST_CORPUS + 1):
                found += len(piece)
                yield piece
        check(found)  # some system files are endless, whatever size they report
        if not found:
            raise UserError(f"{said}: the file is empty; name a file with text in it")

    check(size)
    return Source(corpus, size, pieces)


def read_tokenizer(tokens: str) -> BPETokenizer | CharTokenizer:
    """The tokenizer named by tokenizer:PATH, from Hugging Face or from a run."""
    if tokens == OWN_TOKENS:
        raise UserError(
            f"data.tokens is {OWN_TOKENS!r}: only a run folder of an imported model has a tokenizer of its own; "
            "give the path of a tokenizer.json with --data.tokens tokenizer:PATH"
        )
    path = Path(os.path.expanduser(tokens.removeprefix("tokenizer:")))
    said, a_file = f"data.tokens is {tokens!r}", "give the path of a tokenizer.json as tokenizer:PATH"
    size = _regular_file(path, said, a_file)
    if size > LARGEST_TOKENIZER:
        raise UserError(f"{said}: {size:,} bytes, too many for a tokenizer; {a_file}")
    with _file_faults(said, a_file):
        content = read_bytes(path, LARGEST_TOKENIZER)
    try:
        tree = json.loads(content)
        of_a_run = isinstance(tree, dict) and "kind" in tree
        if not of_a_run:
            tokenizers_library()
        tokenizer = tokenizer_from_dict(tree) if of_a_run else BPETokenizer.from_tree(tree)
        if not isinstance(tokenizer, BPETokenizer | CharTokenizer):
            raise UserError(f"it is of {tokenizer.kind} tokens, which need no file")
        return tokenizer
    except UserError as error:
        raise UserError(f"{said}: {error}; {a_file}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{said}: not JSON ({str(error)[:80]}); {a_file}") from None


def _regular_file(path: Path, said: str, remedy: str) -> int:
    """Its size. Anything but a regular file is rejected before it is read, since pipes and devices may never end."""
    with _file_faults(said, remedy, "" if path.is_absolute() else f" in {Path.cwd()}"):
        facts = os.stat(path)
    if stat.S_ISDIR(facts.st_mode):
        raise UserError(f"{said}: a folder; name one file in it")
    if not stat.S_ISREG(facts.st_mode):
        raise UserError(f"{said}: not a regular file; save its content as a file and name that")
    return facts.st_size


@contextlib.contextmanager
def _file_faults(said: str, remedy: str, where: str = "") -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{said}: no such file{where}; {remedy}") from None
    except OSError as error:
        raise UserError(f"{said}: cannot be read ({error.strerror}); make it readable or name another file") from error
    except ValueError as error:
        raise UserError(f"{said}: not a path ({error}); {remedy}") from None
