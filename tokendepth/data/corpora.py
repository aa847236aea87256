"""From a name to a dataset: stdlib, shakespeare, enwik8, text:PATH, copy and sort."""

import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from tokendepth.config import DEFAULT_SOURCE_LENGTH, DataConfig
from tokendepth.data.dataset import Dataset
from tokendepth.data.fetch import PUBLISHED, fetch
from tokendepth.data.store import load_tokens, save_tokens
from tokendepth.data.synthetic import SyntheticDataset
from tokendepth.data.text import TextDataset, build
from tokendepth.data.tokenizer import ByteTokenizer, SymbolTokenizer
from tokendepth.errors import UserError

STDLIB_BYTES = 1_000_000
# Installed packages, tests, and what reads like tables rather than like code.
NOT_STDLIB = {
    "__pycache__", "dist-packages", "encodings", "idlelib", "lib-dynload", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "turtledemo",
}  # fmt: skip


def load(config: DataConfig) -> Dataset:
    if config.synthetic:
        return SyntheticDataset(config.corpus, config.source_length or DEFAULT_SOURCE_LENGTH)
    if published := PUBLISHED.get(config.corpus):
        # The SHA-256 is known beforehand, so a cached corpus never needs its source.
        return _load_text(config, config.corpus, published.sha256, lambda: fetch(published), published.train_and_val)
    if config.corpus == "stdlib":
        content, label = stdlib_text(), "stdlib"
    else:
        content, label = _read_file(config.corpus), "text"
    return _load_text(config, label, hashlib.sha256(content).hexdigest(), lambda: content)


def _load_text(
    config: DataConfig,
    label: str,
    sha256: str,
    read: Callable[[], bytes],
    train_and_val: tuple[int, int] | None = None,
) -> TextDataset:
    # The label is part of the key: a copy of enwik8 read as text:PATH has the same SHA-256 but other splits.
    key = f"{label}-{config.tokens}-{sha256}"
    dataset = load_tokens(key, config.corpus)
    if dataset is None:
        dataset = build(config.corpus, sha256, read(), config.tokens, train_and_val)
        save_tokens(key, dataset)
    return dataset


def vocab_size(config: DataConfig) -> int:
    """The number of tokens; reads a file only where it depends on one."""
    if config.synthetic:
        return SymbolTokenizer().vocab_size
    if config.tokens == "byte":
        return ByteTokenizer().vocab_size
    if published := PUBLISHED.get(config.corpus):
        return published.char_vocabulary
    return load(config).tokenizer.vocab_size


# --- the standard library ---------------------------------------------------------------------------------------------


def stdlib_text() -> bytes:
    """The first megabyte or so of Python's own source, in whole ASCII files: the same for every copy of one version."""
    root = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in _stdlib_files(root):
        source = path.read_bytes().replace(b"\r\n", b"\n")  # Windows ships the same files with other line ends
        if source.isascii():
            parts.append(source)
            size += len(source)
        if size >= STDLIB_BYTES:
            break
    if not parts:
        raise UserError(f"data.corpus is 'stdlib', but {root} has no .py files; choose another --data.corpus")
    return b"".join(parts)


def _stdlib_files(root: Path) -> Iterator[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB and not name.startswith("config-")]
        for name in names:
            # sitecustomize and _sysconfigdata differ from machine to machine
            if name.endswith(".py") and not name.startswith(("sitecustomize", "_sysconfigdata")):
                found.append(Path(folder, name).relative_to(root))
    return (root / path for path in sorted(found, key=Path.as_posix))


# --- the user's own file ----------------------------------------------------------------------------------------------


def _read_file(corpus: str) -> bytes:
    path = Path(os.path.expanduser(corpus.removeprefix("text:")))  # a shell leaves ~ alone after text:
    said = f"data.corpus is {corpus!r}"
    try:
        mode = os.stat(path).st_mode
        # Anything but a regular file is not read: a pipe or a device might never end.
        content = path.read_bytes() if stat.S_ISREG(mode) else b""
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{said}: no such file; give the path of a text file as text:PATH") from None
    except OSError as error:
        raise UserError(f"{said}: cannot be read ({error.strerror}); make it readable or name another file") from error
    except ValueError as error:
        raise UserError(f"{said}: not a path ({error}); give the path of a text file as text:PATH") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{said}: a folder; name one file in it")
    if not stat.S_ISREG(mode):
        raise UserError(f"{said}: not a regular file; save the text as a file and name that")
    if not content:
        raise UserError(f"{said}: the file is empty; name a file with text in it")
    return content
