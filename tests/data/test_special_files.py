"""Anything but a file in place of a corpus, a tokenizer or cached tokens: a one-line error, at once, in little memory.

RELIABILITY 25.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.special import SPECIAL, at_once, replaced
from tests.tiny import TEXT, one_line, write_corpus
from tokendepth.config import DataConfig
from tokendepth.data import load
from tokendepth.data.fetch import PUBLISHED
from tokendepth.errors import UserError


def refused(config: DataConfig) -> str:
    with at_once(), pytest.raises(UserError) as raised:
        load(config)
    return one_line(raised.value)


@pytest.mark.parametrize("kind", SPECIAL)
def test_in_the_place_of_a_text(kind, tmp_path):
    SPECIAL[kind](tmp_path / "text")
    assert repr(f"text:{tmp_path / 'text'}") in refused(DataConfig(f"text:{tmp_path / 'text'}"))


def test_a_text_may_lie_behind_a_link(tmp_path):
    write_corpus(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "corpus.txt")
    assert sum(load(DataConfig(f"text:{tmp_path / 'link'}")).split_bytes) == len(TEXT.encode())


@pytest.mark.parametrize("kind", SPECIAL)
def test_in_the_place_of_a_tokenizer(kind, tmp_path):
    pytest.importorskip("tokenizers")
    SPECIAL[kind](tmp_path / "tokenizer.json")
    tokens = f"tokenizer:{tmp_path / 'tokenizer.json'}"
    assert repr(tokens) in refused(DataConfig(write_corpus(tmp_path), tokens))


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [*PUBLISHED["shakespeare"].file_names, *PUBLISHED["enwik8"].file_names])
def test_in_the_place_of_a_published_corpus(kind, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENDEPTH_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    SPECIAL[kind](tmp_path / "data" / name)
    message = refused(DataConfig("shakespeare" if "shakespeare" in name else "enwik8"))
    # A folder of that name may be where the user keeps the corpus; it is not the corpus, so a download is tried.
    assert str(tmp_path / "data" / ("" if "folder" in kind else name)) in message


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("suffix", ["json", "npy"])
def test_in_the_place_of_cached_tokens(kind, suffix, tmp_path, cache):
    config = DataConfig(write_corpus(tmp_path))
    ids = np.array(load(config).ids)
    (path,) = (cache / "tokens").glob(f"*.{suffix}")
    replaced(Path(path), kind)
    with at_once():
        np.testing.assert_array_equal(load(config).ids, ids)
        np.testing.assert_array_equal(load(config).ids, ids)
