"""Convert a Hugging Face model to a finished dense run with the same logits up to rounding."""

import os
import re
import shutil
from pathlib import Path

import torch
from torch import Tensor

from tokendepth import data
from tokendepth.config import NO_CORPUS, OWN_TOKENS, DataConfig, DenseConfig, ModelConfig, RunConfig, TrainConfig
from tokendepth.errors import UserError
from tokendepth.importing.checkpoint import Checkpoint, read_checkpoint
from tokendepth.importing.families import family_of, model_config, native_weights
from tokendepth.methods import outline
from tokendepth.progress import Progress
from tokendepth.runs.files import disk_faults, json_bytes, rename, write_bytes
from tokendepth.runs.machine import environment, memory_bytes
from tokendepth.runs.run import Run

UNUSED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Weights in old checkpoints that can be computed from config.json."""


def import_model(
    model: str | Path,
    out: str | Path,
    *,
    corpus: str | None = None,
    context: int | None = None,
    show: bool = False,
) -> Run:
    """Write the model at `model`, a folder or a GGUF file, to the run folder `out`.

    `corpus`: default text for evaluation. `context`: a shorter context than the model's. `show`: show progress.
    """
    path, out = Path(model), Path(out)
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is there already; name a new folder for the imported model")
    found = read_checkpoint(path, show=show)
    try:
        family, shape = family_of(found.config), model_config(found.config, context)
        _check_tokenizer(found, shape)
        weights = _converted(found, family, shape, show)
    except UserError as error:
        raise UserError(f"{path} cannot be imported: {error}") from None
    config = RunConfig(
        DataConfig(corpus or NO_CORPUS, OWN_TOKENS),
        shape,
        DenseConfig(),
        TrainConfig(steps=1),  # the minimum for a run; nothing was trained here
        recipe=f"imported.{family}",
    )
    facts = {**environment(torch.device("cpu")), "imported_from": found.name, "imported_sha256": found.sha256}
    if corpus is not None:
        facts["corpus_sha256"] = data.load(config.data, found.tokenizer).fingerprint
    files = {"env.json": json_bytes(facts), "tokenizer.json": json_bytes(found.tokenizer.to_dict())}
    with Progress(f"writing {out}", show=show):
        _write(out, config, files, weights)
    return Run.open(out)


def _write(out: Path, config: RunConfig, files: dict[str, bytes], weights: dict[str, Tensor]) -> None:
    """Write the run folder atomically: it is renamed into place at the end."""
    whole = Path(os.path.abspath(out))
    part = whole.with_name(f".tmp-{whole.name}-{os.getpid()}")
    try:
        run = Run.create(part, config, resume=False)
        for name, content in files.items():
            write_bytes(run.path / name, content)
        run.finish({name: weight.numpy() for name, weight in weights.items()})
        with disk_faults(out):
            rename(part, whole)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _check_tokenizer(found: Checkpoint, shape: ModelConfig) -> None:
    tokens = found.tokenizer.vocab_size
    if tokens > shape.vocab_size:
        raise UserError(f"its tokenizer has {tokens} tokens, more than the {shape.vocab_size} of the model")
    if len(found.tokenizer.begins) >= shape.context:
        raise UserError(f"its context is {shape.context}; expected room for more than the beginning of a text")


def _converted(found: Checkpoint, family: str, shape: ModelConfig, show: bool) -> dict[str, Tensor]:
    """Convert all weights; missing or surplus ones, wrong shapes and non-finite values are errors."""
    expected = {name: weight.shape for name, weight in outline(RunConfig(model=shape)).state_dict().items()}
    needed, there = 8 * sum(map(torch.Size.numel, expected.values())), memory_bytes(torch.device("cpu"))
    if needed > there:
        raise UserError(f"it needs {needed / 2**30:.1f} GiB to be converted, and this machine has {there / 2**30:.1f}")
    opened = found.open_weights()
    left = {name for name in opened.shapes if not UNUSED.fullmatch(name)}

    with Progress("converting its weights", len(left), unit="weights", show=show) as progress:

        def take(name: str, wanted: tuple[int, ...]) -> Tensor:
            if name not in opened.shapes:
                raise UserError(f"its weight {name} is missing")
            if opened.shapes[name] != wanted:
                raise UserError(f"its weight {name} is of shape {list(opened.shapes[name])}; expected {list(wanted)}")
            weight = opened.read(name)
            if not weight.isfinite().all():
                raise UserError(f"its weight {name} has numbers that are not finite")
            left.discard(name)
            progress.advance()
            return weight

        weights = native_weights(family, shape, take)
        if shape.tie_head and "lm_head.weight" in left:  # some checkpoints store the tied embedding twice
            embedding = weights["embedding.weight"]
            if not torch.equal(take("lm_head.weight", tuple(embedding.shape)), embedding):
                raise UserError("its lm_head.weight is not the embedding, though tie_word_embeddings says so")
    if left:
        raise UserError(f"it has a weight that its config.json does not explain: {min(left)}")
    assert {name: weight.shape for name, weight in weights.items()} == expected
    return weights
