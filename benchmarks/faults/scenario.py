"""A small study on a lab in which one cell is the victim of a fault: started, watched, judged.

scene = Scene(lab, folder, fault)
scene.start(); job = scene.victim(); ...; scene.finish(); row = judge(scene)
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.resume import processes_of
from configs.plans.job import Job, Progress, Submission
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import Plan
from configs.records.record import Record, Status
from slurm.lab import members
from slurm.lab.plan import LabPlan
from tasks.campaign.ledger import planned_repeats, read_ledger

VICTIM = "victim"
_STUDY = "faults"
_MEASUREMENT_LIMIT_SECONDS = 240.0
_RUN_LIMIT_SECONDS = 400.0
_EMPTY_LIMIT_SECONDS = 30.0
_ORPHAN_SECONDS = 5.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Fault:
    """What is done to a study, and what must come of it.

    inject: called while the victim, on two nodes, is in its measurement; returns when the fault is over. expected: how
    the victim's attempts end, in order. word: the scheduler's own of the first attempt, where it must say one.
    """

    name: str
    done: str
    inject: "Callable[[Scenario], None]"
    expected: tuple[Status, ...]
    word: str | None = None
    victim: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)
    """Shell scripts that the study finds on its PATH before Slurm's programs of these names; REAL is the program."""
    said: str = ""
    """What the study must print."""
    shared_by: tuple[str, ...] = ()
    """Labels of other cells that end as the victim does."""


@dataclass(frozen=True)
class Row:
    """What came of one fault. `wrong` is empty where all is as it must be."""

    fault: Fault
    attempts: tuple[Record, ...]
    others: int
    others_completed: int
    seconds: float
    queue_empty_seconds: float | None
    wrong: tuple[str, ...]


class Scenario:
    """One run of the study on the lab, as `rankwise run` in a process of its own."""

    def __init__(self, lab: LabPlan, folder: Path, fault: Fault) -> None:
        self.lab = lab
        self.fault = fault
        self.folder = folder
        self.run = RunPaths(folder / "runs" / _STUDY)
        self.flow: subprocess.Popen[bytes] | None = None
        self.began = time.monotonic()
        self.queue_empty_seconds: float | None = None
        folder.mkdir(parents=True)
        (folder / "study.yaml").write_text(study_of(fault))
        for name, script in fault.programs.items():
            program = folder / "programs" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(script.replace("REAL", str(shutil.which(name))).replace("HERE", str(program.parent)))
            program.chmod(0o755)

    def start(self) -> None:
        """Begin the study, or go on with it."""
        command = [str(Path(sys.executable).with_name("rankwise")), "run", str(self.folder / "study.yaml")]
        with (self.folder / "out.log").open("a") as log:
            self.flow = subprocess.Popen(
                [*command, "--runs", str(self.folder / "runs")],
                env=self.environment() | {"PATH": f"{self.folder / 'programs'}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def environment(self) -> dict[str, str]:
        """With the lab's cluster instead of any other."""
        return os.environ | {"SLURM_CONF": str(self.lab.slurm_conf)}

    def slurm(self, *command: str) -> str:
        """What a command of Slurm says. Raises RuntimeError with its words where it fails."""
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def await_true(self, condition: Callable[[], bool], what: str, limit_seconds: float) -> None:
        """Return when the condition holds. Raises RuntimeError where it does not in time."""
        deadline = time.monotonic() + limit_seconds
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {limit_seconds:g} s in vain for {what}")
            time.sleep(_LOOK_SECONDS)

    def victims(self) -> list[JobPaths]:
        """The jobs that were made for the victim, in their order."""
        found = []
        for folder in sorted(self.run.jobs.glob("[0-9]*-*")):
            paths = self.run.job(folder.name)
            if paths.job.exists() and f'"label":"{VICTIM}"' in paths.job.read_text():
                found.append(paths)
        return found

    def victim(self) -> JobPaths:
        """The victim's first job, when all its ranks are in the measurement."""
        self.await_true(
            lambda: bool(self.victims()) and self._under_measurement(self.victims()[0]),
            "the victim",
            _MEASUREMENT_LIMIT_SECONDS,
        )
        return self.victims()[0]

    def _under_measurement(self, paths: JobPaths) -> bool:
        return all(progress is not None and progress.phase == "measurement" for progress in self.progress(paths))

    def progress(self, paths: JobPaths) -> list[Progress | None]:
        """What each rank of a job said last."""
        job = Job.model_validate_json(paths.job.read_bytes())
        found: list[Progress | None] = []
        for rank in range(job.cell.layout.ranks):
            try:
                found.append(Progress.model_validate_json(paths.progress(rank).read_bytes()))
            except (FileNotFoundError, ValueError):
                found.append(None)
        return found

    def submitted_victim(self) -> JobPaths:
        """The victim's first job, when the scheduler has it."""
        self.await_true(
            lambda: bool(self.victims()) and self.victims()[0].submission.exists(),
            "the victim's submission",
            _MEASUREMENT_LIMIT_SECONDS,
        )
        return self.victims()[0]

    def printed(self) -> str:
        """What the study has printed so far."""
        return (self.folder / "out.log").read_text()

    def job_id(self, paths: JobPaths) -> str:
        """As Slurm calls it."""
        return Submission.model_validate_json(paths.submission.read_bytes()).job_id

    def ended(self, paths: JobPaths) -> bool:
        """Whether the flow knows that the job has ended."""
        return paths.end.exists()

    def await_end_of(self, paths: JobPaths, limit_seconds: float = 90.0) -> None:
        """Return when the flow knows that the job has ended."""
        self.await_true(lambda: self.ended(paths), f"the end of {paths.folder.name}", limit_seconds)

    def kill_flow(self) -> None:
        """As a crash of the submitting machine would."""
        assert self.flow is not None
        self.flow.kill()
        self.flow.wait()

    def await_flow(self) -> int:
        """Wait for the flow's end; its exit code."""
        assert self.flow is not None
        return self.flow.wait(timeout=_RUN_LIMIT_SECONDS)

    def finish(self) -> None:
        """Wait for the flow's end, and then for an empty queue."""
        self.await_flow()
        ended = time.monotonic()
        while time.monotonic() - ended < _EMPTY_LIMIT_SECONDS:
            if not self.slurm("squeue", "--noheader").strip():
                self.queue_empty_seconds = time.monotonic() - ended
                return
            time.sleep(_LOOK_SECONDS)

    def give_up(self) -> None:
        """End what is left of the study, so that the next fault finds an empty lab."""
        if self.flow is not None and self.flow.poll() is None:
            self.kill_flow()
        subprocess.run(["scancel", "--full", "--user", "root"], env=self.environment(), capture_output=True, timeout=60)
        self.await_true(lambda: not self.slurm("squeue", "--noheader").strip(), "an empty queue", 60.0)


def study_of(fault: Fault) -> str:
    """Five cells, a launch each: the victim and another on two nodes, three on one. As JSON, which is YAML too."""
    small = {name: {"label": name, "dp": 1, "items": 1} for name in ("small", "little", "tiny")}
    return json.dumps(
        {
            "study": _STUDY,
            "workload": {"kind": "noop", "seconds": 1.0},
            "targets": [
                {
                    "kind": "slurm",
                    "name": "lab",
                    "partition": "lab",
                    "nodes": 2,
                    "poll_seconds": 1.0,
                    "preflight": False,
                    **fault.target,
                }
            ],
            "experiments": {
                "cells": {
                    "kind": "optimization",
                    "baseline": {"label": "large", "dp": 2, "items": 2},
                    "variants": {VICTIM: {"label": VICTIM, "seconds": 12.0, **fault.victim}, **small},
                }
            },
            "pack": False,
            "measuring": {"repeats": 1, "memory": False, "cell_timeout_seconds": 200.0},
        }
    )


def judge(scene: Scenario) -> Row:
    """Hold what the run folder, the queue and the processes say against what must be."""
    fault = scene.fault
    plan = Plan.model_validate_json(scene.run.plan.read_bytes())
    ledger = read_ledger(scene.run)
    attempts: tuple[Record, ...] = ()
    others: list[Status | None] = []
    shared: list[str] = []
    for place in planned_repeats(plan):
        entries = sorted(ledger.entries.get(place, []), key=lambda entry: entry.attempt)
        label, decisive = getattr(plan.cells[place[0]].workload, "label", ""), ledger.decisive(place)
        if label == VICTIM:
            attempts = tuple(entry.record for entry in entries)
        elif label not in fault.shared_by:
            others.append(decisive.status if decisive else None)
        elif decisive is None or decisive.status is not fault.expected[-1]:
            shared.append(f"{label} is {decisive.status if decisive else 'lost'}, not {fault.expected[-1]}")
    found = tuple(record.status for record in attempts)
    wrong = [*ledger.set_aside, *shared]
    if fault.said not in scene.printed():
        wrong.append(f"the study did not print {fault.said}")
    if found != fault.expected:
        wrong.append(f"the victim's attempts ended {' '.join(found) or 'never'}, not {' '.join(fault.expected)}")
    word = attempts[0].accounting.state if attempts and attempts[0].accounting else None
    if fault.word is not None and word != fault.word:
        wrong.append(f"the scheduler's word is {word}, not {fault.word}")
    if len(scene.victims()) != len(fault.expected):
        wrong.append(f"{len(scene.victims())} jobs were made for the victim")
    wrong += [f"another cell is {status or 'lost'}" for status in others if status is not Status.COMPLETED]
    if scene.queue_empty_seconds is None:
        wrong.append(f"still in the queue: {scene.slurm('squeue', '--noheader').strip()}")
    wrong += [f"left: {command[:100]}" for command in orphans(scene)]
    completed = sum(status is Status.COMPLETED for status in others)
    seconds = time.monotonic() - scene.began
    return Row(fault, attempts, len(others), completed, seconds, scene.queue_empty_seconds, tuple(wrong))


def orphans(scene: Scenario) -> list[str]:
    """Command lines of what is left of the study: on the nodes all but slurmd, here what names the run folder."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while True:
        pids = {process.pid for process in processes_of(scene.run)} | set(members.inhabitants(scene.lab.name))
        lines = []
        for pid in pids:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.name() != "slurmd" and process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(" ".join(process.cmdline()) or process.name())
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(_LOOK_SECONDS)
