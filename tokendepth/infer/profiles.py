"""Timings of this machine, measured once and stored in the cache folder."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch

from tokendepth import __version__
from tokendepth.data.store import cache_folder
from tokendepth.errors import UserError
from tokendepth.model import LanguageModel
from tokendepth.progress import console
from tokendepth.runs.files import disk_faults, make_folder, read_sealed, write_sealed
from tokendepth.runs.machine import describe_device
from tokendepth.runs.shapes import COUNT, Object, problem

VERSION = 2  # of the profile file; version 1 had no checksum


def remembered(
    file: str,
    model: LanguageModel,
    key: list[Any],
    measure: Callable[[], dict[str, Any]],
    kind: Object,
    *,
    again: bool = False,
) -> dict[str, Any]:
    """The result of `measure`, stored by device, torch version, model shape and `key`.

    kind: the schema of a profile. If the file is damaged, it is measured again.
    """
    path = cache_folder() / file
    name = json.dumps([describe_device(model.norm.weight.device), torch.__version__, _shape(model), *key])
    kept = _kept(path, kind)
    if name in kept and not again:
        return kept[name]
    found = measure()
    try:
        with disk_faults(path):
            make_folder(path.parent)
        # Read again: another process may have added a profile in the meantime.
        write_sealed(path, {"version": VERSION, "profiles": {**_kept(path, kind), name: found}})
    except UserError as error:
        line = f"{path} could not be written, so this is measured again next time: {str(error).splitlines()[0]}"
        console.print(line, markup=False, soft_wrap=True)
    return found


def _kept(path, kind: Object) -> dict[str, Any]:
    """The stored profiles; none if the file is missing or damaged."""
    try:
        tree, is_sealed = read_sealed(path, VERSION)
    except UserError:
        return {}
    profiles = Object(needed={"version": COUNT, "profiles": Object(other=kind)})
    return tree["profiles"] if is_sealed and not problem(tree, profiles) else {}


def _shape(model: LanguageModel) -> list:
    form = [type(model).__name__, str(model.norm.weight.dtype)]  # a compiled model has another type
    knobs = dataclasses.asdict(model.method.config)  # pyright: ignore[reportArgumentType] - each is a dataclass
    return [__version__, *form, type(model.method).__name__, knobs, *dataclasses.astuple(model.config)]
