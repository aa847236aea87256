"""Read a Hugging Face model from disk: a folder of safetensors, or a GGUF file.

A folder is read strictly and without transformers. A GGUF file is read by transformers, which dequantises its weights
to float32. Pickles are never read.
"""

import contextlib
import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokendepth.data.bpe import BPETokenizer, tokenizers_library
from tokendepth.data.imported import ImportedTokenizer
from tokendepth.errors import UserError
from tokendepth.progress import Progress
from tokendepth.runs.files import read_bytes, read_json, sha256

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
AGAIN = "download it again"


class Weights(ABC):
    """Weights that are read one at a time, as float32."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes by name."""

    @abstractmethod
    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk."""

    name: str
    sha256: str
    config: dict[str, Any]
    tokenizer: ImportedTokenizer
    open_weights: Callable[[], Weights]
    """Opens the weights. It may be slow, so call it once the config is known to be importable."""


def read_checkpoint(path: Path, *, show: bool = False) -> Checkpoint:
    """The model at `path`, a folder or a GGUF file; UserError if it is incomplete, damaged or unsafe to read."""
    if os.path.isdir(path):
        return _read_folder(path, show)
    if not os.path.isfile(path):
        hub = f"download it first, as by: hf download {path} --local-dir FOLDER"
        raise UserError(f"{path}: no such folder or file; name a folder with config.json, or a GGUF file; {hub}")
    if path.suffix in PICKLES:
        raise _pickled(path)
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{path} is not a GGUF file; name one, or the folder that holds config.json")
    return _read_gguf(path, show)


# --- a folder ---------------------------------------------------------------------------------------------------------


def _read_folder(folder: Path, show: bool) -> Checkpoint:
    if not os.path.isfile(folder / "config.json"):
        raise UserError(f"{folder} is not a model of Hugging Face: it has no config.json; name a folder that has one")
    config, weights = _object(folder / "config.json"), _weight_files(folder)
    if not os.path.isfile(folder / "tokenizer.json"):
        raise UserError(f"{folder} has no tokenizer.json; {AGAIN} with it, or save one by transformers' AutoTokenizer")
    described = [folder / name for name in ("config.json", "generation_config.json", "tokenizer.json")]
    described += [folder / name for name in ("tokenizer_config.json", "chat_template.jinja")]
    parts = sorted([*filter(os.path.isfile, described), *weights])
    with Progress(f"reading {folder}", len(parts), unit="files", show=show) as progress:
        lines = []
        for part in parts:
            lines.append(f"{sha256(part)}  {part.name}\n")
            progress.advance()
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()  # the same as: sha256sum FILES | sha256sum
    settings = _object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    template = settings.get("chat_template")
    if os.path.isfile(folder / "chat_template.jinja"):
        template = read_bytes(folder / "chat_template.jinja").decode("utf-8", "replace")
    generation = folder / "generation_config.json"
    stops = (_object(generation) if generation.exists() else config).get("eos_token_id")
    tokenizer = make_tokenizer(read_json(folder / "tokenizer.json", AGAIN), stops, template, str(folder))
    return Checkpoint(folder.resolve().name, digest, config, tokenizer, lambda: Safetensors(weights))


def _object(path: Path) -> dict[str, Any]:
    tree = read_json(path, AGAIN)
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a JSON object; {AGAIN}")
    return tree


def _weight_files(folder: Path) -> list[Path]:
    """The weight files; those of a sharded model are in its index."""
    if os.path.isfile(folder / WEIGHTS):
        return [folder / WEIGHTS]
    if not os.path.isfile(folder / INDEX):
        pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise _pickled(pickles[0])
        raise UserError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}; {AGAIN}")
    index = _object(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise UserError(f"{folder / INDEX} is damaged: it has no weight_map; {AGAIN}")
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{folder / INDEX} names {name!r}; expected a .safetensors file in the same folder")
        if not os.path.isfile(folder / name):
            raise UserError(f"{folder / name} is missing, and {INDEX} names it; {AGAIN}")
    return [folder / name for name in names]


class Safetensors(Weights):
    """Weights in safetensors files; at first only the headers are read."""

    def __init__(self, paths: list[Path]) -> None:
        self.shapes = {}
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                opened = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path.name} is damaged or not whole ({str(error)[:80]}); {AGAIN}") from None
            for name in opened.keys():  # noqa: SIM118 - not a dict
                part = opened.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    remedy = "take the unquantised checkpoint, or a GGUF file of it"
                    raise UserError(f"its weight {name} has numbers of type {part.get_dtype()}; {remedy}")
                if name in self._files:
                    raise UserError(f"its weight {name} is in two files, {path.name} and another; {AGAIN}")
                self.shapes[name], self._files[name] = tuple(part.get_shape()), opened

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name).float()


def _pickled(path: Path) -> UserError:
    return UserError(
        f"{path} is a pickle, which may run any code when it is read; take the model's safetensors, or convert it "
        "where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
    )


# --- a GGUF file ------------------------------------------------------------------------------------------------------


def _read_gguf(path: Path, show: bool) -> Checkpoint:
    with Progress("loading transformers", show=show):
        transformers = transformers_library()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with Progress(f"reading {path}", show=show) as progress, _faults_of(path):
        digest = sha256(path)
        config = transformers.AutoConfig.from_pretrained(**where).to_dict()
        progress.update(note="its tokenizer")
        auto = transformers.AutoTokenizer.from_pretrained(**where)
        tree = json.loads(auto.backend_tokenizer.to_str())
        # transformers adds special tokens usual for the tokenizer class; the model has no embeddings for them.
        tree["added_tokens"] = [one for one in tree["added_tokens"] if one["id"] < config["vocab_size"]]
    tokenizer = make_tokenizer(tree, config.get("eos_token_id"), auto.chat_template, str(path))

    def open_weights() -> Weights:
        quiet = contextlib.nullcontext() if show else contextlib.redirect_stderr(io.StringIO())  # hide its bar
        with Progress(f"dequantising {path}", show=show), _faults_of(path), quiet:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.float32, output_loading_info=True
            )
        for kind, names in info.items():
            if names:
                raise UserError(f"it does not fit its architecture ({kind}: {sorted(map(str, names))[0]}); {AGAIN}")
        return InMemory(model.state_dict())

    return Checkpoint(path.name, digest, config, tokenizer, open_weights)


class InMemory(Weights):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.shapes, self._tensors = {name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors

    def read(self, name: str) -> Tensor:
        return self._tensors[name].float()


def transformers_library() -> Any:
    """transformers with its messages silenced; we report problems ourselves."""
    remedy = "pip install 'tokendepth[hf]'"
    try:
        import gguf as _gguf  # noqa: F401 - without it, transformers fails later with an unclear error
        import transformers
    except ImportError as error:
        raise UserError(f"a GGUF file needs the package {error.name}, not installed; {remedy}") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@contextlib.contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turn any exception into a UserError: transformers has no specific one for unreadable GGUF files."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:120]
        raise UserError(f"transformers cannot read {path} ({type(error).__name__}: {words}); {AGAIN}") from error


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def make_tokenizer(tree: Any, stops: Any, template: Any, said: str) -> ImportedTokenizer:
    """From a tokenizer.json, a config's end-of-text ids and a chat template, each as found in the files."""
    tokenizers_library()
    try:
        plain = BPETokenizer.from_tree(tree)
    except UserError as error:
        raise UserError(f"{said}: its tokenizer is {error}; {AGAIN}") from None
    begins = _begins(plain, said)
    ends = stops if isinstance(stops, list) else [] if stops is None else [stops]
    known = tuple(i for i in ends if type(i) is int and 0 <= i < plain.vocab_size)
    if isinstance(template, list):  # several templates, by name
        template = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}.get(
            "default"
        )
    return ImportedTokenizer(plain.text, begins, known, template if isinstance(template, str) else None)


def _begins(plain: BPETokenizer, said: str) -> tuple[int, ...]:
    """Tokens that the tokenizer's post-processor prepends to every text, as in transformers 5."""
    with_special, without = plain.with_special_tokens("a"), plain.encode("a")
    begins = with_special[: len(with_special) - len(without)]
    if with_special != [*begins, *without]:
        raise UserError(
            f"{said}: its tokenizer puts tokens after every text ({with_special}); a decoder cannot continue"
        )
    return tuple(begins)
