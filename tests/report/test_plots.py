"""The paper's figures from plain numbers: drawn where there are any, the same bytes each time, nothing lost."""

import xml.etree.ElementTree as ET

import pytest

from paper.architecture import architecture
from tokendepth.report.plots import BLUE, Points, curves, milestones, scatter

HISTORY = [{"step": step, "tlops": 1e6 * step, "val_loss": 3 - step / 1000} for step in (250, 500, 750)]


def drawings():
    points = Points("ours", [(0.2, 1.5, 0.01), (0.9, 1.4, 0.0)], BLUE)
    return {
        "architecture": architecture(),
        "curves": curves("curves", "c", {"dense": [HISTORY], "TSA": [HISTORY, HISTORY]}),
        "scatter": scatter("scatter", "c", "loss", {"a": [points], "b": []}, marks={"here": 0.7}, level=1.0),
        "milestones": milestones("milestones", "c", {"dense": [[250, 500], [None, 750]]}, ["2.5", "2.0"], 1000),
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
    assert curves("x", "c", {"dense": [], "TSA": [[]]}) is None
    assert scatter("x", "c", "loss", {"a": [Points("none", [], BLUE)]}) is None
    assert milestones("x", "c", {"dense": [[], []]}, ["2.5", "2.0"], 1000) is None


def test_one_that_never_gets_there_is_still_drawn():
    assert milestones("x", "c", {"dense": [[None]]}, ["1.8 bits"], 1000) is not None
