"""Every signal that ends a process and can be caught; readers of stdout and stderr that are gone, full or asleep."""

import random
from pathlib import Path

from benchmarks.faults.commands import called, train_words
from benchmarks.faults.outcome import Outcome, Tell, subject
from benchmarks.faults.processes import Server
from tokendepth.config import BudgetConfig, RunConfig
from tokendepth.errors import signal_name
from tokendepth.runs.run import Run
from tokendepth.training.loop import train
from tokendepth.training.signals import ending_signals

STDOUT = {"gone": 141, "/dev/full": 2}
"""What is wrong with it, and the exit code then: it is where the answer goes. Nobody has to read stderr."""
STDERR = ("gone", "/dev/full", "stalled")


def signals(folder: Path, count: int, tell: Tell) -> Outcome:
    """Training saves before it ends, or continues if only its output is gone; no command has a traceback."""
    outcome, dice = Outcome(), random.Random(11)
    config = subject(folder, steps=6, checkpoint_every=1000)
    finished = train(subject(folder, BudgetConfig(), steps=2), folder / "finished", show=False)
    assert called("evaluate", finished.path, "--no-timing").code == 0
    numbers = sorted(map(int, ending_signals()))
    cases = _streams(config, folder, finished.path)
    if count < len(numbers) + len(cases):
        numbers, cases = dice.sample(numbers, min(count, len(numbers))), dice.sample(cases, min(count, len(cases)))
    with Server(folder) as server:
        expected = server.finish(config, folder / "expected")
        for number in numbers:
            run = Run(folder / f"stopped-by-{number}")
            with outcome.attempt(signal_name(number)):
                _signal(server, config, run, number, dice.randrange(5), outcome)
                outcome.compare(server.finish(config, run.path), expected)
            tell(outcome.attempts, len(numbers) + len(cases))
        for words, stdout, stderr in cases:
            with outcome.attempt(f"{words[0]} >{stdout} 2>{stderr}"):
                _command(server, config, words, stdout, stderr, expected, outcome)
            tell(outcome.attempts, len(numbers) + len(cases))
    outcome.figures |= {"signals": len(numbers), "commands and streams": len(cases)}
    return outcome


def _signal(server: Server, config: RunConfig, run: Run, number: int, step: int, outcome: Outcome) -> None:
    child = server.start(config, run.path, action="signal in backward", step=step, signal=number)
    code, name = child.exit_code(), signal_name(number)
    outcome.check(code == 128 + number, f"{name}: exit code {code}")
    outcome.check(child.values("saved") == [step + 1], f"{name}: saved {child.values('saved')} in step {step + 1}")
    outcome.said(child.values("interrupted"), run.path.parent)


Case = tuple[list[str], str, str]


def _streams(config: RunConfig, folder: Path, finished: Path) -> list[Case]:
    """Every command that is over in seconds, with something wrong with stdout, stderr or both."""
    commands = [
        ["train", "--help"],
        ["doctor"],
        ["describe", *train_words(config, folder)[1:2], "--data.corpus", config.data.corpus],
        ["evaluate", str(finished), "--no-timing"],
        ["generate", str(finished), "--tokens", "3", "--budget", "0.5"],
        ["calibrate", str(finished), "--budget", "0.5"],
        ["report", str(finished), "--out", str(folder / "page")],
    ]
    quiet = str(folder / "quiet")
    places = [
        *((stdout, quiet) for stdout in STDOUT),
        *((quiet, stderr) for stderr in STDERR),
        *((stdout, stderr) for stdout in STDOUT for stderr in STDERR),
    ]
    cases = [(words, stdout, stderr) for words in commands for stdout, stderr in places]
    for number, (stdout, stderr) in enumerate(places):
        cases.append((train_words(config, folder / f"unheard-{number}"), stdout, stderr))
    return cases


def _command(
    server: Server, config: RunConfig, words: list[str], stdout: str, stderr: str, expected: Run, outcome: Outcome
) -> None:
    name = f"{words[0]} >{stdout} 2>{stderr}"
    place = Path(words[words.index("--out") + 1]) if words[0] == "train" and "--out" in words else Path()
    code = server.start(config, place, do="command", arguments=words, stdout=stdout, stderr=stderr).exit_code()
    outcome.check(code == STDOUT.get(stdout, 0), f"{name}: exit code {code}")
    for path in {stdout, stderr}:
        if path not in ("gone", "stalled", "/dev/full"):
            heard = Path(path).read_text()
            outcome.check("Traceback" not in heard and "Exception ignored" not in heard, f"{name}: {heard[-300:]}")
    if "--resume" in words:
        outcome.compare(Run(place), expected)
