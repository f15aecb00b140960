"""What a job costs on a real cluster, and whether the queue's bounds hold: python -m benchmarks.slurm_queue

On a lab of two nodes, each as `rankwise run` in a process of its own:
1. jobs of one and of two nodes, one in the queue at a time: seconds from the moment in which sbatch had accepted a job
   to its first measured step, and from its last record to the moment in which squeue shows it no more.
2. many noop cells, packed into few jobs and with a job for each: the most jobs that were ever in the queue, against
   `max_queued`, and the most calls of squeue and of sacct in an interval of polling, against one of each.

Both are observed from outside: the queue by squeue calls of this process, rankwise's own calls by commands of the
same names, first on its PATH, that note the time and go on to the real ones. Exit code 1 where a bound was broken.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from configs.plans.job import Submission
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import Record, Status
from flows.server.local import lease_server
from flows.server.settings import api_named_by_environment
from reports.numbers.statistics import Estimate, estimate
from slurm.lab import cluster
from slurm.lab.plan import LabPlan, LabRequest
from tasks.campaign.ledger import planned_repeats, read_ledger

_LOOK_SECONDS = 0.1
_POLL_SECONDS = 2.0
_LEAVE_LIMIT_SECONDS = 5.0
_JITTER_SECONDS = 0.2
"""Two calls are counted into one interval only if they are closer than it by more than this: starting takes time."""
_RUN_LIMIT_SECONDS = 3 * 3600.0


@dataclass
class QueueWatch:
    """What an observer of the queue saw: when each job was seen last, and how many there were at most."""

    last_seen: dict[str, float] = field(default_factory=dict)
    gone_by: dict[str, float] = field(default_factory=dict)
    most: int = 0

    def look(self, text: str, asked_at: float) -> None:
        """Take up one answer of squeue, a job id a line."""
        there = set(text.split())
        self.most = max(self.most, len(there))
        for job in there:
            self.last_seen[job] = asked_at
        for job in self.last_seen.keys() - there:
            self.gone_by.setdefault(job, asked_at)


@contextmanager
def watched(lab: LabPlan) -> Iterator[QueueWatch]:
    """Ask squeue again and again, in a thread, while the block runs."""
    seen, over = QueueWatch(), threading.Event()
    environment = os.environ | {"SLURM_CONF": str(lab.slurm_conf)}
    command = ["squeue", "--noheader", "--array", "--format=%i"]

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            asked_at = time.time()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            if done.returncode == 0:
                seen.look(done.stdout, asked_at)

    thread = threading.Thread(target=look, name="queue watch")
    thread.start()
    try:
        yield seen
        time.sleep(2 * _LEAVE_LIMIT_SECONDS)  # the last job must be seen to leave
    finally:
        over.set()
        thread.join()


def counting_commands(folder: Path) -> Path:
    """A folder with a squeue and a sacct that note when they are called, in `<name>.log`, and call the real ones."""
    folder.mkdir()
    for name in ("squeue", "sacct"):
        real = shutil.which(name)
        assert real is not None, "the lab's packages are installed"
        script = folder / name
        script.write_text(f'#!/bin/sh\ndate +%s.%N >> "{folder}/{name}.log"\nexec {real} "$@"\n')
        script.chmod(0o755)
    return folder


def max_calls(log: Path, interval_seconds: float) -> tuple[int, int]:
    """All calls that were noted, and the most within one interval."""
    try:
        times = sorted(float(line) for line in log.read_text().split())
    except FileNotFoundError:
        return 0, 0
    window = interval_seconds - _JITTER_SECONDS
    return len(times), max((sum(at <= other < at + window for other in times) for at in times), default=0)


def study_of(name: str, cells: int, nodes: list[int], max_queued: int, pack: bool) -> dict[str, Any]:
    """Noop cells shared out over jobs of so many nodes."""
    experiments = {
        f"nodes_{count}": {
            "kind": "sweep",
            "base": {"dp": count, "items": count},
            "over": {"label": [f"{count}-{place}" for place in range(cells // len(nodes))]},
        }
        for count in nodes
    }
    target = {"kind": "slurm", "name": "lab", "partition": "lab", "nodes": max(nodes), "preflight": False}
    return {
        "study": name,
        "workload": {"kind": "noop", "seconds": 0.01},
        "targets": [target | {"max_queued": max_queued, "poll_seconds": _POLL_SECONDS}],
        "experiments": experiments,
        "pack": pack,
        "measuring": {"repeats": 1, "memory": False},
    }


@dataclass(frozen=True)
class Observed:
    """One study that was run to its end."""

    name: str
    run: RunPaths
    seconds: float
    queue: QueueWatch
    squeue: tuple[int, int]
    sacct: tuple[int, int]

    @property
    def records(self) -> list[Record]:
        """The record that decides of every cell. Raises RuntimeError where one has none that is completed."""
        plan = Plan.model_validate_json(self.run.plan.read_bytes())
        ledger = read_ledger(self.run)
        found = []
        for place in planned_repeats(plan):
            entry = ledger.decisive(place)
            if entry is None or entry.status is not Status.COMPLETED:
                raise RuntimeError(f"{self.name}: {place} is {entry.status if entry else 'lost'}")
            found.append(entry.record)
        return found


def run_study(lab: LabPlan, folder: Path, study: dict[str, Any]) -> Observed:
    """Run it to its end, observed. Raises RuntimeError with the end of its output where it fails."""
    place = folder / study["study"]
    place.mkdir()
    (place / "study.yaml").write_text(json.dumps(study))  # JSON is YAML too
    counting = counting_commands(place / "commands")
    command = [str(Path(sys.executable).with_name("rankwise")), "run", str(place / "study.yaml"), "--runs", str(place)]
    environment = os.environ | {"SLURM_CONF": str(lab.slurm_conf), "PATH": f"{counting}:{os.environ['PATH']}"}
    began = time.monotonic()
    with watched(lab) as queue, (place / "out.log").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=_RUN_LIMIT_SECONDS)
        seconds = time.monotonic() - began
    if done.returncode:
        raise RuntimeError(f"{study['study']} ended with {done.returncode}:\n{(place / 'out.log').read_text()[-2000:]}")
    calls = [max_calls(counting / f"{name}.log", _POLL_SECONDS) for name in ("squeue", "sacct")]
    return Observed(study["study"], RunPaths(place / study["study"]), seconds, queue, calls[0], calls[1])


@dataclass(frozen=True)
class JobTimes:
    """One job: from accepted to measuring, and from its last record to its leaving the queue."""

    nodes: int
    start_seconds: float
    leave_seconds: float | None


def job_times(observed: Observed) -> list[JobTimes]:
    """Of every job that measured something. Unknown where the observer never saw the job."""
    by_job: dict[str, list[Record]] = {}
    for record in observed.records:
        by_job.setdefault(record.job, []).append(record)
    found = []
    for name, records in by_job.items():
        submission = Submission.model_validate_json(observed.run.job(name).submission.read_bytes())
        first = min(_seconds_of(record.started_at) for record in records)
        last = max(_seconds_of(record.finished_at) for record in records)
        gone = observed.queue.gone_by.get(submission.job_id)
        start = first - _seconds_of(submission.submitted_at)
        found.append(JobTimes(records[0].cell.nodes, start, None if gone is None else gone - last))
    return found


def _seconds_of(stamp: str | None) -> float:
    assert stamp is not None, "a completed record has its times"
    return datetime.fromisoformat(stamp).timestamp()


def interval(value: Estimate | None) -> str:
    """`3.1 (2.9 to 3.4)`: median and 95 % interval, or range in brackets where jobs are too few."""
    if value is None:
        return "–"
    low, high = value.bounds
    return f"{value.median:.1f} " + (
        f"[{low:.1f} to {high:.1f}]" if value.interval is None else f"({low:.1f} to {high:.1f})"
    )


def latency_table(times: list[JobTimes]) -> tuple[str, list[str]]:
    """Markdown, and what is wrong."""
    lines = [
        "| nodes | jobs | accepted to first measured step, s | last record to empty queue, s | most, s |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    wrong = []
    for nodes in sorted({each.nodes for each in times}):
        group = [each for each in times if each.nodes == nodes]
        leaves = [each.leave_seconds for each in group if each.leave_seconds is not None]
        most = max(leaves, default=float("nan"))
        starts = estimate([each.start_seconds for each in group])
        lines.append(f"| {nodes} | {len(group)} | {interval(starts)} | {interval(estimate(leaves))} | {most:.1f} |")
        if len(leaves) < len(group):
            wrong.append(
                f"{len(group) - len(leaves)} jobs of {nodes} nodes were never seen in the queue, or to leave it"
            )
        if leaves and median(leaves) > _LEAVE_LIMIT_SECONDS:
            wrong.append(f"jobs of {nodes} nodes leave the queue {median(leaves):.1f} s after their last record")
    return "\n".join(lines), wrong


def bounds_table(studies: list[tuple[Observed, int]]) -> tuple[str, list[str]]:
    """Markdown, and what is wrong. With each study its `max_queued`."""
    lines = [
        "| study | cells measured | jobs | seconds | most in the queue | allowed | squeue calls | most an interval "
        "| sacct calls | most an interval |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    wrong = []
    for observed, max_queued in studies:
        records = observed.records
        jobs = len({record.job for record in records})
        queue, squeue, sacct = observed.queue, observed.squeue, observed.sacct
        cells = [observed.name, len(records), jobs, f"{observed.seconds:.0f}", queue.most, max_queued, *squeue, *sacct]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
        if queue.most > max_queued:
            wrong.append(f"{observed.name}: {queue.most} jobs were in the queue, {max_queued} are allowed")
        for name, (_, most) in (("squeue", squeue), ("sacct", sacct)):
            if most > 1:
                wrong.append(f"{observed.name}: {most} calls of {name} within {_POLL_SECONDS:g} s")
    return "\n".join(lines), wrong


def measure(lab: LabPlan, folder: Path, jobs: int, cells: int, max_queued: int) -> list[str]:
    """Run all studies and print the tables. Returns what is wrong."""
    wrong: list[str] = []
    if jobs:
        latency = run_study(lab, folder, study_of("latency", 2 * jobs, [1, 2], max_queued=1, pack=False))
        text, found = latency_table(job_times(latency))
        print(text, flush=True)
        wrong += found
    if cells:
        packed = run_study(lab, folder, study_of("packed", cells, [1], max_queued, pack=True))
        unpacked = run_study(lab, folder, study_of("unpacked", cells, [1], max_queued, pack=False))
        text, found = bounds_table([(packed, max_queued), (unpacked, max_queued)])
        print(text, flush=True)
        wrong += found
    return wrong


def main() -> int:
    """Bring a lab up, measure, take it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=12, help="of one node, and of two; 0: leave this part out")
    parser.add_argument("--cells", type=int, default=500, help="packed and unpacked; 0: leave this part out")
    parser.add_argument("--max-queued", type=int, default=50)
    parser.add_argument("--runs", type=Path, help="keep run folders and the lab's logs here; a short absolute path")
    parser.add_argument("--name", default="bench", help="of the lab")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rankwise-bench-", dir="/tmp") as scratch:
        folder = arguments.runs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        request = LabRequest(name=arguments.name, folder=folder / "lab", nodes=2)
        try:
            cluster.up(request)
            lab = cluster.find_lab(request.name)
            asked = (lab, folder, arguments.jobs, arguments.cells, arguments.max_queued)
            if api_named_by_environment():
                wrong = measure(*asked)
            else:
                with lease_server() as lease:
                    lease.wait_until_healthy()
                    wrong = measure(*asked)
        finally:
            with suppress(OSError):
                cluster.down(request.name, request.folder)
    print("\n".join(wrong) or "all bounds were held")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
