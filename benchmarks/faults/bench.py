"""Faults on a real cluster, each provoked for real: python -m benchmarks.faults.bench

A lab of two nodes is brought up for the campaign. For each fault a small study (five cells, a launch each) runs
through Prefect on it; when its victim, a cell on both nodes, is being measured, the fault happens. Then records, the
queue and the processes say whether the fault was called what it was, whether what could be tried again was, and
whether anything was lost or left. Prints a Markdown table; exit code 1 where any row is wrong.

    python -m benchmarks.faults.bench --only link preempted      # faults whose names contain one of these
"""

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.faults.injections import (
    cut_link,
    cut_link_shortly,
    fill_disk,
    hold,
    hold_for_ever,
    kill_flow,
    kill_launcher,
    kill_node,
    kill_rank,
    kill_slurmd,
    lose_start,
    nothing,
    preempt,
    requeue,
    restart_slurmctld,
    scancel,
    stop_slurmdbd,
)
from benchmarks.faults.scenario import Fault, Row, Scenario, judge
from configs.records.record import Status
from flows.server.local import lease_server
from flows.server.settings import api_named_by_environment
from slurm.lab import cluster, daemons
from slurm.lab.commands import obey
from slurm.lab.plan import LabPlan, LabRequest

_DISK = "small-disk"
_DISK_BYTES = 96 << 20


_SILENT_SQUEUE = """#!/bin/sh
echo . >>HERE/calls
[ $(($(wc -l <HERE/calls) % 10)) -lt 5 ] || exit 0
exec REAL "$@"
"""
_TRIAL_PASSES = """#!/bin/sh
case " $* " in *" --test-only "*) exit 0 ;; esac
exec REAL "$@"
"""
_NO_SACCT = "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n"
_QOS = {"denies": ["MaxTRESPerJob=node=1"], "few": ["MaxSubmitJobsPerUser=2"]}
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
    Fault(
        "squeue silent",
        "five of each ten calls of squeue print nothing, with exit code 0",
        nothing,
        (Status.COMPLETED,),
        programs={"squeue": _SILENT_SQUEUE},
    ),
    Fault(
        "requeue",
        "`scontrol requeue` of the running job",
        requeue,
        (Status.PREEMPTED, Status.COMPLETED),
        word="REQUEUED",
    ),
    Fault(
        "hold",
        "`scontrol hold` of the pending job, released when the others are measured",
        hold,
        (Status.COMPLETED,),
        said="held: JobHeldAdmin",
    ),
    Fault(
        "hold for ever",
        "`scontrol hold` of the pending job; `max_queue_minutes: 0.3`",
        hold_for_ever,
        (Status.CANCELLED,),
        word="CANCELLED",
        target={"max_queue_minutes": 0.3},
        said="max_queue_minutes 0.3",
    ),
    Fault(
        "deny",
        "a QOS of one node per job, with DenyOnLimit; the trial before the run is let pass",
        nothing,
        (Status.FAILED,),
        target={"qos": "denies"},
        said="QOSMaxNodePerJobLimit",
        programs={"sbatch": _TRIAL_PASSES},
        shared_by=("large",),
    ),
    Fault(
        "submit limit",
        "a QOS of two jobs per user, with DenyOnLimit",
        nothing,
        (Status.COMPLETED,),
        target={"qos": "few"},
        said="QOSMaxSubmitJobPerUserLimit",
    ),
    Fault(
        "no accounts",
        "sacct says that accounting storage is disabled",
        nothing,
        (Status.COMPLETED,),
        word="COMPLETED",
        programs={"sacct": _NO_SACCT},
    ),
    Fault(
        "start lost",
        "SIGKILL to the launcher on node 2 while the ranks start",
        lose_start,
        (Status.NODE_FAILED, Status.COMPLETED),
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


def add_qos(lab: LabPlan) -> None:
    """The QOS of the faults that need one; the database tells slurmctld of them."""
    manager = ["sacctmgr", "--immediate"]
    for name, limits in _QOS.items():
        obey([*manager, "add", "qos", name, *limits, "flags=DenyOnLimit"], daemons.client(lab))
    obey([*manager, "modify", "user", "root", "set", f"qos+={','.join(_QOS)}"], daemons.client(lab))
    time.sleep(2.0)


def campaign(faults: list[Fault], folder: Path, name: str) -> list[Row]:
    """All faults, one after the other, on a lab of their own."""
    rows: list[Row] = []
    with small_disk(folder / _DISK) as disk:
        request = LabRequest(name=name, folder=folder / "lab", nodes=2, enforce_limits=True)
        try:
            cluster.up(request)
            lab = cluster.find_lab(name)
            add_qos(lab)
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
            with lease_server() as lease:
                lease.wait_until_healthy()
                rows = campaign(chosen, folder, arguments.name)
    print(table(rows))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
