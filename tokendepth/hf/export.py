"""export: write a finished run as a folder that transformers can load, atomically."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from tokendepth.data.of_run import tokenizer_of
from tokendepth.data.tokenizer import BOS, EOS, PAD, Tokenizer
from tokendepth.errors import UserError
from tokendepth.hf.card import model_card
from tokendepth.hf.configuration import MODULES, TokenDepthConfig
from tokendepth.hf.modeling import TokenDepthForCausalLM
from tokendepth.hf.tokenizer import fast_tokenizer
from tokendepth.measure.evaluate import load_model
from tokendepth.runs.files import disk_faults, make_folder, remove_left_overs, rename, sync_folder
from tokendepth.runs.run import Run

OURS = re.compile(
    r"config\.json|generation_config\.json|README\.md|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    rf"|model(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index\.json|({'|'.join(MODULES.values())})\.py"
)
"""Files that an export may contain."""


def export(run: Run, out: str | Path) -> Path:
    """Write the model of a finished run, its tokenizer and a model card into the folder `out`; returns its path.

    An existing export is replaced.
    """
    out = Path(os.path.abspath(out))
    _check_free(out)
    native, tokenizer = load_model(run, torch.device("cpu")), tokenizer_of(run)
    card = model_card(run, out.name, sum(weight.numel() for weight in native.parameters()))
    model = TokenDepthForCausalLM(TokenDepthConfig.of(run.config, **_special_ids(tokenizer)))
    model.model.load_state_dict(native.state_dict())
    with disk_faults(out), _appearing_whole(out) as folder, _no_progress_bars():
        model.save_pretrained(folder)
        fast_tokenizer(tokenizer, run.config.model.context).save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return out


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids of the special tokens that `generate()` needs."""
    if tokenizer.kind == "symbol":
        return {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    bos = {"bos_token_id": tokenizer.begins[0]} if tokenizer.begins else {}
    return bos | ({"eos_token_id": list(tokenizer.stops)} if tokenizer.stops else {})


def _check_free(out: Path) -> None:
    if os.path.lexists(out) and not out.is_dir():
        raise UserError(f"{out} is a file; expected a folder for the export; choose another")
    stray = sorted(path.name for path in out.iterdir() if not OURS.fullmatch(path.name)) if out.is_dir() else []
    if stray:
        raise UserError(
            f"{out} holds {stray[0]}, which is not a file of an export; choose an empty folder or a new one"
        )


@contextlib.contextmanager
def _appearing_whole(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `out` once its files are synced to disk."""
    make_folder(out.parent)
    remove_left_overs(out.parent, re.escape(out.name))
    folder, old = (out.with_name(f".tmp-{out.name}-{number}") for number in (os.getpid(), f"{os.getpid()}0"))
    folder.mkdir()
    try:
        yield folder
        for path in folder.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(folder)
        if out.is_dir():
            rename(out, old)
        rename(folder, out)
    finally:
        for path in (folder, old):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
