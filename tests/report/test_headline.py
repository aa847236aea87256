"""The first screen's sentence: computed from the evaluations, quality next to savings, and without soft numbers."""

import pytest

from tests.report.fakes import budget_evaluation, dense_evaluation, tsa_evaluation
from tokendepth.report import rows, sentences
from tokendepth.report.headline import MOST, headline, reference
from tokendepth.report.overview import overview
from tokendepth.report.summary import by_key


def test_it_says_what_was_trained_skipped_what_it_cost_and_what_the_clock_gained(make_run):
    runs = [
        make_run("dense", "dense", evaluation=dense_evaluation(1.4422)),
        make_run("budget", "budget", evaluation=budget_evaluation(1.29798)),
        make_run("tsa", evaluation=tsa_evaluation(1.3333, 1.58642)),
    ]
    # By hand: 1.29798 / 1.4422 = 0.9 and 1.58642 / 1.4422 = 1.1; sparse took 32.6 to 34.4 ms, dense 40.1 to 43.0 ms.
    (said,) = sentences(runs)
    assert said == (
        "dense, budget and tsa were trained on shakespeare for 5,000 steps each; with real skipping, "
        "budget skips 50.0% of the work and 40.4% of the FLOPs, "
        "has a validation loss of 1.2980, 10.0% below dense (1.4422), and is 1.24x as fast as dense; "
        "tsa skips 32.2% of the work and 24.9% of the FLOPs, "
        "has a validation loss of 1.5864, 10.0% above dense (1.4422), and is 1.24x as fast as dense."
    )
    assert headline(rows(runs)).timed == "cpu, batch 8"
    for soft in ("1.3333", "22.8%", "0.726"):
        assert soft not in said


def clause(make_run, **changes) -> str:
    """The clause about a TSA run with these changes to its evaluation, compared with a dense one."""
    evaluation = {**tsa_evaluation(1.4422, 1.4422), **changes}
    runs = [make_run("dense", "dense", evaluation=dense_evaluation(1.4422)), make_run("tsa", evaluation=evaluation)]
    return sentences(runs)[0].split("skipping, tsa ")[1]


def timed(dense: list[float], sparse: list[float]) -> dict:
    return {**tsa_evaluation()["time"], "dense_ms": dense, "sparse_ms": sparse, "speedup": dense[0] / sparse[0]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"hard": {"loss": 1.4422 * 1.0089, "active_fraction": 0.4}},
            "1.4550, not clearly different from dense (1.4422)",
        ),
        ({"hard": {"loss": 1.4422 * 1.0091, "active_fraction": 0.4}}, "1.4553, 0.9% above dense (1.4422)"),
        ({"tlops_skipped": 0.0, "flops_skipped": -0.016}, "skips nothing and takes 1.6% more FLOPs than dense"),
        ({"time": None}, "and was not timed."),
        ({"time": timed([40.0, 39.0, 41.0], [50.0, 49.0, 51.0])}, "and is slower than dense (0.80x its speed)."),
        (
            {"time": timed([40.0, 35.0, 45.0], [38.0, 34.0, 44.0])},
            "and is not clearly faster or slower than dense (their times overlap).",
        ),
    ],
)
def test_what_it_says_of_one_model(make_run, changes, words):
    assert words in clause(make_run, **changes)


def test_a_speed_that_is_noise_has_no_bar_and_says_so_in_the_table(make_run):
    """As on a busy machine: medians differ by a factor of four, but quartiles overlap."""
    evaluation = {**tsa_evaluation(), "time": timed([40.0, 9.0, 45.0], [10.0, 9.0, 44.0])}
    table = rows([make_run("dense", "dense", evaluation=dense_evaluation()), make_run("tsa", evaluation=evaluation)])
    drawn = overview("first", table).svg.decode()
    assert "times overlap" in drawn
    assert "4.00x" not in drawn
    assert table[1].cell(by_key("speedup")) == "4.00x (cpu, batch 8; times overlap)"


def test_seeds_that_disagree_are_noise_too(make_run):
    times = (timed([40.0, 39.0, 41.0], [30.0, 29.0, 31.0]), timed([30.0, 29.0, 31.0], [40.0, 39.0, 41.0]))
    (row,) = rows(
        [make_run(f"tsa-{n}", seed=n, evaluation={**tsa_evaluation(), "time": t}) for n, t in enumerate(times)]
    )
    assert row.times_overlap


def test_three_seeds_are_no_longer_too_few_to_tell(make_run):
    runs = [make_run(f"d-{s}", "dense", evaluation=dense_evaluation(1.0), seed=s) for s in range(3)]
    runs += [make_run(f"t-{s}", evaluation=tsa_evaluation(1.004, 1.004), seed=s) for s in range(3)]
    assert "has a validation loss of 1.0040, 0.4% above dense (1.0000)" in sentences(runs)[0]


def test_of_many_models_it_names_the_best(make_run):
    losses = [1.9, 1.5, 1.7, 1.6, 1.8]
    runs = [make_run(f"t{loss}", evaluation=tsa_evaluation(loss, loss), penalty=loss) for loss in losses]
    (said,) = sentences(runs)
    assert said.startswith("5 models were trained")
    assert [row.row.label for row in headline(rows(runs)).clauses] == ["t1.5", "t1.7", "t1.6"]
    assert said.endswith(f"; {len(losses) - MOST} more below.")


def test_a_dense_model_of_another_shape_or_text_is_not_compared_with(make_run):
    routed = make_run("tsa", evaluation=tsa_evaluation())
    others = [make_run("shallow", "dense", layers=3), make_run("other", "dense", corpus="enwik8")]
    table = rows([routed, *others])
    assert reference(table[0], table) is None
    table = rows([routed, *others, make_run("same", "dense")])
    assert reference(table[0], table) is table[-1]


def test_without_anything_executed_it_says_so(make_run):
    assert sentences([make_run("bare", finished=False)]) == [
        "bare was trained on shakespeare for 5,000 steps, but not evaluated yet (run tokendepth evaluate)."
    ]
    (dense,) = sentences([make_run("d", "dense", evaluation=dense_evaluation())])
    assert dense.endswith(
        ", and nothing is skipped: without routers every token goes through every layer; "
        "d has a validation loss of 1.4422."
    )


def test_each_corpus_has_a_sentence(make_run):
    runs = [make_run(corpus, evaluation=tsa_evaluation(), corpus=corpus) for corpus in ("enwik8", "stdlib")]
    said = sentences(runs)
    assert [f"trained on {corpus}" in words for corpus, words in zip(("enwik8", "stdlib"), said, strict=True)] == [
        True, True
    ]  # fmt: skip
