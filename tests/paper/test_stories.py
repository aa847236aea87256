"""A model in the format of llama2.c: the folder that is made of it computes what llama2.c computes."""

import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from paper.__main__ import PAPER
from paper.stories import MEMBER, write_stories
from tests.tiny import one_line
from tokendepth.cli.main import main
from tokendepth.data.of_run import tokenizer_of
from tokendepth.errors import UserError
from tokendepth.importing.convert import import_model
from tokendepth.measure.evaluate import load_model

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 16, 24, 2, 4, 2, 12
HEAD = WIDTH // HEADS
BYTES = [f"<0x{n:02X}>" for n in range(256)]
# In the order of sentencepiece: what is merged, then single characters. The higher the score, the sooner.
PIECES = ["<unk>", "\n<s>\n", "\n</s>\n", *BYTES, " t", "he", " the", " ", "t", "h", "e", "☃"]
SHAPES = {
    "embedding": (len(PIECES), WIDTH),
    "norm_attention": (LAYERS, WIDTH),
    "q": (LAYERS, WIDTH, WIDTH),
    "k": (LAYERS, KV_HEADS * HEAD, WIDTH),
    "v": (LAYERS, KV_HEADS * HEAD, WIDTH),
    "o": (LAYERS, WIDTH, WIDTH),
    "norm_ffn": (LAYERS, WIDTH),
    "gate": (LAYERS, INNER, WIDTH),
    "down": (LAYERS, WIDTH, INNER),
    "up": (LAYERS, INNER, WIDTH),
    "norm": (WIDTH,),
    "rotations": (2, CONTEXT, HEAD // 2),
}
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def weights() -> Weights:
    dice = np.random.default_rng(0)
    return {name: dice.normal(size=shape).astype("<f4") * 0.5 for name, shape in SHAPES.items()}


def packed(weights: Weights) -> bytes:
    header = struct.pack("7i", WIDTH, INNER, LAYERS, HEADS, KV_HEADS, len(PIECES), CONTEXT)
    tokens = [struct.pack("<fi", -n, len(text.encode())) + text.encode() for n, text in enumerate(PIECES)]
    return b"".join([header, *(part.tobytes() for part in weights.values()), struct.pack("i", 7), *tokens])


def package(folder: Path, data: bytes, name: str = MEMBER) -> Path:
    path = folder / "package.tgz"
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return path


def as_llama2c_does(weights: Weights, ids: list[int]) -> np.ndarray:
    """The logits after each token, in float64; positions turn neighbouring numbers of a query or key as one complex."""
    w = {name: part.astype(np.float64) for name, part in weights.items()}
    x, length = w["embedding"][ids], len(ids)
    angles = np.outer(np.arange(length), 10000.0 ** -(np.arange(0, HEAD, 2) / HEAD))
    turn = np.exp(1j * angles)[:, None]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * weight

    def turned(rows: np.ndarray) -> np.ndarray:
        pairs = rows.reshape(length, -1, HEAD // 2, 2)
        found = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([found.real, found.imag], -1).reshape(length, -1, HEAD)

    for n in range(LAYERS):
        h = norm(x, w["norm_attention"][n])
        q, k = turned(h @ w["q"][n].T), turned(h @ w["k"][n].T)
        v = (h @ w["v"][n].T).reshape(length, KV_HEADS, HEAD)
        k, v = (part.repeat(HEADS // KV_HEADS, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD)
        scores = np.exp(np.where(np.tri(length, dtype=bool), scores, -np.inf))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(length, WIDTH) @ w["o"][n].T
        h = norm(x, w["norm_ffn"][n])
        gate = h @ w["gate"][n].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"][n].T)) @ w["down"][n].T
    return norm(x, w["norm"]) @ w["embedding"].T


def test_it_computes_and_reads_as_llama2c_does(tmp_path, weights, capsys):
    main(["stories", str(package(tmp_path, packed(weights))), str(tmp_path / "folder")], PAPER)
    assert f"tokendepth import {tmp_path / 'folder'}" in capsys.readouterr().out
    run = import_model(tmp_path / "folder", tmp_path / "run")
    ids = tokenizer_of(run).encode_prompt("the the\n☃th")
    names = [" the", " the", "<0x0A>", "☃", "t", "h"]
    assert ids == [1, *(len(PIECES) - 1 - PIECES[::-1].index(name) for name in names)]
    assert tokenizer_of(run).decode(ids[1:]) == "the the\n☃th"
    with torch.no_grad():
        found = load_model(run, torch.device("cpu"))(torch.tensor([ids])).logits[0]
    expected = as_llama2c_does(weights, ids)
    assert np.abs(found.numpy() - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("fault", ["text", "short", "another"])
def test_a_package_that_is_damaged_or_another(tmp_path, weights, fault):
    data = packed(weights)
    path = package(tmp_path, data[:-500] if fault == "short" else data, "other" if fault == "another" else MEMBER)
    if fault == "text":
        path.write_text("no archive")
    with pytest.raises(UserError) as caught:
        write_stories(path, tmp_path / "folder")
    assert f"{path} cannot be read" in one_line(caught.value)
    assert "npm pack" in one_line(caught.value)
    assert not (tmp_path / "folder").exists()
