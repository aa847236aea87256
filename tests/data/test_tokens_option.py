"""`data.tokens`: valid values, and the corpus in each kind of tokens."""

import dataclasses
import hashlib
import json
import os
import shutil
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendepth.config import CORPORA, DataConfig
from tokendepth.data import BPETokenizer, bpe, corpora, load, vocab_size
from tokendepth.data import source as source_module
from tokendepth.data.build import bpe_stream, byte_stream, char_stream
from tokendepth.data.fetch import PUBLISHED
from tokendepth.data.source import Source
from tokendepth.data.store import in_memory, load_tokens
from tokendepth.errors import UserError, one_line

pytest.importorskip("tokenizers")

TEXT = "".join(f"Zeile {i}: «Grüße, 中文 und {i * 17} Worte», sagt sie.\n" for i in range(200))


# --- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["char", "byte", "bpe:256", "bpe:8192", "bpe:1000000", "tokenizer:a/b:c.json"])
def test_every_kind_is_taken(tokens):
    config = DataConfig(tokens=tokens)
    assert config.tokens == tokens
    assert config.token_kind == tokens.split(":")[0]
    if config.token_kind == "bpe":
        assert config.bpe_size == int(tokens[4:])


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ("", "no such tokens; expected one of bpe:N, byte, char, tokenizer:PATH"),
        ("chars", "did you mean 'char'?"),
        ("Byte", "did you mean 'byte'?"),
        ("bpe", "did you mean 'bpe:N'?"),
        ("bpe8192", "did you mean 'bpe:N'?"),
        ("byte:256", "no such tokens"),
        ("tokenizer", "did you mean 'tokenizer:PATH'?"),
        ("my/tokenizer.json", "write 'tokenizer:my/tokenizer.json' for a tokenizer of your own"),
        ("bpe:", "expected a whole number after the colon, as in bpe:8192"),
        ("bpe:many", "expected a whole number after the colon, as in bpe:8192"),
        ("bpe:8k", "expected a whole number after the colon, as in bpe:8192"),
        ("bpe:-5", "expected a whole number after the colon, as in bpe:8192"),
        ("bpe: 512", "expected a whole number after the colon, as in bpe:8192"),
        ("bpe:0512", "expected a whole number after the colon, as in bpe:8192"),
        ("bpe:\u0665\u0665\u0665", "expected a whole number after the colon, as in bpe:8192"),
        ("bpe:512\n", "expected a whole number after the colon, as in bpe:8192"),
        ("bpe:0", "expected 256 tokens or more, since each of the 256 bytes is a token"),
        ("bpe:255", "expected 256 tokens or more, since each of the 256 bytes is a token"),
        ("bpe:1000001", "expected 1,000,000 tokens or fewer"),
        ("bpe:" + "9" * 5000, "expected 1,000,000 tokens or fewer"),
        ("tokenizer:", "expected a path after the colon; set it with --data.tokens tokenizer:PATH"),
    ],
)
def test_everything_else_is_one_line_with_the_remedy(tokens, complaint):
    with pytest.raises(UserError) as error:
        DataConfig(tokens=tokens)
    said = str(error.value)
    assert said.startswith(one_line(f"data.tokens is {tokens!r}"))
    assert complaint in said
    assert "set it with --data.tokens" in said
    assert "\n" not in said


@pytest.mark.parametrize("tokens", ["byte", "bpe:512", "tokenizer:x"])
@pytest.mark.parametrize("corpus", ["copy", "sort"])
def test_copy_and_sort_keep_their_own_tokens(corpus, tokens):
    with pytest.raises(UserError, match=f"data.tokens is '{tokens}'; expected 'char', since {corpus} has its own"):
        DataConfig(corpus, tokens=tokens)


@given(st.text(max_size=20).filter(lambda text: text not in ("char", "byte") and not text.startswith(("bpe:", "tok"))))
def test_any_other_text_is_refused_in_one_line(tokens):
    with pytest.raises(UserError) as error:
        DataConfig(tokens=tokens)
    assert "\n" not in str(error.value)


# --- corpora by BPE ---------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    return f"text:{tmp_path / 'text.txt'}"


@pytest.fixture
def tokenizer_file(tmp_path):
    tree = bpe.train_bpe([TEXT[:3000]], 300).to_dict()["tokenizer"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    return tmp_path / "tokenizer.json"


@pytest.fixture(params=["bpe:300", "tokenizer"])
def config(request, corpus, tokenizer_file):
    return DataConfig(corpus, tokens=request.param if request.param == "bpe:300" else f"tokenizer:{tokenizer_file}")


def splits(text):
    first, second = len(text) * 8 // 10, len(text) * 9 // 10
    return text[:first], text[first:second], text[second:]


def test_each_split_is_the_same_characters_encoded_on_its_own(config):
    data = load(config)
    assert isinstance(data.ids, np.memmap)
    assert isinstance(data.tokenizer, BPETokenizer)
    assert data.ids.dtype == np.uint16
    for split, part in zip(("train", "val", "test"), splits(TEXT), strict=True):
        assert data.tokenizer.decode(data.split_ids(split)) == part
        assert data.split_ids(split).tolist() == data.tokenizer.encode(part)
    assert data.split_bytes == tuple(len(part.encode()) for part in splits(TEXT))
    assert data.split_bytes == load(DataConfig(config.corpus)).split_bytes
    assert sum(data.split_bytes) == len(TEXT.encode())
    assert data.bytes_per_token("val") == len(splits(TEXT)[1].encode()) / len(data.split_ids("val")) > 1
    assert vocab_size(config) == data.tokenizer.vocab_size == 300


def test_the_second_load_is_the_same_without_a_second_training(config, monkeypatch):
    first = load(config)
    monkeypatch.setattr(bpe, "train_bpe", None)
    monkeypatch.setattr(BPETokenizer, "encode_pieces", None)
    second = load(config)
    np.testing.assert_array_equal(first.ids, second.ids)
    for name in ("name", "fingerprint", "tokenizer", "ends", "split_bytes"):
        assert getattr(first, name) == getattr(second, name)


def test_bpe_is_trained_on_the_training_split_alone(tmp_path):
    one, other = (DataConfig(f"text:{tmp_path / name}", tokens="bpe:400") for name in "ab")
    train = splits(TEXT)[0]
    rest = len(TEXT) - len(train)
    (tmp_path / "a").write_text(TEXT, encoding="utf-8", newline="")
    (tmp_path / "b").write_text(train + ("never seen before " * rest)[:rest], encoding="utf-8", newline="")
    assert load(one).tokenizer == load(other).tokenizer
    np.testing.assert_array_equal(load(one).split_ids("train"), load(other).split_ids("train"))


def test_the_same_text_by_other_tokens_is_other_data(corpus, tokenizer_file):
    text_alone = load(DataConfig(corpus)).fingerprint
    assert text_alone == load(DataConfig(corpus, tokens="byte")).fingerprint
    kinds = ("bpe:300", "bpe:400", f"tokenizer:{tokenizer_file}")
    found = [load(DataConfig(corpus, tokens=tokens)).fingerprint for tokens in kinds]
    assert len({text_alone, *found}) == 4
    before = load(DataConfig(corpus, tokens=kinds[2]))
    tokenizer_file.write_text(json.dumps(bpe.train_bpe([TEXT], 350).to_dict()["tokenizer"]))
    after = load(DataConfig(corpus, tokens=kinds[2]))
    assert after.tokenizer.vocab_size == 350
    assert before.fingerprint != after.fingerprint


def test_the_key_of_the_cache_names_the_tokenizer(corpus, tokenizer_file, cache):
    for tokens in ("char", "byte", "bpe:300", f"tokenizer:{tokenizer_file}"):
        load(DataConfig(corpus, tokens=tokens))
    text, own = hashlib.sha256(TEXT.encode()).hexdigest(), corpora.read_tokenizer(f"tokenizer:{tokenizer_file}").sha256
    expected = {f"text-char-{text}", f"text-byte-{text}", f"text-bpe-300-{text}", f"text-tokenizer-{own}-{text}"}
    assert {path.stem for path in (cache / "tokens").glob("*.json")} == expected
    assert {path.stem for path in (cache / "tokens").glob("*.npy")} == expected


def test_a_copy_of_the_tokenizer_elsewhere_is_the_same_data(corpus, tokenizer_file, tmp_path):
    shutil.copy(tokenizer_file, tmp_path / "copy.json")
    one, other = (load(DataConfig(corpus, tokens=f"tokenizer:{tmp_path / n}")) for n in ("tokenizer.json", "copy.json"))
    assert one.fingerprint == other.fingerprint
    assert one.ids.filename == other.ids.filename


def test_a_text_with_fewer_pairs_than_asked_has_the_tokens_it_has(corpus, capsys):
    config = DataConfig(corpus, tokens="bpe:50000")
    found = load(config).tokenizer.vocab_size
    assert 256 < found < 50_000
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"bpe:50000 found only {found} tokens in {corpus!r}" in said
    assert vocab_size(config) == found
    assert capsys.readouterr().err == "", "told once, when it was trained"


def test_published_splits_end_at_the_published_characters(tmp_path, monkeypatch):
    content = TEXT.encode()
    small = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "train_and_val": (5000, 6000)}
    monkeypatch.setitem(PUBLISHED, "enwik8", dataclasses.replace(PUBLISHED["enwik8"], **small))
    monkeypatch.setenv("TOKENDEPTH_DATA", str(tmp_path))
    (tmp_path / "enwik8").write_bytes(content)
    data = load(DataConfig("enwik8", tokens="bpe:300"))
    parts = [data.tokenizer.decode(data.split_ids(split)) for split in ("train", "val", "test")]
    assert parts == [TEXT[:5000], TEXT[5000:6000], TEXT[6000:]]
    assert data.split_bytes == tuple(len(part.encode()) for part in parts)


@given(
    text=st.text("aé中 \n.1", min_size=60, max_size=300),
    piece=st.integers(1, 40),
    kind=st.sampled_from(["char", "byte", "trained", "tokenizer"]),
)
def test_no_piece_size_changes_anything(text, piece, kind):
    tokenizer = bpe.train_bpe([TEXT], 300)

    def built(size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source_module, "PIECE", size)
            patch.setattr(bpe, "SEGMENT", 10)
            patch.setattr(bpe, "LONGEST_SEGMENT", 30)
            source = Source.of_bytes("text:x", text.encode())
            make = {
                "char": lambda: char_stream(source, ""),
                "byte": lambda: byte_stream(source, ""),
                "trained": lambda: bpe_stream(source, "", 300),
                "tokenizer": lambda: bpe_stream(source, "", tokenizer),
            }
            try:
                return in_memory(make[kind]())
            except UserError as error:  # a split of a single token
                return str(error)

    one, other = built(1 << 20), built(piece)
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    np.testing.assert_array_equal(one.ids, other.ids)
    assert (one.ends, one.split_bytes, one.tokenizer) == (other.ends, other.split_bytes, other.tokenizer)
    assert sum(one.split_bytes) == len(text.encode())


def test_a_split_of_a_single_token_is_too_short_however_many_the_text_has(tmp_path):
    (tmp_path / "t").write_text(" abcdefghi" * 9 + "0.1.2.3.4.")
    with pytest.raises(UserError, match=r"is too short: 1 token in its val split; expected at least 2; take a longer"):
        load(DataConfig(f"text:{tmp_path / 't'}", tokens="bpe:300"))
    (tmp_path / "t").write_text("ab")
    with pytest.raises(UserError, match=r"is too short: 2 tokens; expected at least 16; take a longer"):
        load(DataConfig(f"text:{tmp_path / 't'}", tokens="bpe:300"))


def test_a_cache_that_cannot_be_written_costs_one_line(config, cache, capsys):
    cache.write_text("in the way")
    data = load(config)
    assert not isinstance(data.ids, np.memmap)
    assert data.tokenizer.decode(data.split_ids("val")) == splits(TEXT)[1]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "they stay in memory; set TOKENDEPTH_CACHE" in said


def test_text_that_is_not_utf8_is_refused_before_anything_is_trained(tmp_path, tokenizer_file, monkeypatch):
    monkeypatch.setattr(bpe, "train_bpe", None)
    (tmp_path / "latin").write_bytes("Grüße".encode("latin-1") * 100)
    for tokens in ("bpe:300", f"tokenizer:{tokenizer_file}"):
        with pytest.raises(UserError, match=r"not UTF-8: byte 2 is 0xfc; .*--data.tokens byte"):
            load(DataConfig(f"text:{tmp_path / 'latin'}", tokens=tokens))


def test_without_the_library_the_extra_is_named_before_anything_is_read(config, monkeypatch, capsys):
    load(config)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"tokenizers, not installed; pip install 'tokendepth\[data\]'"):
        load(config)
    assert capsys.readouterr().err == "", "a cache that cannot be read for want of it is not damaged"


def test_known_vocabularies_touch_no_corpus(tmp_path, tokenizer_file, monkeypatch):
    monkeypatch.setattr(corpora, "fetch", None)
    assert vocab_size(DataConfig("enwik8", tokens="bpe:8192")) == 8192
    assert vocab_size(DataConfig("enwik8", tokens="bpe:32768")) == 32_768
    assert vocab_size(DataConfig("shakespeare", tokens="bpe:8192")) == 8192
    assert vocab_size(DataConfig(f"text:{tmp_path / 'missing'}", tokens=f"tokenizer:{tokenizer_file}")) == 300


def test_a_damaged_tokenizer_in_the_cache_is_rebuilt(config, cache, capsys):
    first = load(config)
    (index,) = (cache / "tokens").glob("*.json")
    tree = json.loads(index.read_bytes())
    tree["index"]["tokenizer"]["tokenizer"]["model"]["merges"] = 3
    tree["sha256"] = hashlib.sha256(json.dumps(tree["index"], sort_keys=True).encode()).hexdigest()
    index.write_text(json.dumps(tree))
    assert load_tokens(index.stem, "x") is None
    assert "damaged" in capsys.readouterr().err
    assert load(config).tokenizer == first.tokenizer


def test_shakespeare_has_as_many_pairs_as_are_promised(published_data):
    published_data("tinyshakespeare.txt")
    size = PUBLISHED["shakespeare"].bpe_vocabulary
    assert load(DataConfig("shakespeare", tokens=f"bpe:{size}")).tokenizer.vocab_size == size


@pytest.mark.parametrize("corpus", [name for name in CORPORA if name in PUBLISHED])
def test_what_is_promised_of_a_published_corpus_is_sensible(corpus):
    assert 256 <= PUBLISHED[corpus].bpe_vocabulary < PUBLISHED[corpus].size


# --- tokenizer:PATH ---------------------------------------------------------------------------------------------------


def refused(path):
    with pytest.raises(UserError) as error:
        load(DataConfig(tokens=f"tokenizer:{path}"))
    said = str(error.value)
    assert "\n" not in said
    assert said.startswith(one_line(f"data.tokens is {f'tokenizer:{path}'!r}") + ": ")
    assert len(said) < 400 + len(str(path))
    return said


def test_what_is_no_tokenizer_is_refused_each_in_its_own_words(tmp_path):
    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    assert "no such file; give the path of a tokenizer.json as tokenizer:PATH" in refused(tmp_path / "missing")
    assert "a folder; name one file in it" in refused(tmp_path)
    assert "not JSON" in refused(write("empty", b""))
    assert "not JSON" in refused(write("sentencepiece.model", bytes(range(256))))
    assert "not JSON" in refused(write("deep", b"[" * 200_000))
    for content in (b"{}", b"[]", b"3", b'{"model": 3}', b'{"architectures": ["LlamaForCausalLM"]}'):
        assert "not a tokenizer.json of Hugging Face: it has no model" in refused(write("other", content))
    assert "not a tokenizer.json of Hugging Face (" in refused(write("nearly", b'{"model": {"type": "BPE"}}'))
    assert "not a path" in refused("a\0b")
    assert "cannot be read" in refused("x" * 5000)


def test_a_pipe_a_device_and_a_huge_file_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")
    if os.path.exists("/dev/zero"):
        assert "not a regular file" in refused("/dev/zero")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(10**12)
    assert "1,000,000,000,000 bytes, too many for a tokenizer" in refused(tmp_path / "huge")


def test_a_home_folder_is_understood(tokenizer_file, monkeypatch):
    monkeypatch.setenv("HOME", str(tokenizer_file.parent))
    assert vocab_size(DataConfig(tokens="tokenizer:~/tokenizer.json")) == 300


# --- the largest texts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["char", "byte", "bpe:300"])
def test_a_pipe_and_a_file_of_a_terabyte_are_answered_at_once(tmp_path, tokens):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "disk.img", "wb") as file:
        file.truncate(10**12)
    with pytest.raises(UserError, match="not a regular file"):
        load(DataConfig(f"text:{tmp_path / 'pipe'}", tokens=tokens))
    with pytest.raises(UserError, match=r"disk.img': more than 100 GB; name a part of it, in a file of its own"):
        load(DataConfig(f"text:{tmp_path / 'disk.img'}", tokens=tokens))


def test_a_file_that_never_ends_is_cut_off(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora, "LARGEST_CORPUS", 3_000_000)
    (tmp_path / "t").write_text("x" * 100)

    class Endless:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self, size):
            return bytes(size)

    monkeypatch.setattr(corpora, "open_regular", lambda path: Endless())
    with pytest.raises(UserError, match="more than"):
        load(DataConfig(f"text:{tmp_path / 't'}"))


def test_nothing_but_zeros_is_a_text_too(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(5_000_000)
    for tokens in ("char", "byte", "bpe:300"):
        data = load(DataConfig(f"text:{tmp_path / 'sparse'}", tokens=tokens))
        assert sum(data.split_bytes) == 5_000_000
