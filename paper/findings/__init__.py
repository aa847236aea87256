"""What the numbers say about the TSA paper's claims: one paragraph each, decided by rule from results/.

A finding without its numbers shows `not run` for them and for its verdict; none is ever assumed.
"""

from collections.abc import Callable

from paper.evidence import Evidence
from paper.findings import consistency, early_exit, execution, routing
from paper.findings.finding import Finding

ALL: tuple[Callable[[Evidence], Finding], ...] = (
    execution.hard_execution,
    execution.at_initialisation,
    execution.spread,
    execution.dense_control,
    routing.without_pressure,
    routing.difficulty,
    routing.permissive,
    routing.robust,
    early_exit.stem_once,
    early_exit.read_early,
    early_exit.exit_against_tsa,
    early_exit.exit_training_cost,
    early_exit.outlier,
    consistency.never_reached,
    consistency.enwik8_text,
    consistency.two_results,
    execution.wall_clock,
    execution.what_survives,
)


def findings(evidence: Evidence) -> list[Finding]:
    return [make(evidence) for make in ALL]
