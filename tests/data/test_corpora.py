import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from tokendepth.config import DataConfig
from tokendepth.data import corpora, load, vocab_size
from tokendepth.errors import UserError, one_line
from tokendepth.runs import files

# --- the standard library ---------------------------------------------------------------------------------------------


def test_stdlib_is_two_megabytes_of_ascii_code_and_always_the_same():
    text = corpora.stdlib_text()
    assert text.isascii()
    assert 1_000_000 <= len(text) < 1_500_000
    assert text == corpora.stdlib_text()
    assert b"def " in text
    data = load(DataConfig())
    assert data.tokenizer.decode(data.ids).encode() == text
    assert data.ends == (len(text) * 8 // 10, len(text) * 9 // 10, len(text))
    assert data.fingerprint == hashlib.sha256(text).hexdigest()
    assert data.bytes_per_token("val") == 1.0
    assert vocab_size(DataConfig()) == data.tokenizer.vocab_size <= 128


@pytest.fixture
def stdlib(tmp_path, monkeypatch):
    """A function that makes a standard library with the given files."""
    root = tmp_path / "stdlib"
    root.mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))

    def make(files):
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)

    return make


def test_stdlib_takes_whole_files_by_path_and_leaves_out_the_rest(stdlib, monkeypatch):
    left_out = {"test/t.py": b"T", "json/tests/t.py": b"T", "site-packages/x.py": b"X", "idlelib/i.py": b"I"}
    left_out |= {"_sysconfigdata_linux.py": b"S", "a.txt": b"N", "accent.py": "é".encode(), "config-3.11/m.py": b"M"}
    stdlib({"z.py": b"# z\n", "b.py": b"# b\r\n", "json/a.py": b"# json a\n", "a.py": b"# a\n", **left_out})
    assert corpora.stdlib_text() == b"# a\n# b\n# json a\n# z\n"
    monkeypatch.setattr(corpora, "STDLIB_BYTES", 5)
    assert corpora.stdlib_text() == b"# a\n# b\n"


def test_every_split_of_stdlib_has_text_of_every_module(stdlib):
    """A budget's thresholds come from training text; validation text must not be of other modules."""
    modules = {f"{letter}.py": 60 * (1023 * letter.encode() + b"\n") for letter in "abc"}
    stdlib(modules)
    assert sorted(corpora.stdlib_text()) == sorted(b"".join(modules.values())), "each line once"
    data = load(DataConfig())
    for split, lines in (("train", 48), ("val", 6), ("test", 6)):
        text = data.tokenizer.decode(data.split_ids(split))
        assert [text.count(1023 * letter + "\n") for letter in "abc"] == [lines] * 3, split


def test_a_python_without_sources_is_told(stdlib):
    with pytest.raises(UserError, match=r"'stdlib', but .* has no .py files; choose another --data.corpus"):
        load(DataConfig())


# --- text:PATH --------------------------------------------------------------------------------------------------------


def refused(path, tokens="char"):
    with pytest.raises(UserError) as error:
        load(DataConfig(corpus=f"text:{path}", tokens=tokens))
    said = str(error.value)
    assert "\n" not in said
    assert one_line(repr(f"text:{path}")) in said
    return said


def test_bad_files_are_refused_each_in_its_own_words(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes("Grüße an alle, die das hier lesen".encode("latin-1"))
    (tmp_path / "short").write_text("ab")
    assert "no such file" in refused(tmp_path / "missing")
    assert "no such file" in refused(tmp_path / "short" / "below")
    assert f"no such file in {Path.cwd()}; " in refused("elsewhere.txt")
    assert "a folder" in refused(tmp_path)
    assert "empty" in refused(tmp_path / "empty")
    assert "byte 2 is 0xfc" in refused(tmp_path / "latin")
    assert "--data.tokens byte" in refused(tmp_path / "latin")
    assert "too short: 2 tokens" in refused(tmp_path / "short")
    assert "not a path" in refused("a\0b")
    assert "cannot be read" in refused("x" * 5000)


def test_a_device_is_refused_before_it_is_read():
    if not os.path.exists("/dev/zero"):
        pytest.skip("this system has no /dev/zero")
    assert "not a regular file" in refused("/dev/zero")


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("x" * 100)

    def denied(path, mode, **how):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open", denied, raising=False)  # not by file mode, since root may read anything
    assert "cannot be read (Permission denied)" in refused(tmp_path / "secret")


def test_any_bytes_are_a_corpus_of_bytes(tmp_path):
    content = bytes(range(255, -1, -1)) * 2
    (tmp_path / "raw").write_bytes(content)
    config = DataConfig(corpus=f"text:{tmp_path / 'raw'}", tokens="byte")
    data = load(config)
    assert data.ids.tobytes() == content
    assert vocab_size(config) == data.tokenizer.vocab_size == 256


def test_line_ends_and_characters_stay_as_they_are(tmp_path):
    text = "Zeile eins\r\nZeile zwei\n\ufeff𝄞 und so weiter"
    (tmp_path / "t").write_bytes(text.encode())
    config = DataConfig(corpus=f"text:{tmp_path / 't'}")
    assert load(config).tokenizer.decode(load(config).ids) == text
    assert vocab_size(config) == len(set(text))


def test_a_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "novel.txt").write_text("once upon a time there was")
    assert len(load(DataConfig(corpus="text:~/novel.txt")).ids) == 26


def test_known_vocabularies_touch_no_file(tmp_path):
    missing = f"text:{tmp_path / 'missing'}"
    expected = {("shakespeare", "char"): 65, ("enwik8", "char"): 6064, ("copy", "char"): 32, ("sort", "char"): 32}
    expected |= {(corpus, "byte"): 256 for corpus in ("shakespeare", "enwik8", "stdlib", missing)}
    for (corpus, tokens), size in expected.items():
        assert vocab_size(DataConfig(corpus=corpus, tokens=tokens)) == size


# --- the published corpora themselves ---------------------------------------------------------------------------------


def test_shakespeare(published_data):
    published_data("tinyshakespeare.txt")
    data = load(DataConfig(corpus="shakespeare"))
    assert data.tokenizer.vocab_size == vocab_size(DataConfig(corpus="shakespeare")) == 65
    assert data.tokenizer.decode([0, 1]) == "\n "
    assert data.ids.dtype == np.uint8
    assert data.ends == (892_315, 1_003_854, 1_115_394)
    assert data.tokenizer.decode(data.passage("train", 14)) == "First Citizen:"
    assert data.bytes_per_token("val") == 1.0
    assert sum(targets.size for _, targets in data.windows("val", 128, 64)) == 1_003_854 - 892_315 - 1


_SECOND_LOAD = """
import resource, sys, time
from tokendepth.config import DataConfig
from tokendepth.data import load
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
data = load(DataConfig(corpus="enwik8"))
print(time.perf_counter() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_enwik8(published_data, monkeypatch):
    published_data("enwik8.xz")
    data = load(DataConfig(corpus="enwik8"))
    assert data.tokenizer.vocab_size == vocab_size(DataConfig(corpus="enwik8")) == 6064
    assert data.ids.dtype == np.uint16
    assert data.ends == (90_000_000, 95_000_000, 99_621_832)
    assert sum(data.split_bytes) == 100_000_000
    raw = load(DataConfig(corpus="enwik8", tokens="byte"))
    assert raw.ends == (90_000_000, 95_000_000, 100_000_000)
    text = data.tokenizer.decode(data.ids[:4_100_000])
    assert raw.ids[: len(text.encode())].tobytes() == text.encode()

    monkeypatch.delenv("TOKENDEPTH_DATA")  # from here on, neither source nor network is available
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _SECOND_LOAD], cwd=root, capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 2
    assert megabytes < 300
    assert isinstance(load(DataConfig(corpus="enwik8")).ids, np.memmap)
