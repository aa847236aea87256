import dataclasses
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from tokendepth.config import DataConfig
from tokendepth.data import load
from tokendepth.data import store as store_module
from tokendepth.data.store import LEFT_OVER_AFTER_S, cache_folder
from tokendepth.errors import UserError

TEXT = "Wer reitet so spät durch Nacht und Wind? " * 20


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return DataConfig(corpus=f"text:{tmp_path / 'text.txt'}")


def cached(cache, suffix):
    (path,) = (cache / "tokens").glob(f"*{suffix}")
    return path


def loaded_to_memory(config):
    """A damaged file must not affect the dataset that it is compared with."""
    data = load(config)
    return dataclasses.replace(data, ids=np.array(data.ids))


def assert_same(one, other):
    np.testing.assert_array_equal(one.ids, other.ids)
    assert one.ids.dtype == other.ids.dtype
    for name in ("name", "fingerprint", "tokenizer", "ends", "split_bytes"):
        assert getattr(one, name) == getattr(other, name)


def test_the_second_load_is_the_same_and_memory_mapped(config, cache, capsys):
    first = load(config)
    ids_file = cached(cache, ".npy")
    stamp = ids_file.stat().st_mtime_ns
    second = load(config)
    for data in (first, second):
        assert isinstance(data.ids, np.memmap)
        assert not data.ids.flags.writeable
    assert_same(first, second)
    assert ids_file.stat().st_mtime_ns == stamp
    assert capsys.readouterr().err == ""
    np.testing.assert_array_equal(
        first.train_batch(seed=0, step=0, batch_size=4, context=8),
        second.train_batch(seed=0, step=0, batch_size=4, context=8),
    )


def test_token_kinds_and_corpora_do_not_share_an_entry(config, cache):
    load(config)
    assert load(DataConfig(corpus=config.corpus, tokens="byte")).tokenizer.vocab_size == 256
    assert len(list((cache / "tokens").glob("*.npy"))) == 2


def test_the_index_names_no_path_of_the_users(config, cache, tmp_path):
    load(config)
    assert str(tmp_path) not in cached(cache, ".json").read_text()


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-7])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, empty])
def test_damage_is_noticed_named_and_repaired(config, cache, capsys, suffix, damage):
    first = loaded_to_memory(config)
    whole = cached(cache, suffix).read_bytes()
    damage(cached(cache, suffix))
    assert_same(first, load(config))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(cached(cache, ".npy")) in said
    assert "damaged" in said
    assert cached(cache, suffix).read_bytes() == whole
    load(config)
    assert capsys.readouterr().err == ""


def test_every_changed_byte_of_the_index_is_noticed(config, cache, capsys):
    first = loaded_to_memory(config)
    index = cached(cache, ".json")
    whole = index.read_bytes()
    for place in range(0, len(whole), 7):
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        assert_same(first, load(config))
        assert "damaged" in capsys.readouterr().err, place


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"sha256": "", "index": {}}', "[" * 100_000, '{"index": null}'])
def test_an_index_of_another_shape_is_rebuilt(config, cache, capsys, content):
    first = loaded_to_memory(config)
    cached(cache, ".json").write_text(content)
    assert_same(first, load(config))
    assert "damaged" in capsys.readouterr().err


def test_missing_ids_are_rebuilt(config, cache, capsys):
    first = loaded_to_memory(config)
    cached(cache, ".npy").unlink()
    assert_same(first, load(config))
    assert "No such file" in capsys.readouterr().err
    assert cached(cache, ".npy").is_file()


def test_an_entry_of_another_version_is_replaced_without_a_word(config, cache, capsys, monkeypatch):
    load(config)
    monkeypatch.setattr(store_module, "CACHE_VERSION", 2)
    load(config)
    assert json.loads(cached(cache, ".json").read_bytes())["index"]["version"] == 2
    assert capsys.readouterr().err == ""


def test_a_cache_that_cannot_be_made_costs_one_line(config, cache, capsys):
    first = loaded_to_memory(config)
    for path in (cache / "tokens").iterdir():
        path.unlink()
    (cache / "tokens").rmdir()
    (cache / "tokens").write_text("in the way")
    second = load(config)
    assert_same(first, second)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(cache / "tokens") in said
    assert "TOKENDEPTH_CACHE" in said


def test_a_full_disk_costs_one_line_and_leaves_no_part(config, cache, capsys, monkeypatch):
    class Full(io.FileIO):
        def write(self, content):
            if self.tell() > 100:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(content)

    monkeypatch.setattr(store_module, "open", Full, raising=False)
    data = load(config)
    assert data.tokenizer.decode(data.ids) == TEXT
    assert_no_space_was_told(capsys, cache)


def assert_no_space_was_told(capsys, cache):
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "No space left on device" in said
    assert list((cache / "tokens").iterdir()) == []


def test_a_disk_with_too_little_space_is_not_filled_first(config, cache, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=len(TEXT) - 1))
    monkeypatch.setattr(store_module, "_npy_header", None)
    data = load(config)
    assert data.tokenizer.decode(data.ids) == TEXT
    assert_no_space_was_told(capsys, cache)


def test_tokens_that_fit_neither_the_disk_nor_the_memory_are_refused(config, cache, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=0))
    monkeypatch.setattr(store_module, "MOST_IN_MEMORY", len(TEXT) - 1)
    with pytest.raises(UserError, match=r"too much to stay in memory; set TOKENDEPTH_CACHE"):
        load(config)
    assert_no_space_was_told(capsys, cache)


@pytest.mark.parametrize("length", [0, 1, 255, 10**6, 10**12])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_the_header_is_numpys_and_leaves_room_for_any_length(length, dtype):
    header = store_module._npy_header(np.dtype(dtype), length)
    assert len(header) == len(store_module._npy_header(np.dtype(dtype), 0))
    if length < 10**12:
        file = io.BytesIO()
        np.save(file, np.zeros(length, dtype), allow_pickle=False)
        assert file.getvalue()[: len(header)] == header


def test_left_overs_of_killed_processes_are_removed_and_young_ones_kept(config, cache):
    load(config)
    ids_file = cached(cache, ".npy")
    old, young = (ids_file.with_name(f".tmp-{name}-{ids_file.name}") for name in ("old", "young"))
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    long_ago = time.time() - LEFT_OVER_AFTER_S - 60
    os.utime(old, (long_ago, long_ago))
    flip_a_bit(ids_file)
    load(config)
    assert young.exists()
    assert not old.exists()


def test_processes_that_build_at_once_leave_one_good_entry(config, cache, capsys):
    program = (
        "import sys; from tokendepth.config import DataConfig; from tokendepth.data import load; "
        "print(load(DataConfig(corpus=sys.argv[1])).fingerprint)"
    )
    root = Path(__file__).parents[2]
    workers = [
        subprocess.Popen([sys.executable, "-c", program, config.corpus], cwd=root, stdout=-1, stderr=-1, text=True)
        for _ in range(4)
    ]
    said = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert {out for out, _ in said} == {load(config).fingerprint + "\n"}
    assert [err for _, err in said] == [""] * 4
    assert isinstance(load(config).ids, np.memmap)
    assert len(list((cache / "tokens").iterdir())) == 2


def test_where_the_cache_folder_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("TOKENDEPTH_CACHE", "")
    assert cache_folder() == tmp_path / "xdg" / "tokendepth"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "tokendepth"
