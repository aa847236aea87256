"""The glossary: one plain sentence for every term on the page that a newcomer may not know."""

import re

import pytest

from tests.report.fakes import budget_evaluation, dense_evaluation, metrics, tsa_evaluation
from tests.report.test_report_build import Page
from tokendepth.report import build
from tokendepth.report.glossary import GLOSSARY
from tokendepth.report.summary import COLUMNS

JARGON = (
    "soft", "hard", "sparse", "active fraction", "TLOps", "TLOps saved", "FLOPs skipped", "work skipped", "budget",
    "dial", "dense", "router", "executed", "collapses when executed", "seed", "loss", "speed", "bits per", "nats",
    "accuracy", "surprisal", "stem", "weighting",
)  # fmt: skip


def has(text: str, word: str) -> bool:
    return re.search(rf"\b{word}", text) is not None


def test_the_words_that_the_results_hang_on_have_an_entry():
    named = {"soft", "hard", "sparse", "active fraction", "TLOps", "FLOPs skipped", "budget", "dial"}
    assert named <= set(GLOSSARY)


@pytest.mark.parametrize("term", GLOSSARY)
def test_an_entry_is_one_sentence(term):
    meaning = GLOSSARY[term]
    assert meaning.endswith(".")
    assert not re.search(r"[.!?] [A-Z]", meaning)
    assert len(meaning.split()) <= 45


def test_every_column_is_explained():
    for column in COLUMNS:
        if column.key not in ("parameters", "flops_per_token"):
            known = any(has(column.title, term) for term in GLOSSARY)
            assert known or column.title.startswith("bits per"), column.title


def test_it_names_every_term_that_the_page_uses(make_run, tmp_path):
    runs = [
        make_run("d", "dense", evaluation={**dense_evaluation(), "passage": None}, rows=metrics(until=500)),
        make_run("b", "budget", evaluation={**budget_evaluation(), "passage": None}),
        make_run("t", evaluation=tsa_evaluation(1.4, 2.2)),
    ]
    page = Page(build(runs, tmp_path / "out"))
    tips = " ".join(attributes.get("title", "") for _, attributes in page.tags)
    rest = page.text[: page.text.index("Glossary")] + page.text[page.text.index("Results") :] + tips
    used = [word for word in JARGON if has(rest, word)]
    assert len(used) > 15
    glossary = " ".join(f"{term} {meaning}" for term, meaning in GLOSSARY.items())
    assert [word for word in used if not has(glossary, word)] == []
    assert [term for term in GLOSSARY if term not in page.text or GLOSSARY[term] not in page.text] == []
