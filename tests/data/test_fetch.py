import dataclasses
import errno
import functools
import hashlib
import http.server
import io
import lzma
import os
import threading
import urllib.request
import zipfile

import numpy as np
import pytest

from tokendepth.config import DataConfig
from tokendepth.data import load
from tokendepth.data.fetch import PUBLISHED
from tokendepth.errors import UserError

CONTENT = b"".join(b"line %d of a small corpus\n" % i for i in range(200))
CONFIG = DataConfig(corpus="enwik8")

real_urlopen = urllib.request.urlopen


@pytest.fixture(autouse=True)
def small_corpora(monkeypatch):
    """enwik8 and shakespeare with small content instead of their own."""
    for name in ("enwik8", "shakespeare"):
        small = {"sha256": hashlib.sha256(CONTENT).hexdigest(), "size": len(CONTENT)}
        if name == "enwik8":
            small["train_and_val"] = (3000, 4000)
        monkeypatch.setitem(PUBLISHED, name, dataclasses.replace(PUBLISHED[name], **small))


def zipped(content, member="enwik8"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(member), content, zipfile.ZIP_DEFLATED)  # without a timestamp
    return file.getvalue()


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("TOKENDEPTH_DATA", str(folder))
    return folder


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """A function that serves bytes at the address of enwik8, from a server on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(urllib.request, "urlopen", real_urlopen)
    address = f"http://127.0.0.1:{server.server_port}/enwik8.zip"
    monkeypatch.setitem(PUBLISHED, "enwik8", dataclasses.replace(PUBLISHED["enwik8"], address=address))
    yield (folder / "enwik8.zip").write_bytes
    server.shutdown()
    server.server_close()


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [("enwik8", CONTENT), ("enwik8.xz", lzma.compress(CONTENT)), ("enwik8.zip", zipped(CONTENT))],
)
def test_a_local_copy_in_any_form_is_read(data_folder, name, content):
    (data_folder / name).write_bytes(content)
    data = load(CONFIG)
    assert data.tokenizer.decode(data.ids).encode() == CONTENT
    assert data.ends == (3000, 4000, len(CONTENT))
    assert data.fingerprint == hashlib.sha256(CONTENT).hexdigest()


def test_a_copy_in_the_cache_folder_is_found_where_the_data_folder_has_none(data_folder, cache):
    cache.mkdir()
    (cache / "tinyshakespeare.txt").write_bytes(CONTENT)
    assert len(load(DataConfig(corpus="shakespeare")).ids) == len(CONTENT)


def test_the_second_load_needs_no_source(data_folder):
    (data_folder / "enwik8").write_bytes(CONTENT)
    first = load(CONFIG)
    (data_folder / "enwik8").unlink()
    second = load(CONFIG)
    assert isinstance(second.ids, np.memmap)
    np.testing.assert_array_equal(first.ids, second.ids)


def test_the_same_content_as_a_text_has_its_own_splits(data_folder):
    (data_folder / "enwik8").write_bytes(CONTENT)
    assert load(CONFIG).ends[:2] == (3000, 4000)
    own = load(DataConfig(corpus=f"text:{data_folder / 'enwik8'}"))
    assert own.ends[:2] == (len(CONTENT) * 8 // 10, len(CONTENT) * 9 // 10)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("enwik8", CONTENT[:-1], "SHA-256 begins"),
        ("enwik8", CONTENT + b"!", "SHA-256 begins"),
        ("enwik8", b"", "SHA-256 begins"),
        ("enwik8.xz", lzma.compress(CONTENT)[:-20], "damaged"),
        ("enwik8.xz", b"no xz", "damaged"),
        ("enwik8.zip", zipped(CONTENT)[:-20], "damaged"),
        ("enwik8.zip", zipped(CONTENT, "other"), "damaged"),
        ("enwik8.zip", zipped(CONTENT.swapcase()), "SHA-256 begins"),
    ],
)
def test_a_wrong_local_copy_is_refused_by_name(data_folder, cache, name, content, complaint):
    (data_folder / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load(CONFIG)
    said = one_line(error)
    assert str(data_folder / name) in said
    assert complaint in said
    assert "delete it" in said
    if complaint == "SHA-256 begins":
        assert hashlib.sha256(CONTENT).hexdigest()[:12] in said
    assert not (cache / "tokens").exists()


def test_a_flipped_bit_of_a_compressed_copy_is_noticed(data_folder):
    content = bytearray(lzma.compress(CONTENT))
    content[len(content) // 2] ^= 1
    (data_folder / "enwik8.xz").write_bytes(content)
    with pytest.raises(UserError, match=r"enwik8.xz is (damaged|not enwik8)"):
        load(CONFIG)


@pytest.mark.parametrize("corpus", ["shakespeare", "enwik8"])
def test_without_network_and_copy_the_remedy_is_told(corpus):
    with pytest.raises(UserError) as error:
        load(DataConfig(corpus=corpus))
    said = one_line(error)
    assert corpus in said
    assert "TOKENDEPTH_DATA" in said
    assert PUBLISHED[corpus].file_names[0] in said
    assert "no network in tests" in said


def test_a_download_is_checked_kept_and_not_repeated(serve, cache):
    serve(zipped(CONTENT))
    assert load(CONFIG).tokenizer.decode(load(CONFIG).ids).encode() == CONTENT
    assert (cache / "enwik8.zip").read_bytes() == zipped(CONTENT)
    serve(b"gone")
    byte_data = load(DataConfig(corpus="enwik8", tokens="byte"))
    assert byte_data.ids.tobytes() == CONTENT


@pytest.mark.parametrize(
    "content",
    [zipped(CONTENT[1:]), zipped(CONTENT)[:100], b"<html>please log in</html>", b"x" * 2_000_000],
    ids=["other", "cut", "page", "noise"],
)
def test_a_wrong_download_is_refused_and_leaves_nothing(serve, cache, content):
    serve(content)
    with pytest.raises(UserError) as error:
        load(CONFIG)
    said = one_line(error)
    assert PUBLISHED["enwik8"].address in said
    assert "download it again" in said
    assert list(cache.iterdir()) == []


def test_an_address_that_is_gone_is_told(serve):
    with pytest.raises(UserError, match=r"cannot be downloaded from 127.0.0.1:\d+ \(HTTP Error 404.*TOKENDEPTH_DATA"):
        load(CONFIG)


def test_a_download_into_a_cache_that_cannot_be_made_is_one_line(serve, cache):
    serve(zipped(CONTENT))
    cache.write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*enwik8.zip: .*; set TOKENDEPTH_CACHE"):
        load(CONFIG)


def test_a_connection_that_breaks_off_is_one_line(monkeypatch, cache):
    class Broken(io.BytesIO):
        length = 1000

        def read(self, size=-1):
            if self.tell():
                raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            return super().read(10)

    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: Broken(bytes(1000)))
    with pytest.raises(UserError, match=r"enwik8 .* cannot be downloaded .*Connection reset by peer"):
        load(CONFIG)
    assert list(cache.iterdir()) == []


def test_a_download_that_never_ends_is_cut_off(monkeypatch, cache):
    class Endless(io.BytesIO):
        length = None
        reads = 0

        def read(self, size=-1):
            Endless.reads += 1
            assert Endless.reads < 10
            return bytes(size)

    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: Endless())
    with pytest.raises(UserError, match="download it again"):
        load(CONFIG)
    assert list(cache.iterdir()) == []


def test_the_network_is_asked_with_a_time_limit(monkeypatch):
    asked = {}

    def urlopen(request, timeout):
        asked.update(timeout=timeout, address=request.full_url)
        raise TimeoutError("timed out")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(UserError, match="timed out"):
        load(CONFIG)
    assert asked == {"timeout": 20, "address": "https://mattmahoney.net/dc/enwik8.zip"}
