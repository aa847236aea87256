"""The tables of docs/SERVE.md: generated from rows, bad results too."""

import re

from benchmarks import serving


def row(**changes) -> dict:
    facts = {"benchmark": "serve", "server": "tokendepth", "run": "small", "device": "CPU, 2 threads", "slots": 16}
    facts |= {"execution": "sparse", "clients": 16, "requests": 64, "tokens": 32, "prompt_words": 12, "commit": "abc"}
    times = {"tokens_per_s": 90.0, "first_token_ms": [10.0, 20.0, 30.0], "token_ms": [4.0, 5.0, 6.0]}
    times |= {"request_ms": [100.0, 200.0, 345.0], "flops_skipped": 0.25, "others_cores": 0.1, "differing_texts": 0}
    return {**facts, **times, "torch": "2", **changes}


ROWS = [
    row(),
    row(slots=1, tokens_per_s=30.0),
    row(execution="hard", tokens_per_s=100.0, flops_skipped=-0.01, differing_texts=2, others_cores=1.5),
    row(execution="hard", slots=1, tokens_per_s=40.0),
    row(server="stock 1.0", execution="dense", slots=None, tokens_per_s=45.0, others_cores=None),
]


def lines(of: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in of.splitlines() if line.startswith("|")]


def test_every_row_is_a_line_of_its_model_ours_first():
    text = serving.table(ROWS)
    found = lines(text[text.index("**small**") :])
    assert [line[:4] for line in found[2:7]] == [
        ["tokendepth", "skipping", "16", "16"],
        ["tokendepth", "skipping", "1", "16"],
        ["tokendepth", "the same weights, dense", "16", "16"],
        ["tokendepth", "the same weights, dense", "1", "16"],
        ["stock 1.0", "dense model", "default", "16"],
    ]
    assert found[2][4:] == ["90.0", "10", "4", "100", "345", "25%", "0.1"]
    assert found[4][9:] == ["-1%", "**1.5**"], "a row that was disturbed says so"
    assert found[6][9:] == ["\u2014" if "flops_skipped" not in ROWS[4] else "25%", "\u2014"]


def test_what_is_wanted_is_judged_by_rule():
    text = re.sub(" +", " ", serving.table(ROWS))
    assert text.startswith("| model | clients | comparison | throughput | target |"), "the comparisons come first"
    assert "| small | 16 | skipping, 16 slots vs. 1 | 3.00x | 3x: met |" in text
    assert "| small | 16 | dense, 16 slots vs. 1 | 2.50x | 3x: **missed**, on a busy machine |" in text
    assert "skipping vs. dense, same weights; 2 of 64 texts differ | 0.90x" in text
    assert "tokendepth vs. stock 1.0 | 2.00x" in text


def test_models_have_parts_of_their_own():
    text = serving.table([*ROWS, row(run="large", execution="dense")])
    assert re.findall(r"\*\*(\w+)\*\* on CPU", text) == ["large", "small"]
    assert "\n32 tokens per request after a prompt of 12 words, greedy, float32; torch 2, commit abc.\n" in text


def test_a_note_stands_above_the_rows_that_it_is_about(monkeypatch):
    monkeypatch.setattr(serving, "NOTES", {("small", "abc"): "Measured earlier.\n\n"})
    assert "**small** on CPU, 2 threads:\n\nMeasured earlier.\n\n| server |" in serving.table(ROWS)
    assert "Measured earlier" not in serving.table([row(commit="def")])


def test_a_share_that_rounds_to_nothing_has_no_sign():
    assert lines(serving.table([row(flops_skipped=-0.004)]))[-1][9] == "0%"
