"""The passage of a heat map: it begins at a word, its lines end between words, and white space is visible."""

import pytest

from tests.report.fakes import budget_evaluation, passage, tsa_evaluation
from tokendepth.report import build, rows
from tokendepth.report.heatmap import COLUMNS, _wrap
from tokendepth.report.records import first_word, visible


@pytest.mark.parametrize(
    ("pieces", "first"),
    [
        (list("nctools↵import inspect"), "import"),
        (list("nctools\nimport"), "import"),
        (list("x =  (a + b)"), "b"),
        (["nct", "ools", " import", " ins", "pect"], " import"),  # a BPE
        ([" whole", " words"], " whole"),
        (["<bos>", "a", "b", "<sep>", "b", "a"], "<bos>"),  # nothing separates words here
        (list("word"), "word"),
    ],
)
def test_it_begins_at_a_word(pieces, first):
    assert "".join(pieces[first_word(pieces) :]).startswith(first)


def test_decisions_and_surprisal_stay_with_their_tokens(make_run):
    told = passage("ools import inspect")
    evaluation = {**tsa_evaluation(), "passage": told}
    found = rows([make_run("tsa", evaluation=evaluation)])[0].records[0].passage
    assert found
    assert "".join(found.pieces) == "import inspect"
    assert found.hard == [row[5:] for row in told["hard"]]
    assert found.soft == [row[5:] for row in told["soft"]]
    assert found.surprisal == told["surprisal"][5:]


def test_a_method_without_a_soft_mode_shows_its_decisions_alone(make_run):
    found = rows([make_run("b", "budget", evaluation=budget_evaluation())])[0].records[0].passage
    assert found
    assert list(found.modes) == ["hard"]


def test_a_line_of_the_text_is_a_line_of_the_page(make_run, tmp_path):
    evaluation = {**tsa_evaluation(), "passage": passage("a import b↵import c↵d")}
    assert build([make_run("tsa", evaluation=evaluation)], tmp_path / "out").read_text().count("<br>") == 2


def test_lines_of_the_map_end_between_words():
    text = "Before we proceed any further, hear me speak. You are all resolved rather to die than to famish?"
    lines = _wrap([visible(c) for c in text])
    assert ["".join(line) for line in lines] == [
        "Before·we·proceed·any·further,·hear·me·",
        "speak.·You·are·all·resolved·rather·to·die·",
        "than·to·famish?",
    ]
    unbroken = _wrap(["x"] * (COLUMNS + 5))
    assert [len(line) for line in unbroken] == [COLUMNS, 5]
