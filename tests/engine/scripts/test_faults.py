"""Scripts that end badly: each is classified right, and nothing of it is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths, RunPaths
from configs.records.record import RankPart, Status, read_part
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.script import ScriptWorkload
from engine.scripts.outputs import HEAD_BYTES, TAIL_BYTES
from tasks.campaign.launches.leftovers import mark_collected
from tasks.planning.script_inputs import pack_input
from tests.support.cluster.launches import assert_nothing_left, launch, read_end

STEPS = """
import os, sys, time
from rankwise_probe import step
rank = int(os.environ["RANK"])
def steps(count, loss=1.0):
    for _ in range(count):
        time.sleep(0.002)
        step(tokens=10, loss=loss)
"""
CHILD = "import os, time; os.setsid(); time.sleep(600)"
DEAF = (
    "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsteps(5)\nif rank == 1: sys.exit(4)\ntime.sleep(600)"
)
LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
FAULTS = {
    "exit": "steps(5)\nif rank == 1: sys.exit(3)\ntime.sleep(60)",
    "raise": "steps(5)\nif rank == 1: raise KeyError('no such layer')\ntime.sleep(60)",
    "hang": "steps(5)\nif rank == 1:\n    while True: time.sleep(1)\nwhile True: time.sleep(1)",
    "nan": "steps(5)\nsteps(3, float('nan'))",
    "out of memory": f"steps(5)\n{LIMIT}bytearray(1 << 31)",
    "no figure": "print('nothing is told')",
    "garbage": "os.write(1, bytes(range(256)) * 4000 + b'\\n')\nprint('step x loss y')\nsteps(5)",
    "much output": "line = b'x' * 99 + b'\\n'\nfor _ in range(10_000): os.write(1, line * 1000)\nsteps(5)",
    "children": f"import subprocess\nsteps(5)\nsubprocess.Popen([sys.executable, '-c', {CHILD!r}])",
    "ignores SIGTERM": DEAF,
}
EXPECTED = {
    "exit": (Status.FAILED, "ExitCode", "exit code 3"),
    "raise": (Status.FAILED, "KeyError", "KeyError: 'no such layer'"),
    "hang": (Status.TIMEOUT, "Hang", "no step for 2 s after step 5; stacks are in the rank's log"),
    "nan": (Status.FAILED, "NaNLoss", "the loss of step 6 is nan"),
    "out of memory": (Status.OUT_OF_MEMORY, "MemoryError", "MemoryError"),
    "no figure": (Status.FAILED, "NoFigures", "no step was seen"),
    "ignores SIGTERM": (Status.FAILED, "ExitCode", "exit code 4"),
}


def run_script(
    folder: Path, source: str, ranks: int = 2, cell_seconds: float = 120.0, **fields: object
) -> tuple[JobPaths, Measurement, list[RankPart]]:
    """Run a script through the node's launcher; returns the parts that there are."""
    inputs = folder / "inputs"
    inputs.mkdir(exist_ok=True)
    (folder / "fault.py").write_text(source)
    work = {
        "command": ("fault.py",),
        "inputs": (pack_input(folder, "fault.py", inputs),),
        "hang_seconds": 30.0,
        **fields,
    }
    cell = Cell(workload=ScriptWorkload(**work), layout={"dp": ranks})  # type: ignore[arg-type]
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    paths = JobPaths(folder / "jobs" / "0001")
    paths.parts.mkdir(parents=True)
    job = Job(
        name="0001",
        study="s",
        measuring_pass="timed",
        measuring=Measuring(cell_timeout_seconds=cell_seconds),
        measurements=(measurement,),
        ranks_per_node=ranks,
        timeout_seconds=180.0,
        inputs=str(inputs),
        cache=str(folder / "cache"),
    )
    paths.job.write_text(job.model_dump_json())
    launch(paths)
    found = [paths.part(measurement.name, rank) for rank in range(ranks)]
    return paths, measurement, [read_part(path) for path in found if path.exists()]


@pytest.mark.parametrize(
    "fault",
    [
        fault if fault in ("exit", "hang", "children") else pytest.param(fault, marks=pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_faults_of_scripts_are_told_apart_and_leave_nothing(fault: str, tmp_path: Path) -> None:
    paths, _, parts = run_script(tmp_path, STEPS + FAULTS[fault], hang_seconds=2.0 if fault == "hang" else 30.0)
    end = read_end(paths)
    assert_nothing_left(tmp_path)
    assert [path.name for path in paths.folder.glob(".script_*")] == []
    if fault not in EXPECTED:
        assert end.status is Status.COMPLETED, end
        assert [part.status for part in parts] == [Status.COMPLETED] * 2
        assert {part.figures["steps"] for part in parts} == {4}
        size = paths.rank_log(0).stat().st_size
        assert size <= HEAD_BYTES + 2 * TAIL_BYTES + 1000
        assert (b"bytes left out" in paths.rank_log(0).read_bytes()) == (fault == "much output")
        return
    status, kind, message = EXPECTED[fault]
    assert (end.status, end.kind) == (status, kind), end
    worst = next(part for part in parts if part.failure and part.failure.kind == kind)
    assert worst.failure is not None and message in worst.failure.message
    assert worst.status is status
    if fault == "hang":
        assert all("fault.py" in paths.rank_log(rank).read_text() for rank in range(2))
    if fault in ("exit", "raise", "ignores SIGTERM"):
        assert end.rank == 1 and worst.rank == 1


def test_the_folder_of_a_script_that_the_launcher_ends_is_removed(tmp_path: Path) -> None:
    """Its inputs and all that it had written, checkpoints for one, stayed in the run folder, as after a Ctrl-C."""
    writes = "open('checkpoint.bin', 'wb').write(bytes(1000)); os.symlink('/usr', 'data'); time.sleep(600)"
    paths, _, _ = run_script(tmp_path, STEPS + writes, ranks=1, cell_seconds=4.0)
    assert read_end(paths).kind == "CellTimeout"
    assert_nothing_left(tmp_path)
    mark_collected(RunPaths(tmp_path), paths.folder.name)
    assert [path.name for path in paths.folder.glob(".script_*")] == []


ABORTS = "import atexit, os\nif os.environ['RANK'] == '0': atexit.register(os.abort)\n"


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 3])
def test_a_rank_that_is_ended_because_another_aborted_in_its_teardown_is_complete(steps: int, tmp_path: Path) -> None:
    """Gloo's threads may abort a process that has done its work; torchrun then ends its peers in theirs."""
    made = f"""
steps(5 if rank == 0 else {steps})
done = {str(tmp_path / "done")!r}
if rank == 1:
    open(done, "w").close()
    time.sleep(60)
while not os.path.exists(done):  # as a last collective would make it wait
    time.sleep(0.01)
"""
    paths, _, parts = run_script(tmp_path, ABORTS + STEPS + made)
    end = read_end(paths)
    assert parts[0].status is Status.COMPLETED and parts[0].figures["aborted_in_teardown"]
    if steps == 5:
        assert (end.status, parts[1].status, parts[1].figures["steps"]) == (Status.COMPLETED, Status.COMPLETED, 4), end
    else:
        assert (end.kind, parts[1].status) == ("PeerLost", Status.FAILED)
    assert_nothing_left(tmp_path)


LATE_ABORT = """
import atexit, os, time
rank = os.environ["RANK"]
done = DONE
class Library:  # its objects are destroyed after the interpreter's atexit functions
    def __del__(self):
        if rank == "1":
            os.close(os.open(done, os.O_CREAT | os.O_WRONLY))
            time.sleep(60)
        while not os.access(done, os.F_OK):  # as a last collective would make it wait
            time.sleep(0.01)
        os.abort()
import builtins
builtins.library = Library()
"""


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_an_abort_after_the_interpreter_ended_fails_no_script_that_prints_its_figures(
    early: bool, tmp_path: Path
) -> None:
    late = LATE_ABORT.replace("DONE", repr(str(tmp_path / "done")))
    source = ("import os\nos.abort()\n" if early else late) + "print('tokens/s 100')\n" * 5
    paths, _, parts = run_script(tmp_path, source, measure="wall", items_per_step="8", unit="sample")
    end = read_end(paths)
    if early:
        assert (end.status, end.kind) == (Status.FAILED, "SIGABRT"), end
    else:
        assert end.status is Status.COMPLETED, end
        assert [part.status for part in parts] == [Status.COMPLETED] * 2
        assert parts[0].figures["aborted_in_teardown"]
    assert_nothing_left(tmp_path)


def test_a_script_that_goes_on_is_ended_and_complete(tmp_path: Path) -> None:
    _, _, parts = run_script(tmp_path, STEPS + "steps(1_000_000)", stop_after={"steps": 20}, warmup_steps=5)
    assert [part.status for part in parts] == [Status.COMPLETED] * 2
    assert {part.figures["steps"] for part in parts} == {15}
    assert all(part.figures["stopped_early"] for part in parts)
    assert_nothing_left(tmp_path)


RESUMED = r"""
import json, struct, sys, time
def event(step):
    value = b"\x0a\x04loss" + b"\x15" + struct.pack("<f", float(sys.argv[3]))
    summary = b"\x0a" + bytes([len(value)]) + value
    number = bytes([step & 127 | 128, step >> 7 & 127 | 128, step >> 14])
    data = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + number + b"\x2a" + bytes([len(summary)]) + summary
    return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)
with open(sys.argv[1], "wb", buffering=0) as file:
    for step in range(20000, 20000 + int(sys.argv[2])):
        file.write(event(step))
        print("step", step, flush=True)
        time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["lines", "tensorboard"])
def test_a_script_that_resumes_beside_event_files_of_its_first_run(measure: str, tmp_path: Path) -> None:
    """It was ended after its first step, whose number is high, or measured by the files that came with the inputs."""
    old, inputs = tmp_path / "data" / "old.tfevents.1", tmp_path / "inputs"
    old.parent.mkdir()
    inputs.mkdir()
    (tmp_path / "fault.py").write_text(RESUMED)
    first_run = [sys.executable, str(tmp_path / "fault.py"), str(old), "50", "nan"]
    subprocess.run(first_run, check=True, capture_output=True)
    fields: dict[str, object] = {"lines": {"pattern": r"step (?P<step>\d+)"}} if measure == "lines" else {}
    _, _, parts = run_script(
        tmp_path,
        RESUMED,
        ranks=1,
        inputs=tuple(pack_input(tmp_path, name, inputs) for name in ("data", "fault.py")),
        measure=measure,
        command=("fault.py", "new.tfevents.2", "100000", "1"),
        stop_after={"steps": 20},
        items_per_step=1,
        unit="sample",
        **fields,
    )
    assert [(part.status, part.figures["stopped_early"]) for part in parts] == [(Status.COMPLETED, True)]
    assert parts[0].figures["steps"] == 19


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    paths, _, _ = run_script(tmp_path, "", python="/no/such/python")
    end = read_end(paths)
    assert end.status is Status.FAILED
    assert end.message is not None and "/no/such/python: No such file or directory" in end.message
    assert list(paths.folder.glob(".script_*")) == []


def test_secrets_of_the_environment_do_not_reach_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    source = STEPS + "steps(5)\nassert 'WANDB_API_KEY' not in os.environ\n"
    _, _, parts = run_script(tmp_path, source, ranks=1)
    assert [part.status for part in parts] == [Status.COMPLETED]
    assert os.environ["WANDB_API_KEY"] and sys.executable


def test_a_path_of_modules_in_the_environment_leaves_the_probe_in_place(tmp_path: Path) -> None:
    """The script's own PYTHONPATH replaced that of the probe, which could then not be imported."""
    source = "import os\nassert 'own_modules' in os.environ['PYTHONPATH']\n" + STEPS + "steps(5)"
    _, _, parts = run_script(tmp_path, source, ranks=1, environment={"PYTHONPATH": "{workdir}/own_modules"})
    assert [(part.status, part.figures["steps"]) for part in parts] == [(Status.COMPLETED, 4)]
