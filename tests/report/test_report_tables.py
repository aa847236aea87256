"""The numbers of eval.json appear in the tables, each in the column of its mode."""

import io
import json
import statistics

import pytest
from rich.console import Console

from tests.report.fakes import dense_evaluation, metrics, mode, tsa_evaluation
from tokendepth.errors import UserError
from tokendepth.report import markdown_table, rows, terminal_table
from tokendepth.report.summary import COLUMNS
from tokendepth.report.tables import json_table
from tokendepth.runs.run import EVALUATION_VERSION


def cells(markdown: str) -> dict[str, dict[str, str]]:
    """A Markdown table as {run: {column: cell}}."""
    lines = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("|")]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_each_number_stands_in_the_column_of_its_mode(make_run):
    table = cells(markdown_table(rows([make_run("tsa", evaluation=tsa_evaluation())])))
    assert table["tsa"] == {
        "run": "tsa",
        "method": "tsa",
        "params": "4,864,901",
        "loss (soft)": "1.4482",
        "active fraction (soft)": "0.726",
        "TLOps saved (soft, weighting only)": "22.8%",
        "loss (hard = sparse)": "1.4523",
        "active fraction (hard)": "0.614",
        "token-layer work skipped": "32.2%",
        "FLOPs skipped": "24.9%",
        "FLOPs per token, executed": "8,300,000",
        "speed vs dense (measured; above 1 is faster)": "1.24x (cpu, batch 8)",
        "bits per char (hard)": "2.0952",
        "bits per byte (hard)": "2.0952",
    }


def test_json_holds_the_evaluation_unrounded(make_run):
    evaluation = tsa_evaluation()
    (row,) = json_table(rows([make_run("tsa", evaluation=evaluation)]))["rows"]
    values = {key: value and value["mean"] for key, value in row["values"].items()}
    assert values == {
        "parameters": 4864901,
        "loss_soft": evaluation["soft"]["loss"],
        "active_fraction_soft": evaluation["soft"]["active_fraction"],
        "tlops_saved_soft": evaluation["tlops_saved_soft"],
        "loss_hard": evaluation["hard"]["loss"],
        "active_fraction_hard": evaluation["hard"]["active_fraction"],
        "tlops_skipped": evaluation["tlops_skipped"],
        "flops_skipped": evaluation["flops_skipped"],
        "flops_per_token": evaluation["flops_per_token"],
        "speedup": evaluation["time"]["speedup"],
        "bits_per_character": evaluation["hard"]["bits_per_character"],
        "bits_per_byte": evaluation["hard"]["bits_per_byte"],
        "accuracy": None,
    }
    assert row["timed_on"] == "cpu, batch 8"
    assert row["seeds"] == [0]
    assert not row["collapses_when_executed"]


def test_dense_has_no_soft_figures_even_if_its_evaluation_does(make_run):
    row = cells(markdown_table(rows([make_run("d", "dense", evaluation=dense_evaluation())])))["d"]
    assert [row[c.title] for c in COLUMNS if c.group == "soft"] == ["—", "—", "—"]
    assert row["loss (hard = sparse)"] == "1.4422"
    assert row["active fraction (hard)"] == "1.000"


def test_brief_has_what_decides_and_no_column_without_a_number(make_run):
    dense = make_run("d", "dense", evaluation=dense_evaluation())
    brief = cells(markdown_table(rows([dense]), brief=True))["d"]
    assert not [title for title in brief if "soft" in title or title == "params"]
    assert brief["loss (hard = sparse)"] == "1.4422"
    both = markdown_table(rows([dense, make_run("t", evaluation=tsa_evaluation())]), brief=True)
    assert "TLOps saved (soft, weighting only)" in both
    assert "token-layer work skipped" in both


def test_no_column_mixes_modes_and_tlops_are_never_flops():
    for column in COLUMNS:
        assert ("soft" in column.title) == (column.group == "soft")
        assert not ("TLOps" in column.title and "FLOPs" in column.title)
    assert [c.title for c in COLUMNS if "saved" in c.title] == ["TLOps saved (soft, weighting only)"]


def test_missing_fields_show_as_dashes(make_run):
    hard = {"loss": 1.5, "active_fraction": 0.5}
    evaluation = {"version": EVALUATION_VERSION, "method": "tsa", "soft": None, "hard": hard, "time": {}}
    row = cells(markdown_table(rows([make_run("older", evaluation=evaluation)])))["older"]
    assert row.pop("loss (hard = sparse)") == "1.5000"
    assert set(row.values()) == {"older", "tsa", "0.500", "—"}


@pytest.mark.parametrize(("hard", "collapses"), [(1.4482, False), (1.4482 * 1.0199, False), (1.4482 * 1.0201, True)])
def test_the_collapse_rule_is_two_percent(make_run, hard, collapses):
    table = rows([make_run("tsa", evaluation=tsa_evaluation(1.4482, hard))])
    assert table[0].collapses is collapses
    assert ("| tsa † |" in markdown_table(table)) is collapses
    assert ("† collapses when executed (tsa)" in markdown_table(table)) is collapses
    assert json_table(table)["rows"][0]["collapses_when_executed"] is collapses


def test_one_seed_that_collapses_marks_the_row(make_run):
    runs = [make_run(f"tsa-s{s}", evaluation=tsa_evaluation(1.45, 1.46 if s else 2.2), seed=s) for s in range(3)]
    assert rows(runs)[0].collapses


def test_sparse_that_is_not_hard_is_called_a_fault(make_run):
    evaluation = {**tsa_evaluation(), "sparse": mode(1.4560, 0.614)}
    assert "sparse differs from hard (tsa)" in markdown_table(rows([make_run("tsa", evaluation=evaluation)]))


def test_seeds_are_one_row_with_mean_and_sample_deviation(make_run):
    losses = [1.4608, 1.4632, 1.4606]
    runs = [make_run(f"tsa-seed{s}", evaluation=tsa_evaluation(1.45, x), seed=s) for s, x in enumerate(losses)]
    runs.append(make_run("other", evaluation=tsa_evaluation(), penalty=0.1))
    table = rows(runs)
    assert [row.title for row in table] == ["tsa (n=3)", "other"]
    # By hand: mean 4.3846 / 3 = 1.461533; deviations -.000733 .001667 -.000933; root(.000004187 / 2) = .001447.
    text = markdown_table(table)
    assert cells(text)["tsa (n=3)"]["loss (hard = sparse)"] == "1.4615 ± 0.0014"
    stat = json_table(table)["rows"][0]["values"]["loss_hard"]
    assert stat["mean"] == pytest.approx(1.4615333)
    assert stat["std"] == pytest.approx(0.0014468, abs=1e-6)
    assert stat["per_seed"] == losses
    assert stat["std"] == statistics.stdev(losses)
    assert "other: one seed: differences under 0.9% are noise." in text


def test_the_same_seed_twice_is_no_second_sample(make_run):
    runs = [make_run(name, evaluation=tsa_evaluation()) for name in ("first", "second")]
    assert [row.title for row in rows(runs)] == ["first", "second"]
    assert len(rows([runs[0], runs[0]])) == 1


def test_few_seeds_are_noise(make_run):
    runs = [make_run(f"tsa-{s}", evaluation=tsa_evaluation(), seed=s) for s in range(3)]
    assert "one seed: differences under 0.9% are noise" in markdown_table(rows(runs[:1]))
    assert "two seeds: differences under 0.9% are noise" in markdown_table(rows(runs[:2]))
    assert "noise" not in markdown_table(rows(runs))


def test_a_seed_without_evaluation_is_not_counted(make_run):
    runs = [make_run(f"t-{s}", evaluation=tsa_evaluation() if s else None, seed=s) for s in range(3)]
    text = markdown_table(rows(runs))
    assert cells(text)["t (n=3)"]["loss (hard = sparse)"] == "1.4523 ± 0.0000 (n=2)"
    assert "two seeds" in text
    assert "not evaluated: t-0." in text


def test_speedups_from_different_devices_are_not_one_condition(make_run):
    one, other = tsa_evaluation(), tsa_evaluation()
    other["time"]["device"] = "cuda"
    runs = [make_run(f"t-{s}", evaluation=e, seed=s) for s, e in enumerate((one, other))]
    assert "devices or batches differ" in rows(runs)[0].cell(next(c for c in COLUMNS if c.key == "speedup"))


def test_accuracy_appears_where_a_run_has_it(make_run):
    evaluation = tsa_evaluation()
    evaluation["hard"]["accuracy"] = 0.98765
    plain = make_run("text", evaluation=tsa_evaluation())
    assert "accuracy" not in markdown_table(rows([plain]))
    table = cells(markdown_table(rows([plain, make_run("sort", evaluation=evaluation, penalty=0.01)])))
    assert (table["text"]["accuracy (hard)"], table["sort"]["accuracy (hard)"]) == ("—", "0.9877")


def test_equal_names_from_different_folders_stay_apart(make_run):
    runs = [make_run(f"{folder}/tsa", penalty=p) for folder, p in (("a", 0.1), ("b", 0.2), ("c", 0.3))]
    assert [row.label for row in rows(runs)] == ["tsa", "tsa (2)", "tsa (3)"]


@pytest.mark.parametrize(
    ("names", "label"),
    [(("tsa-seed0", "tsa-seed1"), "tsa"), (("x-0.1-s0", "x-0.1-s1"), "x-0.1"), (("runs1", "runs2"), "runs"),
     (("a-10", "a-11"), "a"), (("seed0", "seed1"), "shakespeare.tsa"), (("p", "q"), "shakespeare.tsa")],
)  # fmt: skip
def test_a_row_is_named_by_what_its_runs_share(make_run, names, label):
    assert rows([make_run(name, seed=seed) for seed, name in enumerate(names)])[0].label == label


def test_markdown_survives_hostile_names(make_run):
    text = markdown_table(rows([make_run("a|b <script> *x* `y` _z_ $1$", evaluation=tsa_evaluation())]))
    row = next(line for line in text.splitlines() if "script" in line)
    assert row.startswith(r"| a\|b &lt;script&gt; \*x\* \`y\` \_z\_ \$1\$ |")
    assert row.replace(r"\|", "").count("|") == len([c for c in COLUMNS if not c.optional]) + 3


def test_unfinished_and_unevaluated_runs_are_named(make_run):
    text = markdown_table(rows([make_run("half", rows=metrics(until=1600), finished=False)]))
    assert "not finished: half (step 1,600 of 5,000)." in text
    assert "not evaluated: half." in text
    assert "noise" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_table_fits_and_says_the_same(make_run, width):
    runs = [
        make_run("dense", "dense", evaluation=dense_evaluation()),
        make_run("[red]tsa", evaluation=tsa_evaluation(1.4570, 3.8754)),
    ]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal_table(runs))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for part in ("1.4422", "1.4570", "3.8754", "22.8%", "32.2%", "24.9%", "1.24x", "batch 8", "4.86M"):
        assert part in text
    for part in ("[red]tsa †", "one seed: differences"):
        assert part in text


def test_no_runs_is_a_user_error():
    with pytest.raises(UserError, match="no runs were given"):
        rows([])


def test_json_is_strict(make_run):
    evaluation = tsa_evaluation()
    del evaluation["flops_skipped"]
    tree = json_table(rows([make_run("tsa", evaluation=evaluation)]))
    assert tree["rows"][0]["values"]["flops_skipped"] is None
    json.dumps(tree, allow_nan=False)
