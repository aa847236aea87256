"""Loss over executed FLOPs, compared with dense models of the same cost."""

import statistics

from tokendepth.report.figures import Drawing, looks
from tokendepth.report.palette import RowLook
from tokendepth.report.plots import Points
from tokendepth.report.summary import Row
from tokendepth.report.tradeoff import Place, tradeoff

CAPTION = (
    "{corpus}: validation loss over executed FLOPs. A line is a model run at several budgets, a single mark a model "
    "with one budget; bars are standard deviations over seeds. The grey line connects dense models of different "
    "depths. Losses too high for the frame are written above it."
)


def pareto(table: list[Row]) -> list[Drawing]:
    """One figure per corpus; none if everything was executed at the same cost."""
    drawings = []
    for corpus in dict.fromkeys(row.corpus for row in table):
        members = [(look, row) for look, row in zip(looks(table), table, strict=True) if row.corpus == corpus]
        if len({place[0] for _, row in members for place in _places(row)}) > 1:
            name = f"pareto_{len(drawings) + 1:02d}"
            drawings += filter(None, [_drawn(name, corpus, members)])
    return drawings


def _drawn(name: str, corpus: str, members: list[tuple[RowLook, Row]]) -> Drawing | None:
    dense, series = [], []
    for look, row in members:
        places = sorted(_places(row))
        if row.method == "dense" and places:
            dense.append((f"{row.records[0].config.model.n_layer} layers", places[0]))
        elif places:
            line = "none" if len(places) == 1 else look.dash
            series.append(Points(row.title, places, look.colour, look.marker, line))
    return tradeoff(name, CAPTION.format(corpus=corpus), dense, series)


def _places(row: Row) -> list[Place]:
    """One point per budget of the curve; without a curve, the evaluation itself."""
    curves = [record.field("curve") or [] for record in row.records]
    if all(curves):
        by_budget = [
            [(p["flops_per_token"], p["sparse"]["loss"]) for p in points] for points in zip(*curves, strict=True)
        ]
    else:
        cost, loss = ("flops_per_token",), ("sparse", "loss")
        by_budget = [[(r.number(*cost), r.number(*loss)) for r in row.records if r.number(*cost) and r.number(*loss)]]
    return [_mean(pairs) for pairs in by_budget if pairs]


def _mean(pairs: list) -> Place:
    costs, losses = zip(*pairs, strict=True)
    return statistics.fmean(costs), statistics.fmean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0
