"""The TSA paper's figures from plain numbers: drawn if there are any, with the same bytes each time."""

import xml.etree.ElementTree as ET

import pytest

from paper.architecture import architecture
from tokendepth.report.palette import ALARM, look
from tokendepth.report.plots import Points, curves, milestones, scatter

DENSE, TSA = ("dense", "dense"), ("tsa", "TSA, penalty 0.001")
HISTORY = [{"step": step, "tlops": 1e6 * step, "val_loss": 3 - step / 1000} for step in (250, 500, 750)]


def drawings():
    points = Points("ours", [(0.2, 1.5, 0.01), (0.9, 1.4, 0.0)], look("tsa").colour)
    return {
        "architecture": architecture(),
        "curves": curves("curves", "c", {DENSE: [HISTORY], TSA: [HISTORY, HISTORY]}),
        "scatter": scatter("scatter", "c", "loss", {"a": [points], "b": []}, marks={"here": 0.7}, level=1.0),
        "milestones": milestones("milestones", "c", {DENSE: [[250, 500], [None, 750]]}, ["2.5", "2.0"], 1000),
    }


@pytest.fixture(scope="module")
def drawn():
    return drawings()


def test_they_are_whole_and_the_same_each_time(drawn):
    again = drawings()
    for name, drawing in drawn.items():
        assert drawing is not None, name
        assert ET.fromstring(drawing.svg).tag.endswith("svg")
        assert drawing.png.startswith(b"\x89PNG")
        assert drawing.svg == again[name].svg
        assert drawing.png == again[name].png


def test_without_numbers_there_is_no_figure():
    assert curves("x", "c", {DENSE: [], TSA: [[]]}) is None
    assert scatter("x", "c", "loss", {"a": [Points("none", [], look("tsa").colour)]}) is None
    assert milestones("x", "c", {DENSE: [[], []]}, ["2.5", "2.0"], 1000) is None


def test_one_that_never_gets_there_is_still_drawn():
    assert milestones("x", "c", {DENSE: [[None]]}, ["1.8 bits"], 1000) is not None


def test_models_have_the_colour_of_their_method_and_never_is_alarming(drawn):
    svg = {name: drawing.svg.decode() for name, drawing in drawn.items()}
    for method in ("dense", "tsa"):
        assert look(method).colour in svg["curves"]
    assert look("dense").colour in svg["milestones"]
    assert ALARM in svg["milestones"]
    assert ALARM not in svg["curves"] + svg["scatter"] + svg["architecture"]
