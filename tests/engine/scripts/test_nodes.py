"""One node's part of a script, run as its agent does.

Of several nodes one reads the steps: the others' ranks print nothing, and end with those of the first.
"""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.records.record import MeasuringPass, RankPart, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.script import ScriptWorkload
from configs.workloads.script_figures import TAKEN
from engine.profiling.gpu import GpuSampler
from engine.scripts import node_run
from engine.scripts.commands import NodePlace, program_line, script_interpreter
from engine.scripts.workdir import fill_workdir
from engine.workloads.script import run

LOST = "raise RuntimeError('[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:1234')"
MEGATRON = (
    "for n in range(1, 6): print(f' iteration {n:8d}/ 100 | consumed samples: 8 | elapsed time per iteration (ms): "
    "{100.0 + n} | learning rate: 1E-3 | lm loss: 2.5E+00 |', flush=True)"
)


def node_parts(
    folder: Path, source: str, node_rank: int, measuring_pass: MeasuringPass = "timed", /, **fields: object
) -> dict[int, tuple[RankPart, dict[str, np.ndarray]]]:
    """Measure a script on one of two nodes with one process each; its parts by rank, with their columns."""
    work = ScriptWorkload(command=("python", "-c", source), launcher="none", **fields)
    measurement = Measurement(cell=Cell(workload=work, layout={"dp": 2}, nodes=2), repeat=0, attempt=1)
    job = Job(
        name="0001",
        study="s",
        measuring_pass=measuring_pass,
        measuring=Measuring(),
        measurements=(measurement,),
        ranks_per_node=1,
        timeout_seconds=100.0,
        inputs=str(folder),
        cache=str(folder),
    )
    paths = JobPaths(folder / "run" / "jobs" / "0001")
    paths.folder.mkdir(parents=True)
    place = NodePlace(node_rank, 2, 1, "127.0.0.1", 1234, "127.0.0.1", ("127.0.0.1", "127.0.0.1"), 1, False)
    found: dict[int, tuple[RankPart, dict[str, np.ndarray]]] = {}

    def keep(part: RankPart, samples: dict[str, np.ndarray], _: JobPaths) -> None:
        found[part.rank] = part, samples

    run(measurement, job, paths, place, sorted(os.sched_getaffinity(0)), keep)
    return found


@pytest.mark.parametrize(
    ("gpus", "given", "order"),
    [(True, None, "PCI_BUS_ID"), (True, "FASTEST_FIRST", "FASTEST_FIRST"), (False, None, None)],
)
def test_a_script_counts_gpus_as_its_record_does(
    gpus: bool, given: str | None, order: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among different GPUs CUDA begins with the fastest one: name, power and energy were those of another."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", given)
    work = ScriptWorkload(command=("python", "train.py"), launcher="torchrun")
    measurement = Measurement(cell=Cell(workload=work), repeat=0, attempt=1)
    place = NodePlace(0, 1, 1, "127.0.0.1", 1234, "127.0.0.1", ("127.0.0.1",), 1, gpus)
    here: Any = SimpleNamespace(work=work, place=place, folder=tmp_path, samples=tmp_path, values={})
    assert node_run.NodeRun.environment(here, measurement).get("CUDA_DEVICE_ORDER") == order


LINES = {"pattern": r"step (?P<step>\d+)"}
SOURCES = [{"measure": "lines", "lines": LINES}, {"measure": "lines", "lines": LINES | {"rank": "any"}},
           {"measure": "tensorboard"}]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES, ids=["first", "any", "tensorboard"])
def test_ranks_that_print_nothing_do_not_hang(
    source: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After hang_seconds the second node ended a launch whose first rank printed its steps."""
    monkeypatch.setattr(node_run, "_START_SECONDS", 0.5)
    parts = node_parts(tmp_path, "import time; time.sleep(2)", 1, hang_seconds=0.5, **source)
    assert [(rank, part.status) for rank, (part, _) in parts.items()] == [(1, Status.COMPLETED)]


@pytest.mark.parametrize("source", SOURCES, ids=["first", "any", "tensorboard"])
def test_ranks_that_lose_those_which_stop_after_ended_are_complete(source: dict[str, object], tmp_path: Path) -> None:
    parts = node_parts(tmp_path, LOST, 1, stop_after={"steps": 5}, **source)
    assert parts[1][0].status is Status.COMPLETED


@pytest.mark.parametrize(("code", "kind"), [(LOST, "PeerLost"), ("raise KeyError('layer')", "KeyError")])
def test_other_ends_of_such_ranks_stay_failures(code: str, kind: str, tmp_path: Path) -> None:
    more = {} if kind == "PeerLost" else {"stop_after": {"steps": 5}}
    part, _ = node_parts(tmp_path, code, 1, measure="lines", lines=LINES, **more)[1]
    assert part.status is Status.FAILED and part.failure is not None and part.failure.kind == kind


def test_lines_of_the_last_rank_are_read_on_its_node(tmp_path: Path) -> None:
    """Megatron's: the first node looked for them among the lines of its own ranks, and found none."""
    part, columns = node_parts(tmp_path / "last", MEGATRON, 1, measure="lines", preset="megatron")[1]
    assert part.status is Status.COMPLETED and part.figures["steps"] == 4
    # A figure of the script would take the place of one of these.
    assert {*part.figures, *GpuSampler(0, "").figures()} <= TAKEN | {"lines"}
    assert sorted(columns) == ["loss", "step_seconds"]
    part, columns = node_parts(tmp_path / "first", "pass", 0, measure="lines", preset="megatron")[0]
    assert part.status is Status.COMPLETED and not columns
    part, _ = node_parts(tmp_path / "none", "pass", 1, measure="lines", preset="megatron")[1]
    assert part.failure is not None and part.failure.kind == "NoFigures"


def test_the_launcher_of_a_script_is_no_other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's import of torch was called that of other processes: scripts were measured "on a busy machine"."""
    plain, burn = node_run.node_command, 'for ((n = 0; n < 300000; n++)); do :; done; exec "$@"'

    def slow(*of: Any) -> list[str]:
        return ["bash", "-c", burn, "launcher", *(plain(*of) or [])]

    monkeypatch.setattr(node_run, "node_command", slow)
    part, _ = node_parts(tmp_path, "import time; time.sleep(1)", 0, measure="wall")[0]
    spent, script = (part.figures[name] for name in ("children_cpu_seconds", "cpu_seconds"))
    assert part.status is Status.COMPLETED and isinstance(spent, float) and isinstance(script, float)
    assert spent > max(0.2, script), "of the launcher alone"


@pytest.mark.parametrize(("launcher", "rank"), [("mpirun", None), ("accelerate", None), ("none", "1")])
def test_a_rank_that_rankwise_was_started_with_is_not_the_scripts(
    launcher: str, rank: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of mpirun took it for theirs."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    place = NodePlace(1, 2, 1, "127.0.0.1", 1234, "127.0.0.1", ("127.0.0.1", "127.0.0.1"), 1, False)
    work = ScriptWorkload(command=("a",), launcher=launcher)
    node = SimpleNamespace(work=work, place=place, folder=tmp_path, samples=tmp_path, values={})
    found = node_run.NodeRun.environment(node, None)  # type: ignore[arg-type]
    assert found.get("RANK") == rank and "7" not in (found.get("LOCAL_RANK"), found.get("WORLD_SIZE"))


@pytest.mark.parametrize(
    "source",
    [
        {"measure": "wall"},
        {"measure": "lines", "lines": {"pattern": r"(?P<step_units>\d+) bytes"}},
        {"measure": "json", "json_figures": {"figures": {"step_units": "0"}}},
    ],
    ids=["wall", "lines", "json"],
)
def test_a_whole_run_is_that_of_the_process(
    source: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It included the unpacking of the inputs, the launcher's own time, and what passed until its end was seen."""

    def slow_fill(*given: Any) -> None:
        time.sleep(0.5)
        fill_workdir(*given)

    monkeypatch.setattr(node_run, "fill_workdir", slow_fill)
    script = "import time; print('[8]', flush=True); print('8 bytes', flush=True); time.sleep(0.2)"
    part, columns = node_parts(tmp_path, script, 0, **source)[0]
    (seconds,) = columns["step_seconds"]
    whole = part.figures["measurement_seconds"]
    assert isinstance(whole, float) and 0.2 < seconds < whole - 0.5


WORKS = """
import os, time
parent, big, began = os.getppid(), bytearray(200 << 20), time.process_time()
print("0", flush=True)
while time.process_time() - began < 0.5: pass
print("1", flush=True)
while os.getppid() == parent: time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_program_below_a_shell_that_is_stopped_has_its_own_memory_and_time(tmp_path: Path) -> None:
    """They were those of the shell: a few MB, and all of the program's work was that of other processes."""
    wrapped = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORKS!r}])"
    lines = {"pattern": r"(?P<step>\d+)"}
    part, _ = node_parts(tmp_path, wrapped, 0, "memory", measure="lines", lines=lines, stop_after={"steps": 2})[0]
    assert part.status is Status.COMPLETED and part.figures["stopped_early"]
    peak, seconds = part.figures["peak_memory_bytes"], part.figures["cpu_seconds"]
    assert isinstance(peak, int) and 200 << 20 < peak < 400 << 20
    assert isinstance(seconds, float) and seconds > 0.5


@pytest.mark.parametrize(("lines", "advice"), [(9, "came at once"), (2, "Measure more steps")])
def test_lines_that_come_at_once_are_told_from_too_few(lines: int, advice: str, tmp_path: Path) -> None:
    """Of a program in C, whose output is written when it ends, more steps were asked for."""
    # One write, as from a buffer: each line by itself may be read by itself, and has a time then.
    code = f"import os; os.write(1, b''.join(b'step %d\\n' % n for n in range({lines})))"
    part, _ = node_parts(tmp_path, code, 0, measure="lines", lines=LINES, tokens_per_step=8)[0]
    assert part.failure is not None and part.failure.kind == "NoFigures" and advice in part.failure.message


STARTS_ANOTHER = """
import os, subprocess, sys, time
code = (
    "import os, time; from rankwise_probe import step\\n"
    "for n in range(6): time.sleep(0.01 + 0.02 * int(os.environ['RANK'])); step(tokens=100)"
)
ranks = [subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ, RANK=str(n))) for n in range(2)]
for rank in ranks: rank.wait()
"""


def test_tokens_of_the_ranks_that_a_script_starts_itself_are_counted(tmp_path: Path) -> None:
    """A shell script with torchrun, started by launcher none, had the tokens and the time of rank 0 alone."""
    part, columns = node_parts(tmp_path, STARTS_ANOTHER, 0, measure="probe")[0]
    assert part.status is Status.COMPLETED, part.failure
    assert set(columns["step_units"]) == {200} and min(columns["step_seconds"]) > 0.03


@pytest.mark.parametrize("combine", ["sum", "rank_0"])
def test_steps_of_every_rank_are_kept_however_their_units_are_combined(combine: str, tmp_path: Path) -> None:
    """A step takes as long as its slowest rank: with `combine: rank_0` those of the others were not there."""
    code = "import time\nfrom rankwise_probe import step\nfor n in range(6): time.sleep(0.02); step(tokens=8)"
    part, columns = node_parts(tmp_path, code, 1, measure="probe", combine=combine)[1]
    assert part.status is Status.COMPLETED, part.failure
    assert len(columns["step_seconds"]) == 5 and min(columns["step_seconds"]) > 0.02


def test_an_interpreter_may_lie_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """`~/venv/bin/python: No such file or directory`, where it was."""
    monkeypatch.setenv("HOME", "/home/me")
    work = ScriptWorkload(command=("train.py",), python="~/venv/bin/python")
    assert script_interpreter(work) == "/home/me/venv/bin/python"
    assert program_line(work, ["train.py"])[0] == "/home/me/venv/bin/python"
