"""A sweep on a Ray cluster of two nodes, one of which is removed; and one-line errors for what cannot be done."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import is_alive, saved_step, trainer, wait_until
from tests.tiny import hashes, one_line, steady, tiny
from tokendepth.config import override, to_dict
from tokendepth.errors import UserError
from tokendepth.recipes import variants
from tokendepth.runs.run import Run
from tokendepth.training import cluster as cluster_module
from tokendepth.training.cluster import RayJob, RayPool
from tokendepth.training.ray_driver import Driver, DriverProcess
from tokendepth.training.sweep import sweep, train_and_evaluate

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("cluster")
needs_ray = pytest.mark.skipif(not find_spec("ray"), reason="needs ray: pip install 'tokendepth[cluster]'")

SERVER = """
import signal, sys
from ray.cluster_utils import Cluster
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does to what it starts in the background
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
print(cluster.address, flush=True)
for order in sys.stdin:
    if order == "remove\\n":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    elif order == "add\\n":
        nodes.append(cluster.add_node(num_cpus=1))
    else:
        (head,) = cluster.head_node.all_processes["gcs_server"]
        head.process.send_signal(getattr(signal, order.strip()))
    print("done", flush=True)
cluster.shutdown()
"""


class Cluster:
    """A head without CPUs and two nodes with one CPU each, managed by a separate process."""

    def __init__(self, folder: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        environment |= {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "2"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, cwd=folder, env=environment,
        )  # fmt: skip
        self.address = self._answer()

    def _answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def order(self, what: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        assert self._answer() == "done"

    def close(self) -> None:
        self.process.communicate(timeout=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # the paths of Ray's sockets must be short
        found = Cluster(folder)
        yield found
        found.close()


class Sweep:
    """`tokendepth sweep` in a separate process, with its runs."""

    def __init__(self, folder: Path, on: str, *, seeds: int = 2, **changes: object) -> None:
        tiny(folder)  # for the corpus
        settings = {
            "data.corpus": "text:corpus.txt", "model.context": 16, "model.d-model": 16, "model.n-layer": 2,
            "train.steps": 200, "train.checkpoint-every": 20, "train.log-every": 1, "train.device": "cpu", **changes,
        }  # fmt: skip
        self.cell = ":".join(["demo.dense", *(f"{key}={value}" for key, value in settings.items())])
        self.seeds, self.folder, self.out = seeds, folder, folder / "out"
        words = ["sweep", self.cell, "--seeds", str(seeds), "--out", "out", "--on", on]
        script = "import sys; from tokendepth.cli.main import main; from tokendepth.training import cluster; "
        script += "cluster.LOST_S, cluster.LOOK_EVERY_S, cluster.CONNECT_S = 5, 0.2, 90; "
        with (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script + "main(sys.argv[1:])", *words],
                stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
            )  # fmt: skip

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def runs(self) -> list[Run]:
        return [Run(self.out / name) for name in variants(self.cell, self.seeds)]

    def pause(self) -> dict[str, int]:
        """Halt the process of each run once it has saved a step, however far the others are."""
        paused: dict[str, int] = {}

        def all_are_paused() -> bool:
            for run in self.runs():
                if run.name not in paused and saved_step(run):
                    paused[run.name] = trainer(run)
                    os.kill(paused[run.name], signal.SIGSTOP)
            return len(paused) == self.seeds or self.process.poll() is not None

        wait_until(all_are_paused)
        assert self.process.poll() is None, self.stderr
        return paused

    def end(self) -> tuple[int, str, str]:
        out, _ = self.process.communicate(timeout=120)
        return self.process.returncode, out, self.stderr


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[1])


@pytest.fixture
def sweep_on(cluster, tmp_path) -> Iterator[Callable[..., Sweep]]:
    """Starts a sweep on the cluster."""
    begun = []

    def begin(name: str = "", **changes: Any) -> Sweep:
        begun.append(Sweep(tmp_path / name, f"ray:{cluster.address}", **changes))
        return begun[-1]

    yield begin
    for one in begun:
        one.process.kill()
        one.process.communicate()


@needs_ray
@pytest.mark.slow
def test_a_run_whose_node_dies_goes_on_on_the_other_and_all_end_in_the_bits_of_serial_ones(
    cluster, sweep_on, tmp_path, monkeypatch
):
    sweep = sweep_on()
    processes = sweep.pause()
    seen = {run.name: run.metrics()[: saved_step(run)] for run in sweep.runs()}
    tasks = {process: parent(process) for process in processes.values()}
    cluster.order("remove")
    wait_until(lambda: not all(map(is_alive, tasks.values())))
    (lost,) = [process for process, task in tasks.items() if not is_alive(task)]
    wait_until(lambda: "runs at a time: 1" in sweep.stderr)  # Ray may take seconds to notice
    for process in filter(is_alive, tasks):
        os.kill(process, signal.SIGCONT)
    wait_until(lambda: not is_alive(lost))
    code, out, err = sweep.end()
    assert code == 0, err
    assert "demo.dense" in out
    assert "aylet" not in out + err, "Ray's own reports"
    assert sorted(path.name for path in sweep.out.iterdir()) == sorted(processes), "no log, no token"

    monkeypatch.chdir(tmp_path)
    for name, config in variants(sweep.cell, 2).items():
        run, serial = Run.open(sweep.out / name), train_and_evaluate(config, tmp_path / "serial" / name, curve=False)
        assert run.metrics()[: len(seen[name])] == seen[name], "with the clock's numbers: no saved step is taken twice"
        assert steady(run.metrics()) == steady(serial.metrics())
        for file in ("model.safetensors", "eval.json", "config.json", "tokenizer.json", "env.json"):
            assert hashes(run.path)[file] == hashes(serial.path)[file]
    cluster.order("add")


@needs_ray
@pytest.mark.slow
def test_sweeps_that_are_stopped_or_killed_stop_their_tasks_and_can_go_on(sweep_on):
    """Both at the same time, each on a node: most of it is waiting."""
    changes = {"train.steps": 100_000, "train.checkpoint-every": 200}
    sweeps = {number: sweep_on(number.name, seeds=1, **changes) for number in (signal.SIGINT, signal.SIGKILL)}
    tasks = {}
    for number, one in sweeps.items():
        (tasks[number],) = one.pause().values()
    for number, one in sweeps.items():
        os.kill(tasks[number], signal.SIGCONT)
        one.process.send_signal(number)
    code, _, err = sweeps[signal.SIGINT].end()
    assert code == 130
    assert "every run in out is saved; repeat the command to continue" in err
    assert not is_alive(tasks[signal.SIGINT])
    (stopped,) = sweeps[signal.SIGINT].runs()
    assert saved_step(stopped) % 200, "what is saved between was saved because of the stop"
    sweeps[signal.SIGKILL].end()
    wait_until(lambda: not is_alive(tasks[signal.SIGKILL]))
    for one in sweeps.values():
        (run,) = one.runs()
        checkpoint, skipped = run.load_checkpoint()
        assert checkpoint
        assert checkpoint.step > 0
        assert not skipped


@needs_ray
@pytest.mark.slow
def test_what_a_cluster_lacks_is_said_in_one_line(cluster, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    config = tiny(tmp_path)
    on_gpu = override(config, {"train.device": "cuda"})
    with pytest.raises(UserError) as refused, RayPool(cluster.address, {"a": on_gpu}, None, tmp_path, show=False):
        pass
    assert "has no GPU" in one_line(refused.value)
    # A different folder for each process, as on machines without a shared file system.
    out = Path("/proc/self/cwd/out")
    with pytest.raises(UserError) as refused:
        sweep({"a": config}, out, on=f"ray:{cluster.address}", show=False)
    assert f"does not see {out}; choose an --out that all nodes share" in one_line(refused.value)
    assert "Traceback" not in capfd.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["SIGSTOP", "SIGKILL"])  # it no longer answers; nothing listens there any more
def test_a_cluster_that_goes_away_ends_the_sweep_with_one_line(cluster, sweep_on, fault):
    """The last test that uses this cluster."""
    sweep = sweep_on(seeds=1, **{"train.steps": 100_000})
    (process,) = sweep.pause().values()
    os.kill(process, signal.SIGCONT)
    cluster.order(fault)
    code, _, err = sweep.end()
    cluster.order("SIGCONT")
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)  # otherwise it would train on as long as its node exists
    assert code == 2, err
    assert "no longer answers" in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith("repeat the command to continue")


def pool(on: str, folder: Path) -> RayPool:
    return RayPool(on, {"a": tiny(folder)}, None, folder, show=False)


@needs_ray
@pytest.mark.slow
def test_an_address_at_which_nobody_answers_is_given_up_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_module, "CONNECT_S", 3)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(UserError) as refused, pool(address, tmp_path):
            pass
        assert f"{address} does not answer" in one_line(refused.value)
        deaf.listen()
        with pytest.raises(UserError) as silent, pool(address, tmp_path):
            pass
        assert f"{address} did not answer within 3 s" in one_line(silent.value)


class Answers:
    """Replaces the process that talks to Ray."""

    def __init__(self, **answers: Callable) -> None:
        self.answers = answers

    def ask(self, what: str, *words: object, seconds: float) -> object:
        return self.answers[what](*words)

    def close(self) -> None:
        self.answers.clear()


def raises(error: Exception) -> Callable:
    def answer(*_: object) -> None:
        raise error

    return answer


def test_where_no_cluster_runs_it_says_how_to_start_one(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_module, "find_spec", lambda name: True)
    driver = Answers(connect=raises(RuntimeError("no running instance")))
    monkeypatch.setattr(cluster_module, "DriverProcess", lambda: driver)
    with pytest.raises(UserError) as refused, pool("", tmp_path):
        pass
    assert "(no running instance); start one by `ray start --head`" in one_line(refused.value)
    assert not driver.answers, "closed"


@needs_ray
@pytest.mark.slow
def test_a_process_of_ray_that_dies_is_a_cluster_that_is_gone(tmp_path):
    found = pool("", tmp_path)
    found.driver = DriverProcess()
    found.driver.process.kill()
    found.driver.process.wait()
    for _ in range(2):  # at the pipe's end, and into a pipe without one
        with pytest.raises(UserError) as gone:
            found.ask("nodes")
        assert "no longer answers (" in one_line(gone.value)
        assert found.lost
    found.driver.close()


@pytest.mark.parametrize(
    ("resources", "threads", "says"),
    [
        (
            [{"CPU": 2}, {"CPU": 2}],
            "4",
            "has no node with 4 CPU (as OMP_NUM_THREADS says, or 1), which a run takes; add one",
        ),
        (
            [{"CPU": 8}, {"GPU": 1}],
            "",
            "has no node with 1 CPU (as OMP_NUM_THREADS says, or 1) and 1 GPU, which a run takes",
        ),
    ],
)
def test_nodes_that_are_too_small_for_a_run_are_named(resources, threads, says, tmp_path, monkeypatch):
    """The cluster has enough in total, but no single node does."""
    driver = Answers(connect=lambda address: address, nodes=lambda: resources)
    monkeypatch.setattr(cluster_module, "find_spec", lambda name: True)
    monkeypatch.setattr(cluster_module, "DriverProcess", lambda: driver)
    monkeypatch.setattr(cluster_module, "_unreachable", lambda address: "")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    config = override(tiny(tmp_path), {"train.device": "cuda" if "GPU" in resources[1] else "cpu"})
    with pytest.raises(UserError) as refused, RayPool("host:6379", {"a": config}, None, tmp_path, show=False):
        pass
    assert not driver.answers, "closed"
    assert says in one_line(refused.value)


@pytest.mark.parametrize("address", ["7", "here", "host:", ":6379", "host:port", "host:70000"])
def test_a_wrong_address_is_refused(address, tmp_path):
    with pytest.raises(UserError) as refused:
        pool(address, tmp_path)
    assert f"'ray:{address}'; expected ray:HOST:PORT" in one_line(refused.value)


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_module, "find_spec", lambda name: None)
    with pytest.raises(UserError) as refused:
        pool("host:6379", tmp_path)
    assert "pip install 'tokendepth[cluster]'" in one_line(refused.value)


# --- what Ray answers, without Ray ------------------------------------------------------------------------------------


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def driver(answer: Callable[[], int]) -> Driver:
    """With a fake Ray that has one task."""
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    found = Driver.__new__(Driver)
    found.ray = SimpleNamespace(wait=lambda refs, timeout: (refs, []), get=lambda ref: answer(), exceptions=exceptions)
    found.results = {0: "ref"}
    return found


def job(folder: Path, answer: Callable[[], int]) -> RayJob:
    task = {"config": to_dict(tiny(folder)), "folder": str(folder / "run")}
    ask = lambda what, *words: getattr(driver(answer), what)(*words)  # noqa: E731
    return RayJob(SimpleNamespace(ask=ask, lost=False), 0, task, folder / "run.log")  # pyright: ignore


def test_a_run_that_is_finished_is_waited_for_until_it_is_seen_here(tmp_path, monkeypatch):
    finished = job(tmp_path, lambda: 0)
    assert finished.poll() is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval.json").write_text("{}")
    assert finished.poll() == 0
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr(cluster_module, "VISIBLE_S", -1)
    assert finished.poll() == 1
    assert "is not visible here" in (tmp_path / "run.log").read_text()


def test_a_run_that_was_lost_with_its_nodes_says_so(tmp_path):
    assert job(tmp_path, raises(RayError("many\nlines"))).poll() == 1
    assert "Ray has lost it (RayError) and gives up; repeat the command" in (tmp_path / "run.log").read_text()


def test_a_node_that_cannot_start_a_run_says_why(tmp_path):
    words = "The remote function failed to import:\n\nTraceback\nModuleNotFoundError: No module named 'tokendepth'\n"
    assert job(tmp_path, raises(RayTaskError(RuntimeError(words)))).poll() == 1
    (line,) = (tmp_path / "run.log").read_text().splitlines()
    assert "could not start it (ModuleNotFoundError: No module named 'tokendepth'); install" in line
    with pytest.raises(UserError, match="shared by nobody"):
        job(tmp_path, raises(RayTaskError(UserError("shared by nobody")))).poll()
