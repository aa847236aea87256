"""Text in figures is legible: complete, inside the figure, and without overlaps."""

import itertools

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.report.fakes import budget_evaluation, dense_evaluation, metrics, tsa_evaluation
from tokendepth.report import rows
from tokendepth.report.figures import comparison
from tokendepth.report.overview import overview
from tokendepth.report.pareto import pareto
from tokendepth.report.plots import Points
from tokendepth.report.tradeoff import tradeoff

LONG = "shakespeare.budget-routing=learned-n_layer=12-budget=0.34-d_model=512-and-more"


@pytest.fixture
def drawn(monkeypatch) -> dict[Figure, None]:
    """Collects every figure drawn from here on, instead of writing its files."""
    figures: dict[Figure, None] = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.setdefault(self))
    return figures


@pytest.fixture
def table(make_run):
    dense, shallow = dense_evaluation(), {**dense_evaluation(1.46), "flops_per_token": 6.6e6}
    return rows(
        [
            make_run("dense", "dense", evaluation=dense, rows=metrics(1.4422, until=1000)),
            make_run("shallow", "dense", evaluation=shallow, layers=3),
            make_run(LONG, "budget", evaluation=budget_evaluation(), rows=metrics(1.3, until=1000)),
            make_run("tsa-0.001", evaluation=tsa_evaluation(1.44, 1.47), rows=metrics(1.45, until=1000)),
            make_run("tsa-0.1", evaluation=tsa_evaluation(1.44, 1.99), penalty=0.1),
        ]
    )


def texts(figure: Figure) -> list[Text]:
    figure.draw_without_rendering()
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        hidden |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    found = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    return [text for text in found if text not in hidden and (text.axes is None or text.axes.get_visible())]


def assert_legible(figure: Figure) -> None:
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    shown = [(words, box) for words, box in boxes if box.width > 0]
    assert shown
    for (a, one), (b, other) in itertools.combinations(shown, 2):
        assert not one.padded(-1).overlaps(other.padded(-1)), (a, b)
    for words, box in shown:
        assert box.x0 > figure.bbox.x0 - 1, words
        assert box.x1 < figure.bbox.x1 + 1, words


def test_no_word_lies_on_another_or_leaves_the_figure(table, drawn):
    comparison(table)
    pareto(table)
    overview("overview", table)
    assert len(drawn) == 5
    for figure in drawn:
        assert_legible(figure)


def test_nor_do_the_words_of_crowded_places(drawn):
    dense = [(f"{n} layers", (1e6 * (1 + n / 50), 1.5 - n / 1000, 0.0)) for n in range(2, 7)]
    series = [Points(f"method {n}", [(1e6 * (1 + n / 60), 2.0 + n, 0.0)], "#777777", "s", "none") for n in range(6)]
    assert tradeoff("crowd", "c", dense, series)
    (figure,) = drawn
    words = {text.get_text() for text in texts(figure)}
    assert {"2 layers", "6 layers", "method 0 2.00", "method 5 7.00"} <= words
    assert_legible(figure)


def test_no_legend_entry_is_cut_short(table, drawn):
    comparison(table)
    pareto(table)
    legends = [legend for figure in drawn for legend in figure.legends]
    entries = ["".join(text.get_text().split()) for legend in legends for text in legend.get_texts()]
    assert sum(LONG in entry for entry in entries) == 3
    assert not any("…" in entry for entry in entries)
