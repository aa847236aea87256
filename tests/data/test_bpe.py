import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tokendepth.data import BPETokenizer, TextStream, bpe, tokenizer_from_dict
from tokendepth.data.bpe import segments, train_bpe
from tokendepth.errors import UserError

tokenizers = pytest.importorskip("tokenizers")

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PROSE = st.text("aéb中 \n\n\r\t.,'1😀_", max_size=300)
"""Few different characters, so that words, lines, runs of spaces and merges are frequent."""

SAMPLE = "".join(
    f"It's line {i} of a small text, isn't it?\n{'' if i % 3 else chr(10)}  Größe {i * 37}: «中文 {i}» 😀\n"
    for i in range(150)
)
STORIES = Path(os.environ.get("TOKENDEPTH_DATA") or Path(__file__).parents[3] / "shared" / "data") / "stories260K"


@pytest.fixture(scope="session")
def trained():
    return train_bpe([SAMPLE], 400)


# --- tokenizers from elsewhere ----------------------------------------------------------------------------------------


def _trained(model, trainer, pre=None, normalizer=None, decoder=None):
    tokenizer = tokenizers.Tokenizer(model)
    if pre:
        tokenizer.pre_tokenizer = pre
    if normalizer:
        tokenizer.normalizer = normalizer
    if decoder:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return json.loads(tokenizer.to_str())


def gpt2_tree(prefix=False):
    pre, trainers = tokenizers.pre_tokenizers, tokenizers.trainers
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    return _trained(
        tokenizers.models.BPE(),
        trainer,
        pre.ByteLevel(add_prefix_space=prefix),
        decoder=tokenizers.decoders.ByteLevel(),
    )


def llama_tree():
    """As in sentencepiece: a mark for every space and before the text, bytes for characters without a token."""
    bytes_ = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words = ["▁", "a", "b", "é", "l", "i", "n", "e", "t", "s", "li", "ne", "▁line", "line", "▁a", "it", "▁it", "ab"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | bytes_ | {word: 259 + n for n, word in enumerate(words)}
    merges = [["l", "i"], ["n", "e"], ["li", "ne"], ["▁", "line"], ["▁", "a"], ["i", "t"], ["▁", "it"], ["a", "b"]]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [{"id": n, "content": name, **special} for n, name in enumerate(("<unk>", "<s>", "</s>"))],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": 0.5,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def t5_tree():
    pre = tokenizers.pre_tokenizers
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=150, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    return _trained(
        tokenizers.models.Unigram(),
        trainer,
        pre.Sequence([pre.WhitespaceSplit(), pre.Metaspace()]),
        decoder=tokenizers.decoders.Metaspace(),
    )


def bert_tree():
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False)
    return _trained(
        tokenizers.models.WordPiece(unk_token="[UNK]"),
        trainer,
        tokenizers.pre_tokenizers.BertPreTokenizer(),
        tokenizers.normalizers.BertNormalizer(),
        tokenizers.decoders.WordPiece(),
    )


TREES = {
    "gpt2": gpt2_tree,
    "gpt2, space before": lambda: gpt2_tree(prefix=True),
    "llama": llama_tree,
    "t5": t5_tree,
    "bert": bert_tree,
}


@pytest.fixture(scope="session", params=["trained", *TREES])
def anybodys(request, trained):
    return trained if request.param == "trained" else BPETokenizer.from_tree(TREES[request.param]())


@pytest.fixture(scope="session")
def llama():
    return BPETokenizer.from_tree(llama_tree())


# --- round trips ------------------------------------------------------------------------------------------------------


@given(text=TEXT)
def test_any_text_comes_back_exactly(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids) == trained.decode(np.array(ids, np.uint16)) == text
    assert b"".join(map(trained.token_bytes, ids)) == text.encode()
    assert max(ids, default=0) < trained.vocab_size


@given(text=PROSE)
def test_a_stream_of_tokens_is_the_same_text(anybodys, text):
    ids = anybodys.encode(text)
    stream = TextStream(anybodys)
    parts = [stream.add(token) for token in ids]
    parts.append(stream.end())
    assert "".join(parts).encode() == b"".join(map(anybodys.token_bytes, ids)).decode("utf-8", "replace").encode()
    if "ByteLevel" in anybodys._decoder:
        assert "".join(parts) == anybodys.decode(ids)
        assert "\ufffd" not in "".join(parts)


@given(text=PROSE)
def test_text_comes_back_from_a_llama_with_byte_fallback(llama, text):
    assert llama.decode(llama.encode(text)) == text
    assert b"".join(map(llama.token_bytes, llama.encode(text))).decode() == (" " + text if text else "")


def test_json_round_trip(anybodys):
    tree = json.loads(json.dumps(anybodys.to_dict(), allow_nan=False))
    assert list(tree) == ["kind", "tokenizer"]
    again = tokenizer_from_dict(tree)
    assert again == anybodys
    assert hash(again) == hash(anybodys)
    assert again.sha256 == anybodys.sha256
    assert again.encode(SAMPLE) == anybodys.encode(SAMPLE)


def test_names_of_special_tokens_are_text_and_nothing_is_cut_or_random(llama):
    tokenizer = BPETokenizer.from_tree(gpt2_tree())
    assert tokenizer.token_bytes(0) == b"<|endoftext|>"
    ids = tokenizer.encode("a<|endoftext|>b")
    assert 0 not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert not {0, 1, 2} & set(llama.encode("</s> a <s>"))
    assert len({tuple(llama.encode("a line is a line")) for _ in range(20)}) == 1, "the file asks for dropout"
    assert len(llama.encode("a line is a line")) > 4, "the file asks for four tokens at most"


def test_ids_that_a_file_leaves_out_count_and_say_nothing():
    tree = llama_tree()
    tree["model"]["vocab"]["ab"] = 300
    tokenizer = BPETokenizer.from_tree(tree)
    assert tokenizer.vocab_size == 301
    assert tokenizer.token_bytes(280) == b""
    assert tokenizer.pieces([280, 300]) == ["<280>", "ab"]


@pytest.mark.parametrize("out", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_never_decoded(anybodys, out):
    for read in (anybodys.decode, anybodys.pieces):
        with pytest.raises(AssertionError):
            read([out])


def test_half_a_surrogate_pair_is_named_with_its_position(trained):
    with pytest.raises(UserError, match=r"character '\\ud800' at position 2 .*leave it out"):
        trained.encode("ab\ud800")


# --- pieces for heat maps ---------------------------------------------------------------------------------------------


def test_pieces_are_printable_and_one_for_each_token(anybodys):
    pieces = anybodys.pieces(range(anybodys.vocab_size))
    assert len(pieces) == anybodys.vocab_size
    assert all(piece and piece.isprintable() for piece in pieces)


def test_pieces_by_hand(trained, llama):
    assert trained.pieces(trained.encode("☃")) == ["\\xe2", "\\x98", "\\x83"]
    assert "".join(trained.pieces(trained.encode("It's\n\n\tGröße"))) == "It's↵↵\\tGröße"
    assert " line" in trained.pieces(trained.encode("a line"))
    assert llama.pieces(llama.encode("a line\n☃")) == [" a", " line", "↵", "\\xe2", "\\x98", "\\x83"]
    assert llama.pieces([1]) == ["<s>"]
    assert BPETokenizer.from_tree(bert_tree()).pieces(BPETokenizer.from_tree(bert_tree()).encode("lines"))[0][0] == " "


# --- segments ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_segments(monkeypatch):
    monkeypatch.setattr(bpe, "SEGMENT", 8)
    monkeypatch.setattr(bpe, "LONGEST_SEGMENT", 20)
    monkeypatch.setattr(bpe, "BATCH", 3)


def in_pieces(text, size):
    return [text[first : first + size] for first in range(0, len(text), size)]


@given(text=PROSE, size=st.integers(1, 50), longest=st.integers(9, 40))
def test_segments_depend_on_the_text_alone(text, size, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "SEGMENT", 8)
        patch.setattr(bpe, "LONGEST_SEGMENT", longest)
        found = list(segments(in_pieces(text, size)))
        assert found == list(segments([text]))
    assert "".join(found) == text
    assert all(1 <= len(segment) <= longest for segment in found)


def test_segments_end_between_words_or_lines_by_hand(short_segments):
    assert list(segments(["one two three four five\nsix, seven\n\neight\nnine ten"])) == [
        "one two three",
        " four five\n",
        "six, seven\n\neight\n",
        "nine ten",
    ]
    assert list(segments(["one, two; 3 4 5\n\nsix\n  seven\n\neight_ 9 ten eleven"])) == [
        "one, two; 3 4 5\n\n",  # no boundary up to the twentieth character, so it ends after the last line
        "six\n  seven\n\n",
        "eight_ 9 ten",
        " eleven",
    ]
    assert list(segments(["x" * 45])) == ["x" * 20, "x" * 20, "x" * 5]


@given(text=PROSE, size=st.integers(1, 100))
def test_the_ids_do_not_depend_on_the_pieces(anybodys, text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "SEGMENT", 8)
        patch.setattr(bpe, "LONGEST_SEGMENT", 20)
        one, other = (list(anybodys.encode_pieces(pieces)) for pieces in ([text], in_pieces(text, size)))
    assert [ids.tolist() for ids, _ in one] == [ids.tolist() for ids, _ in other]
    assert sum(size for _, size in one) == len(text.encode())
    assert all(ids.dtype == anybodys.dtype for ids, _ in one)


@given(
    words=st.lists(st.sampled_from(["a", "line", "it's", "Größe", "42", "中文", "...", "«x»", "a\nline"]), max_size=60)
)
def test_the_ids_are_those_of_the_whole_text(anybodys, words):
    """If every segment finds a boundary, which fails only for text with very long words or lines."""
    text = " ".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "SEGMENT", 8)
        assume(len(list(segments([text]))) > 1)
        found = [token for ids, _ in anybodys.encode_pieces([text]) for token in ids]
    assert found == anybodys.encode(text)


def test_a_tokenizer_whose_tokens_reach_across_a_boundary_gets_every_segment_alone(short_segments):
    tree = llama_tree()
    tree["model"]["vocab"]["e▁a"] = 290
    tree["model"]["merges"].insert(0, ["e", "▁a"])
    tree["model"]["merges"].insert(0, ["▁", "a"])
    tokenizer = BPETokenizer.from_tree(tree)
    text = "a able isle ants able isle ants"
    first, *_ = segments([text])
    assert first == "a able isle"
    assert 290 in tokenizer.encode(text[: len(first) + 2])
    found = [token for ids, _ in tokenizer.encode_pieces([text]) for token in ids.tolist()]
    assert found[: len(tokenizer.encode(first))] == tokenizer.encode(first)
    assert tokenizer.decode(found).split() == text.split(), "with two spaces for one, as this tokenizer has it"


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_gives_the_asked_size_and_shorter_texts():
    sizes = [256, 300, 400]
    tokenizers_ = [train_bpe([SAMPLE], size) for size in sizes]
    assert [tokenizer.vocab_size for tokenizer in tokenizers_] == sizes
    lengths = [len(tokenizer.encode(SAMPLE)) for tokenizer in tokenizers_]
    assert lengths[0] == len(SAMPLE.encode()) > lengths[1] > lengths[2]
    for byte in range(256):
        assert any(tokenizers_[0].token_bytes(token) == bytes([byte]) for token in range(256))


def test_a_short_text_has_as_many_tokens_as_it_has_pairs_that_occur_twice():
    assert train_bpe(["ab ab"], 10_000).vocab_size == 257
    assert train_bpe([], 10_000).vocab_size == 256


def test_training_stays_the_same_between_versions_and_machines():
    """A change here would change the data of every run with bpe:N."""
    tree = train_bpe([SAMPLE], 400).to_dict()["tokenizer"]
    merges = [" ".join(merge) for merge in tree["model"]["merges"]]
    assert hashlib.sha256("\n".join(merges).encode()).hexdigest()[:16] == "94a3946f8f21fae6"


@pytest.mark.parametrize("threads", ["1", "4"])
def test_training_does_not_depend_on_the_process_or_its_threads(threads, trained, tmp_path):
    (tmp_path / "sample").write_text(SAMPLE, encoding="utf-8")
    program = (
        "import sys; from tokendepth.data.bpe import train_bpe; "
        "print(train_bpe([open(sys.argv[1], encoding='utf-8', newline='').read()], 400).sha256)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "sample"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "RAYON_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == trained.sha256


@given(size=st.integers(1, 3000))
def test_training_does_not_depend_on_the_pieces(trained, size):
    assert train_bpe(in_pieces(SAMPLE, size), 400) == trained


def test_training_reads_no_more_than_it_needs(monkeypatch, short_segments):
    read = 0

    def words(word):
        nonlocal read
        for number in range(10_000):
            read += 1
            yield word.format(number=number)

    monkeypatch.setattr(bpe, "TRAINING_BYTES", 4000)
    train_bpe(words("again "), 300)
    assert 600 < read < 1000
    read = 0
    monkeypatch.setattr(bpe, "DISTINCT_BYTES", 1000)
    train_bpe(words("{number:05} "), 300)
    assert 200 <= read < 300


# --- invalid tokenizers -----------------------------------------------------------------------------------------------


def damaged(tree, path, value):
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return tree


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["model"], None),
        (["model"], []),
        (["model"], {}),
        (["model"], KeyError),
        (["model", "type"], "Llama"),
        (["model", "vocab"], None),
        (["model", "vocab"], {}),
        (["model", "vocab", "ab"], -1),
        (["model", "vocab", "ab"], 2**31),
        (["model", "vocab", "ab"], "x"),
        (["model", "merges"], [["x", "never"]]),
        (["model", "merges"], 3),
        (["version"], "9"),
        (["decoder"], 3),
        (["decoder", "type"], "Nobody"),
        (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "?"}),
        (["added_tokens"], None),
        (["added_tokens", 0, "id"], -1),
        (["added_tokens", 0, "content"], "\ud800"),
    ],
    ids=str,
)
def test_a_damaged_tree_is_one_line(path, value):
    tree = damaged(llama_tree(), path, value)
    with pytest.raises(UserError) as error:
        tokenizer_from_dict({"kind": "bpe", "tokenizer": tree})
    said = str(error.value)
    assert said.startswith("the tokenizer is damaged: ")
    assert said.endswith("; restore a copy")
    assert "\n" not in said
    assert len(said) < 250


@pytest.mark.parametrize(
    "tree",
    [
        {"kind": "bpe"},
        {"kind": "bpe", "tokenizer": None},
        {"kind": "bpe", "tokenizer": []},
        {"kind": "bpe", "tokenizer": "{}"},
        {"kind": "bpe", "tokenizer": {}},
        {"kind": "bpe", "tokenizer": {}, "extra": 1},
    ],
)
def test_a_malformed_tree_is_a_users_error(tree):
    with pytest.raises(UserError, match="tokenizer") as error:
        tokenizer_from_dict(tree)
    assert "\n" not in str(error.value)


def test_without_the_library_the_extra_is_named(monkeypatch, trained):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for attempt in (lambda: train_bpe(["text"], 300), lambda: tokenizer_from_dict(trained.to_dict())):
        with pytest.raises(UserError) as error:
            attempt()
        assert str(error.value).endswith("not installed; pip install 'tokendepth[data]'")


def test_the_package_imports_without_the_library():
    program = "import sys; sys.modules['tokenizers'] = None; import tokendepth.data"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True)


def test_the_tokenizer_of_a_published_model():
    if not (STORIES / "tokenizer.json").is_file():
        pytest.skip("no stories260K: set TOKENDEPTH_DATA to a folder that has it")
    tokenizer = BPETokenizer.from_tree(json.loads((STORIES / "tokenizer.json").read_bytes()))
    assert tokenizer.vocab_size == 512
    text = "Once upon a time, there was a little girl.\n\nShe said: «Größe ☃» </s>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.pieces(tokenizer.encode("Once upon a time")) == [" Once", " upon", " a", " time"]
    long = text * 2000
    found = [token for ids, _ in tokenizer.encode_pieces(in_pieces(long, 10_000)) for token in ids.tolist()]
    assert found == tokenizer.encode(long)
