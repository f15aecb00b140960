"""Faults on a real cluster, each provoked for real: python -m benchmarks.faults.bench

A lab of two nodes is brought up for the campaign. For each fault a small study (five cells, a launch each) runs
through Prefect on it; when its victim, a cell on both nodes, is being measured, the fault happens. Then records, the
queue and the processes say whether the fault was called what it was, whether what could be tried again was, and
whether anything was lost or left. Prints a Markdown table; exit code 1 where any row is wrong.

    python -m benchmarks.faults.bench --only link preempted      # faults whose names contain one of these
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.faults.scenario import Fault, Row, Scenario, judge
from configs.plans.record import Status
from flows.server.local import begin
from flows.server.settings import api_named_by_environment
from slurm.lab import cluster, daemons, members, network
from slurm.lab.plan import LabPlan, LabRequest

_DOWN_LIMIT_SECONDS = 60.0
_CUT_SECONDS = 3.0
_AWAY_SECONDS = 5.0
_DISK = "small-disk"
_DISK_BYTES = 96 << 20


def kill_rank(scene: Scenario) -> None:
    """SIGKILL to the rank on the second node."""
    progress = scene.progress(scene.victim())[1]
    assert progress is not None
    os.kill(progress.pid, signal.SIGKILL)


def kill_slurmd(scene: Scenario) -> None:
    """Kill the daemon of the second node; start it again when the job's end is known."""
    victim, lab = scene.victim(), scene.lab
    slurmd = daemons.slurmd(lab, lab.node_names[1])
    daemons.stop(lab, slurmd)
    try:
        scene.await_end_of(victim)
    finally:
        daemons.start(lab, slurmd)
        daemons.wait_until_it_works(lab, slurmd)


def kill_node(scene: Scenario) -> None:
    """Kill all that lives on the second node, as a loss of power does; it boots when the job's end is known."""
    victim, lab = scene.victim(), scene.lab
    node = lab.node_names[1]
    daemons.stop(lab, daemons.slurmd(lab, node))
    for pid in members.inhabitants(lab.name, node):
        os.kill(pid, signal.SIGKILL)
    try:
        scene.await_end_of(victim)
    finally:
        daemons.start(lab, daemons.slurmd(lab, node))
        daemons.wait_until_it_works(lab, daemons.slurmd(lab, node))


def kill_launcher(scene: Scenario) -> None:
    """SIGKILL to our launcher on the first node: nobody is left there who could say how the job ended."""
    paths = scene.victim()
    for pid in members.inhabitants(scene.lab.name, scene.lab.node_names[0]):
        command = psutil.Process(pid).cmdline()
        if "slurm.launch" in command and any(str(paths.folder.resolve()) in word for word in command):
            os.kill(pid, signal.SIGKILL)
            return
    raise RuntimeError("no launcher was found on the first node")


def cut_link(scene: Scenario) -> None:
    """Pull the second node's plug, and put it in again when the job's end is known."""
    victim = scene.victim()
    with _cut(scene.lab):
        scene.await_end_of(victim)


def cut_link_shortly(scene: Scenario) -> None:
    """Pull it for so short a time that nobody needs to mind."""
    scene.victim()
    with _cut(scene.lab):
        time.sleep(_CUT_SECONDS)


@contextmanager
def _cut(lab: LabPlan) -> Iterator[None]:
    node = lab.node_names[1]
    network.cut_link(lab, node)
    try:
        yield
    finally:
        network.restore_link(lab, node)


def restart_slurmctld(scene: Scenario) -> None:
    """Kill the scheduler while jobs run, and start it again after some seconds."""
    scene.victim()
    _away(scene, "slurmctld")


def stop_slurmdbd(scene: Scenario) -> None:
    """No accounts are kept from the victim's measurement on until the study has ended."""
    scene.victim()
    database = daemons.find(scene.lab, "slurmdbd")
    daemons.stop(scene.lab, database)
    try:
        scene.await_flow()
    finally:
        daemons.start(scene.lab, database)
        daemons.wait_until_it_works(scene.lab, database)


def _away(scene: Scenario, program: str) -> None:
    daemon = daemons.find(scene.lab, program)
    daemons.stop(scene.lab, daemon)
    time.sleep(_AWAY_SECONDS)
    daemons.start(scene.lab, daemon)
    daemons.wait_until_it_works(scene.lab, daemon)


def scancel(scene: Scenario) -> None:
    """Somebody ends the job by hand."""
    scene.slurm("scancel", scene.job_id(scene.victim()))


def nothing(_: Scenario) -> None:
    """The victim brings the fault about by itself."""


def fill_disk(scene: Scenario) -> None:
    """Fill the run folder's disk until the study has ended; then make room and go on with it."""
    scene.victim()
    filler = scene.folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for piece in (1 << 20, 4096, 1):
                _write_until_full(file.fileno(), piece)
        scene.await_flow()
    finally:
        filler.unlink()
    scene.start()


def _write_until_full(descriptor: int, piece: int) -> None:
    try:
        while True:
            os.write(descriptor, b"x" * piece)
    except OSError:
        return


def preempt(scene: Scenario) -> None:
    """A job of a partition with a higher priority needs the second node for some seconds."""
    scene.victim()
    node = scene.lab.node_names[1]
    asked = ["--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--job-name=urgent"]
    scene.slurm("sbatch", *asked, "--wrap=sleep 3")


def kill_flow(scene: Scenario) -> None:
    """Kill the submitting process while its jobs run and wait, and go on with the study."""
    scene.victim()
    scene.kill_flow()
    scene.start()


_MEMORY = {"memory_per_node": "900M"}
FAULTS = (
    Fault("rank killed", "SIGKILL to the rank on node 2", kill_rank, (Status.FAILED,)),
    Fault(
        "launcher killed",
        "SIGKILL to the launcher on node 1",
        kill_launcher,
        (Status.NODE_FAILED, Status.COMPLETED),
    ),
    Fault(
        "slurmd killed",
        "SIGKILL to slurmd of node 2, back after the job's end",
        kill_slurmd,
        (Status.NODE_FAILED, Status.COMPLETED),
        word="NODE_FAIL",
        victim={"seconds": 60.0},
    ),
    Fault(
        "node lost",
        "SIGKILL to all processes of node 2, back after the job's end",
        kill_node,
        (Status.NODE_FAILED, Status.COMPLETED),
        victim={"seconds": 30.0},
    ),
    Fault(
        "link cut",
        "link of node 2 down until the job's end",
        cut_link,
        (Status.NODE_FAILED, Status.COMPLETED),
        victim={"seconds": 40.0},
    ),
    Fault("link cut for 3 s", "link of node 2 down for 3 s", cut_link_shortly, (Status.COMPLETED,)),
    Fault("slurmctld restarted", "SIGKILL, started after 5 s", restart_slurmctld, (Status.COMPLETED,)),
    Fault("slurmdbd down", "SIGKILL, started after the study", stop_slurmdbd, (Status.COMPLETED,)),
    Fault("scancel", "scancel of the job by another process", scancel, (Status.CANCELLED,), word="CANCELLED"),
    Fault(
        "time limit",
        "a measurement of 100 s in a job of 1 minute",
        nothing,
        (Status.TIMEOUT,),
        word="TIMEOUT",
        victim={"seconds": 100.0},
        target={"time_limit_minutes": 1},
    ),
    Fault(
        "out of memory",
        "1.5 GiB on a rank of a job of 900 MB a node",
        nothing,
        (
            Status.OUT_OF_MEMORY,
        ),  # Slurm says so of the step; of the job it says FAILED where that is not on its first node
        victim={"allocate_bytes": 3 << 29},
        target=_MEMORY,
    ),
    Fault(
        "disk full",
        "the run folder's disk is filled; room and another run after the study's end",
        fill_disk,
        (Status.FAILED, Status.COMPLETED),
    ),
    Fault(
        "preempted",
        "a job of a higher priority takes node 2 for 3 s",
        preempt,
        (Status.PREEMPTED, Status.COMPLETED),
        word="PREEMPTED",
    ),
    Fault("flow killed", "SIGKILL to `rankwise run`, and another run at once", kill_flow, (Status.COMPLETED,)),
)


def provoke(lab: LabPlan, folder: Path, fault: Fault) -> Row:
    """One fault from the study's start to its judgement. What goes wrong on the way makes the row wrong."""
    scene = Scenario(lab, folder, fault)
    try:
        scene.start()
        fault.inject(scene)
        scene.finish()
        return judge(scene)
    except Exception as error:
        traceback.print_exc()
        wrong = f"{type(error).__name__}: {error}"
        return Row(fault, (), 0, 0, time.monotonic() - scene.began, scene.queue_empty_seconds, (wrong,))
    finally:
        scene.give_up()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A small file system, mounted before the nodes are made, since they see what was mounted then."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def table(rows: list[Row]) -> str:
    """Markdown, a line for each fault."""
    lines = [
        "| fault | what was done | the victim's attempts | Slurm's word | other cells measured | seconds "
        "| queue empty after, s | verdict |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        attempts = ", ".join(record.status for record in row.attempts)
        words = ", ".join(record.accounting.state if record.accounting else "–" for record in row.attempts)
        empty = "–" if row.queue_empty_seconds is None else f"{row.queue_empty_seconds:.1f}"
        verdict = "; ".join(row.wrong) or "as it must be"
        cells = [row.fault.name, row.fault.done, attempts, words, f"{row.others_completed} of {row.others}"]
        lines.append("| " + " | ".join([*cells, f"{row.seconds:.0f}", empty, verdict]) + " |")
    return "\n".join(lines)


def campaign(faults: list[Fault], folder: Path, name: str) -> list[Row]:
    """All faults, one after the other, on a lab of their own."""
    rows: list[Row] = []
    with small_disk(folder / _DISK) as disk:
        request = LabRequest(name=name, folder=folder / "lab", nodes=2)
        try:
            cluster.up(request)
            lab = cluster.find(name)
            for number, fault in enumerate(faults, 1):
                place = (disk if fault.inject is fill_disk else folder) / f"{number:02d}"
                print(f"{fault.name} ...", flush=True)
                rows.append(provoke(lab, place, fault))
                print(f"  {'; '.join(rows[-1].wrong) or 'as it must be'} ({rows[-1].seconds:.0f} s)", flush=True)
        finally:
            cluster.down(name, request.folder)
    return rows


def main() -> int:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="faults whose names contain one of these")
    parser.add_argument("--runs", type=Path, help="keep run folders and the lab's logs here; a short absolute path")
    parser.add_argument("--name", default="faults", help="of the lab")
    arguments = parser.parse_args()
    chosen = [fault for fault in FAULTS if any(word in fault.name for word in arguments.only)]
    with tempfile.TemporaryDirectory(prefix="rankwise-faults-", dir="/tmp") as scratch:
        folder = arguments.runs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if api_named_by_environment():
            rows = campaign(chosen, folder, arguments.name)
        else:
            with begin() as lease:
                lease.wait_until_healthy()
                rows = campaign(chosen, folder, arguments.name)
    print(table(rows))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
