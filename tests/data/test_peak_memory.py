"""Building the tokens of a text takes memory for its pieces, not for the whole text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEGABYTES = 60

# The peak is reset if Linux allows it, so that the imports do not hide what the corpus takes.
_BUILD = """
import json, sys
from tokendepth.config import DataConfig
from tokendepth.data import load
def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))
try:
    import tokenizers
except ImportError:
    pass
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
data = load(DataConfig(corpus="text:" + sys.argv[1], tokens=sys.argv[2]))
print(json.dumps({"grown": status("VmHWM") - before, "bytes": data.split_bytes, "memmap": type(data.ids).__name__}))
"""


@pytest.fixture(scope="module")
def long_text(tmp_path_factory):
    """Sixty megabytes of words and lines, some of them not ASCII."""
    path = tmp_path_factory.mktemp("long") / "text"
    lines = "".join(
        f"Line {i * 7919 % 100_003}: it is {i} o'clock, said the café's clock — 中文.\n" for i in range(16_000)
    )
    piece = lines.encode()
    with open(path, "wb") as file:
        for _ in range(MEGABYTES * 10**6 // len(piece)):
            file.write(piece)
    return path


@pytest.mark.parametrize(
    ("tokens", "allowed"),
    [
        ("char", 50),  # 360 to 570 when the text was read at once
        ("byte", 30),  # 100 when it was read at once
        ("bpe:300", 100),  # most of it the library's, for training
    ],
)
def test_memory_does_not_grow_with_the_text(long_text, cache, tokens, allowed):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not tell the peak of a part of a program")
    if tokens.startswith("bpe"):
        pytest.importorskip("tokenizers")
        with open(long_text, "rb") as whole:  # an eighth shows the same, faster
            long_text = cache.parent / "eighth"
            long_text.write_bytes(whole.read(MEGABYTES * 10**6 // 8))
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, long_text, tokens],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["grown"] < allowed
    assert found["memmap"] == "memmap"
    assert sum(found["bytes"]) == long_text.stat().st_size
