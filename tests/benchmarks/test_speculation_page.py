"""The table of docs/SPECULATION.md: generated from rows, bad results too, and `not run` if there is none."""

import pytest

from benchmarks.speculation import TITLES, table
from paper.generated import render
from tokendepth.runs.results import add_rows


def row(**changes) -> dict:
    facts = {"benchmark": "speculation", "run": "span70", "dtype": "bfloat16", "device": "NVIDIA H200", "tokens": 1024}
    facts |= {
        "budget": None,
        "share": None,
        "temperature": 0.0,
        "torch": "2.11",
        "commit": "abc",
        "drafted": 900,
        "prompts": 8,
    }
    times = {"plain_tokens_per_s": [500.0, 490.0, 510.0], "speculation_tokens_per_s": [750.04, 740.0, 760.0]}
    times |= {"speedup": [1.5, 1.45, 1.55], "acceptance": 0.9123, "draft_length": 5.25, "formula_by_time": 1.6}
    return {**facts, **times, "tokens_that_differ": 3, "unexplained": 1, "pace": {"draft": 1.1}, **changes}


def lines(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_a_row_is_a_line():
    text = table([row()])
    assert lines(text) == [[
        "NVIDIA H200", "span70", "bfloat16", "8 x 128", "500.0", "750.0", "1.50x (1.45 to 1.55)", "timing",
        "0.912", "5.2", "1.60x", "0.94: met", "met", "3 of 1024 / 1",
    ]]  # fmt: skip
    assert text.endswith("\n\ntorch 2.11, commit abc.\n")


@pytest.mark.parametrize(
    ("changes", "of_formula", "speed"),
    [
        ({"speedup": [1.4, 1.3, 1.5], "formula_by_time": 1.57}, "0.89: **missed**", "met"),
        ({"speedup": [1.39, 1.3, 1.5], "formula_by_time": 1.5}, "0.93: met", "**missed**"),
        ({"drafted": 0, "speedup": [1.0, 0.9, 1.1]}, "\u2014", "**missed**"),
    ],
)
def test_what_is_wanted_is_judged_by_rule(changes, of_formula, speed):
    (line,) = lines(table([row(**changes)]))
    assert len(line) == len(TITLES)
    assert line[11:13] == [of_formula, speed]
    assert (line[8] == "nothing was drafted") == (changes.get("drafted") == 0)


def test_a_row_from_before_drafts_were_timed_says_so():
    old = row()
    del old["pace"]
    assert [line[7] for line in lines(table([row(), old]))] == ["timing", "weights"]


def test_gpus_come_first_and_what_was_asked_for_is_named():
    asked = row(budget=1.0, share=0.1, temperature=0.8, tokens_that_differ=0)
    found = lines(table([row(device="CPU x86_64, 2 threads", dtype="float32"), asked, row()]))
    assert [line[1] for line in found] == ["span70", "span70, budget 1, drafts at 0.1, temperature 0.8", "span70"]
    assert [line[0][:3] for line in found] == ["NVI", "NVI", "CPU"]
    assert found[1][-1] == "\u2014", "drawn tokens are compared with nothing"


def test_the_page_says_what_was_not_run(tmp_path):
    stale = "<!-- speculation: rows.json -->\nstale\n<!-- end -->"
    (line,) = lines(render(stale, tmp_path))
    assert line == ["not run", *[""] * (len(TITLES) - 1)]
    add_rows(tmp_path / "rows.json", [row()], identity=("run",))
    (line,) = lines(render(stale, tmp_path))
    assert line[1] == "span70"
