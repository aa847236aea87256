"""The speed of retrofitted models on docs/RETROFIT.md."""

import json

from paper.retrofit_speed import UNTIMED, section, summary


def row(**changes) -> dict:
    given = {
        "execution": "sparse", "run": None, "shape": "tiny", "device": "NVIDIA H200", "batch": 8, "context": 1024,
        "asked": 0.7, "active_fraction": 0.7, "dense_ms": [7.0], "sparse_ms": [5.0], "speedup": 1.4, "ceiling": 1.5,
        "efficiency": 0.8,
    }  # fmt: skip
    return given | changes


def write(folder, **rows) -> None:
    for name, found in rows.items():
        (folder / f"{name}.json").write_text(json.dumps(found))


def test_without_rows_nothing_was_run(tmp_path):
    assert "| not run |" in section(tmp_path, "tiny")


def test_a_run_of_the_base_takes_the_place_of_its_shape_on_the_same_device(tmp_path):
    timed = row(run="tiny-span-0.7", shape="tiny-span-0.7", device="CPU x86_64, 2 threads", asked=None)
    write(tmp_path, forward=[row(), row(device="CPU x86_64, 2 threads"), timed, row(run="tinier", shape="tinier")])
    lines = [line for line in section(tmp_path, "tiny").splitlines() if line.startswith("| prefill")]
    assert [line.split(" | ")[1] for line in lines] == ["tiny-span-0.7", "its shape, random decisions"]
    assert "NVIDIA H200" in lines[1]


def test_the_note_explains_a_shape_only_if_there_is_one(tmp_path):
    words = UNTIMED.split()[-3:]
    write(tmp_path, forward=[row(run="tiny-span-0.7")])
    assert words != section(tmp_path, "tiny").split("\n\n")[1].split()[-3:]
    write(tmp_path, forward=[row()])
    assert words == section(tmp_path, "tiny").split("\n\n")[1].split()[-3:]


def test_the_summary_is_of_one_run(tmp_path):
    assert summary(tmp_path, "tiny-span-0.7") == ""
    write(tmp_path, forward=[row(), row(run="tiny-span-0.7", speedup=1.3), row(run="tiny-span-0.9")])
    assert summary(tmp_path, "tiny-span-0.7") == " Prefill speed relative to dense: 1.30x on NVIDIA H200, batch 8."


def test_verdicts(tmp_path):
    cpu = {"device": "CPU x86_64, 2 threads"}
    write(tmp_path, forward=[row(), row(batch=64, efficiency=0.9), row(**cpu, speedup=0.9, efficiency=-0.2)],
          decode=[row(speedup=0.7, efficiency=-0.6), row(asked=1.0, efficiency=None), row(**cpu)])  # fmt: skip
    ends = [line.split(" | ")[-1] for line in section(tmp_path, "tiny").splitlines() if line[:5] in ("| pre", "| dec")]
    assert ends == [
        "efficiency 0.85: **missed** (0.80) |", "efficiency 0.85: met (0.90) |", "faster than dense: **missed** |",
        "faster than dense: **missed** |", "— |", "faster than dense: met |",
    ]  # fmt: skip


def test_what_did_not_skip_is_no_row(tmp_path):
    write(tmp_path, forward=[row(execution="soft")])
    assert "| not run |" in section(tmp_path, "tiny")
