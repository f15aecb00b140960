"""One measurement of a script on one node: start its ranks, watch them, and say how each ended.

    run = NodeRun(measurement, job, paths, place)
    end = run.watch()                   # NodeEnd: by rank its end and its steps
    run.close()                         # nothing of the script is left

What is left of the process tree when the agent exits is ended by the node's launcher (`slurm.launcher.ranks`).
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.files.reading import read_json_object
from configs.common.system.proc import end_with_parent
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.records.record import Status
from configs.workloads.placeholders import filled_text
from configs.workloads.script import ScriptWorkload
from engine.planner.accelerators import DEVICE_ORDER
from engine.planner.choice.script_files import planned_contents
from engine.scripts import event_files, extension_locks, json_output, probe_samples
from engine.scripts.commands import (
    NodePlace,
    cell_values,
    node_command,
    program_line,
    rank_variables,
    started_from_first_node,
    started_ranks,
)
from engine.scripts.line_figures import LineReader
from engine.scripts.outputs import Outputs
from engine.scripts.rank_start import START_FILE
from engine.scripts.series import NoFiguresError, StepSeries
from engine.scripts.signs import RankEnd, rank_end, recorded_line
from engine.scripts.stacks import STACKS_SIGNAL, stacks_of
from engine.scripts.usage import own_seconds, usage
from engine.scripts.workdir import fill_workdir

PROBE = Path(__file__).parents[1] / "probe"
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.2  # between looks at reports, samples and memory, which cost processor time
_START_SECONDS = 180.0  # libraries are imported and models loaded without a word
_LINGER_SECONDS = 5.0  # after a rank failed; torchrun would wait 30 s for ranks that ignore SIGTERM
_TERM_SECONDS = 1.0
_SETTLE_SECONDS = 3.0  # for the other ranks' reports after the launcher has exited
_LAST_STEPS = 2  # further steps that are waited for, so that no rank lacks one that its peers have ended
_BY_HOOKS = ("probe", "hf_trainer", "lightning")
_OF_A_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
"""Set for each rank. Those that Rankwise was started with, in a pod of Kubernetes for one, are of another rank."""
_NOT_THE_SCRIPTS = ("PYTHONSAFEPATH", "RANKWISE_LAUNCHER_PID", "OMPI_MCA_", "PMI_", "PMIX_")


@dataclass
class NodeEnd:
    """How the ranks of this node ended: those that failed, and who failed first."""

    failures: dict[int, RankEnd] = field(default_factory=dict)
    first: int | None = None
    stopped: bool = False
    wall_seconds: float = 0.0


class NodeRun:
    """The ranks of one node. `folder` is where pipes, samples and the script's own files lie."""

    def __init__(self, measurement: Measurement, job: Job, paths: JobPaths, place: NodePlace) -> None:
        work = measurement.cell.workload
        assert isinstance(work, ScriptWorkload)
        self.work, self.cell, self.place, self.paths = work, measurement.cell, place, paths
        self.folder = paths.script(measurement.name, place.node_rank)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.workdir = self.folder / "work"
        self.samples = self.folder / "samples"
        self.samples.mkdir()
        self.values = cell_values(measurement, place.ranks_per_node) | {"workdir": str(self.workdir)}
        self.ranks = started_ranks(work, place)
        self.lines = LineReader(work.pattern, place.nodes * place.ranks_per_node) if work.pattern else None
        self.outputs = Outputs(self.folder, self.ranks, paths.rank_log, by_line=self.lines is not None)
        self.process: subprocess.Popen[bytes] | None = None
        self._events: event_files.LastStep | None = None
        self.peaks: dict[int, int] = {}
        self.processor: dict[int, float] = {}
        self.launcher_seconds: float | None = None
        self.aborted: set[int] = set()
        self._stepped_at = time.monotonic()
        self._steps = 0
        self._first_step_at: float | None = None
        self._enough_at: float | None = None
        self._failed_at: float | None = None
        self.began = time.monotonic()
        try:
            self._start(measurement, job)
        except BaseException:
            self.close()
            raise

    def _start(self, measurement: Measurement, job: Job) -> None:
        work, cell = self.work, measurement.cell
        planned = planned_contents(work, cell.layout, cell.dtype, cell.nodes, on_cpu=not self.place.gpus)
        fill_workdir(work, Path(job.inputs), self.workdir, self.values, planned)
        # Files of figures that are there before the script are of another run of it.
        self._earlier_json = json_output.state_of_file(work.json_figures, self.workdir)
        if work.measure == "tensorboard":
            self._events = event_files.LastStep(self.workdir / work.tensorboard.folder, work.tensorboard.tag)
        agent, environment = os.getpid(), self.environment(measurement)
        words = work.argv(self.values)
        command = node_command(work, words, self.place, self.folder)
        if started_from_first_node(work):
            own = {"command": program_line(work, words), "environment": environment, "folder": str(self.workdir)}
            write_atomically(self.folder / START_FILE, json.dumps(own), mode=0o600)
        if command is None:
            return
        extension_locks.remove_locks(extension_locks.abandoned(environment))
        log = os.open(self.folder / "launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self.process = subprocess.Popen(
                command,
                cwd=self.workdir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(signal.SIGKILL, agent),
            )
        except OSError as error:
            raise ValueError(f"workload.command: {command[0]}: {error.strerror or error}") from error
        finally:
            os.close(log)

    def environment(self, measurement: Measurement) -> dict[str, str]:
        """Variables of the launcher and the ranks."""
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
        found = {name: value for name, value in inherited.items() if not name.startswith(_NOT_THE_SCRIPTS)}
        found |= {"PYTHONUNBUFFERED": "1", "RANKWISE_SCRIPT": str(self.folder), **rank_variables(self.work, self.place)}
        found |= {"RANKWISE_STACKS": str(self.folder), "RANKWISE_STACKS_SIGNAL": str(int(STACKS_SIGNAL))}
        if self.place.gpus:  # counted as the record names and samples them: CUDA's own order begins with the fastest
            found = DEVICE_ORDER | found
        if self.work.measure in _BY_HOOKS:
            found["RANKWISE_PROBE"] = str(self.samples)
        if self.work.measure in ("hf_trainer", "lightning"):
            found["RANKWISE_INSTRUMENT"] = self.work.measure
        found |= {name: filled_text(value, self.values) for name, value in self.work.environment.items()}
        # Ahead of those that the study names: without the probe nothing would be measured.
        paths = [str(PROBE / "injected"), str(PROBE), found.get("PYTHONPATH", "")]
        return found | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def watch(self) -> NodeEnd:
        """Wait until the ranks have ended, hang, or have made the steps that were asked for."""
        looked_at = 0.0
        while True:
            self._read(self.outputs.read(_POLL_SECONDS))
            if self.process is not None and self.process.poll() is not None:
                return self._ended()
            if time.monotonic() - looked_at < _LOOK_SECONDS:
                continue
            looked_at = time.monotonic()
            exits = self._exits()
            self._count()
            self._sample_memory()
            if self._enough():
                return self._stop()
            if len(exits) == len(self.ranks):
                if self.process is None:
                    return self._ended()
            elif self._lingers(exits):
                self.end_ranks()
                return self._ended()
            elif self._hangs():
                return self._hung()

    def _read(self, lines: object) -> None:
        for line in lines:  # type: ignore[attr-defined]
            if self.lines is not None:
                self.lines.see(line)

    def steps(self) -> int:
        """Steps that every started rank of this node has ended, as far as the source says while the script runs."""
        if self.work.measure in _BY_HOOKS:
            return min(probe_samples.steps_so_far(self.samples, rank) for rank in self.ranks)
        if self.lines is not None:
            return self.lines.steps
        if self._events is not None:
            return self._events.look()
        return 0

    def _count(self) -> None:
        now = time.monotonic()
        steps = self.steps()
        if steps > self._steps:
            self._steps, self._stepped_at = steps, now
            self._first_step_at = self._first_step_at or now

    def _enough(self) -> bool:
        """Whether the script has made what was asked for, and its peers have had time to end the same step."""
        asked, now = self.work.stop_after, time.monotonic()
        if asked is None:
            return False
        began = self._first_step_at
        if began is None and self.work.measure in ("wall", "json"):
            began = self.began
        if asked.minutes is not None:
            return began is not None and now - began >= 60 * asked.minutes
        assert asked.steps is not None
        if self._steps < asked.steps:
            return False
        self._enough_at = self._enough_at or now
        a_step = (now - (began or now)) / max(1, self._steps)
        return self._steps >= asked.steps + _LAST_STEPS or now - self._enough_at > min(10.0, 1.0 + 3 * a_step)

    def _lingers(self, exits: dict[int, dict[str, float]]) -> bool:
        """Whether a rank failed some time ago and others are still there, which their launcher waits for."""
        failed = any(int(report.get("exit_code", 0)) for report in exits.values())
        if not failed:
            return False
        self._failed_at = self._failed_at or time.monotonic()
        return time.monotonic() - self._failed_at > _LINGER_SECONDS

    @property
    def reader(self) -> int | None:
        """The rank whose node reads the steps of the job; None where each rank has steps of its own."""
        if self.work.measure in _BY_HOOKS:
            return None
        if self.place.nodes == 1 or self.work.pattern is None or self.work.pattern.rank != "last":
            return 0
        return (self.place.nodes - 1) * self.place.ranks_per_node + len(self.ranks) - 1

    @property
    def is_mute(self) -> bool:
        """Whether this node's ranks need not print or write anything, as another node reads the steps."""
        return self.reader is not None and self.reader not in self.ranks

    def _hangs(self) -> bool:
        limit = self.work.hang_seconds
        if limit is None or self._failed_at is not None or self.is_mute or self.work.measure in ("wall", "json"):
            return False
        if self._steps:
            return time.monotonic() - self._stepped_at > limit
        return time.monotonic() - max(self.began, self.outputs.last_at) > max(limit, _START_SECONDS)

    def _hung(self) -> NodeEnd:
        """Keep the stacks of every rank, then end it."""
        last = self._steps if self.lines is None else self.lines.last_step
        after = f"after step {last}" if self._steps else "and no output"
        limit = self.work.hang_seconds or 0.0
        message = f"no step for {limit if self._steps else max(limit, _START_SECONDS):g} s {after}"
        end = NodeEnd(wall_seconds=time.monotonic() - self.began)
        for rank, pid in self._pids().items():
            text = stacks_of(pid, rank, self.folder)
            if text:
                self.outputs.logs[rank].add(f"\nstacks of rank {rank}:\n{text}\n".encode())
            where = "; stacks are in the rank's log" if text else ""
            if "file_baton.py" in text:
                where += ". It waits for another process to compile an operator of torch, or for the lock that one left"
            end.failures[rank] = RankEnd(Status.TIMEOUT, "Hang", message + where)
        for rank in self.ranks:
            end.failures.setdefault(rank, RankEnd(Status.TIMEOUT, "Hang", message))
        end.first = self.ranks[0]
        self.end_ranks()
        return end

    def _stop(self) -> NodeEnd:
        end = NodeEnd(stopped=True, wall_seconds=time.monotonic() - self.began)
        self._sample_memory(with_children=True)
        self.end_ranks()
        self._read(self.outputs.rest())
        return end

    def _ended(self) -> NodeEnd:
        """The launcher has exited: what each rank came to."""
        end = NodeEnd(wall_seconds=time.monotonic() - self.began)
        until = time.monotonic() + _SETTLE_SECONDS
        code = self.process.returncode if self.process is not None else 0
        while len(exits := self._exits()) < len(self.ranks) and time.monotonic() < until and self._pids():
            self._read(self.outputs.read(_POLL_SECONDS))
        self._read(self.outputs.rest())
        for rank in self.ranks:
            report = exits.get(rank)
            if report is None:
                end.failures[rank] = self._unreported(rank, code)
                continue
            self.peaks[rank] = max(self.peaks.get(rank, 0), int(report.get("peak_memory_bytes") or 0))
            found = rank_end(int(report["exit_code"]), bytes(self.outputs.tails[rank]))
            if found is not None and not self._only_teardown(rank, int(report["exit_code"])):
                end.failures[rank] = found
        for rank in [rank for rank in end.failures if rank in exits and self._ended_for_teardown(rank, exits[rank])]:
            del end.failures[rank]
        times = {rank: float(exits[rank].get("ended_at", 0.0)) for rank in end.failures if rank in exits}
        end.first = min(times, key=lambda rank: times[rank], default=next(iter(end.failures), None))
        if not end.failures and code != 0 and not self.aborted:
            end.failures[self.ranks[0]] = RankEnd(Status.FAILED, "LauncherFailed", self._launcher_said(code))
            end.first = self.ranks[0]
        return end

    def _only_teardown(self, rank: int, code: int) -> bool:
        """Whether a rank's work was done when a library aborted in its teardown, as gloo's threads may at exit."""
        if -code not in (signal.SIGABRT, signal.SIGSEGV) or b"Traceback (most" in self.outputs.tails[rank]:
            return False
        done = self._came_to_its_end(rank)
        self.aborted |= {rank} if done else set()
        return done

    def _came_to_its_end(self, rank: int) -> bool:
        """Whether the rank's Python ended in order, so that only the teardown of libraries was left."""
        if self.work.measure in _BY_HOOKS:
            return probe_samples.ended_in_order(self.samples, rank)
        pid = self._reports("rank").get(rank, {}).get("pid")
        return (self.folder / f"end_{rank}.{pid}").exists()

    def _ended_for_teardown(self, rank: int, report: Mapping[str, float]) -> bool:
        """Whether a launcher ended a rank that had made all its steps, because another one aborted in its teardown."""
        if not self.aborted or -int(report["exit_code"]) != signal.SIGTERM:
            return False
        if b"Traceback (most" in self.outputs.tails[rank]:
            return False
        if self.work.measure not in _BY_HOOKS:
            return self._came_to_its_end(rank)
        made = max(probe_samples.steps_called(self.samples, other) for other in self.aborted)
        return probe_samples.steps_called(self.samples, rank) >= made > 0

    def _unreported(self, rank: int, code: int) -> RankEnd:
        if (self.folder / f"rank_{rank}.json").exists():
            return RankEnd(Status.FAILED, "SIGKILL", "the rank and its parent were killed")
        return RankEnd(Status.FAILED, "LauncherFailed", self._launcher_said(code))

    def _launcher_said(self, code: int) -> str:
        from configs.common.files.reading import read_tail

        said = ""
        with suppress(OSError, ValueError):
            tail = read_tail(self.folder / "launcher.log", 64 << 10)
            self.outputs.logs[self.ranks[0]].add(b"\nlauncher's output:\n" + tail.encode())
            words = [line.strip() for line in tail.splitlines() if any(map(str.isalnum, line))]
            told = [line for line in words if "rror" in line][-1:] or words[:1]
            said = f": {recorded_line(told[0])}" if told else ""
        return f"{self.work.launcher} exited with code {code} before the rank had begun{said}"

    def process_seconds(self, wall_seconds: float) -> float:
        """Seconds from the start of the first rank's process to the end of the last one's, or until they were stopped.

        Without what comes before and after in wall_seconds: inputs are unpacked, and the launcher starts and ends.
        """
        began = [found["began"] for found in self._reports("rank").values()]
        ended = [found["ended"] for found in self._exits().values()]
        if not began:
            return wall_seconds
        end = self.began + wall_seconds
        return (min(end, max(ended)) if len(ended) == len(self.ranks) else end) - min(began)

    def series(self, rank: int, wall_seconds: float) -> StepSeries:
        """Steps of a rank. Raises NoFiguresError, OSError and ValueError."""
        work, wall_seconds = self.work, self.process_seconds(wall_seconds)
        if work.measure in _BY_HOOKS:
            is_alone = work.launcher == "none" and work.combined == "sum"
            return (probe_samples.series_of_all if is_alone else probe_samples.series_of_probe)(self.samples, rank)
        if self.lines is not None:
            self.lines.fill_single(wall_seconds)
            self.lines.series.figures |= {"broken_lines": self.lines.broken, "lines": self.lines.seen}
            return self.lines.series
        if self._events is not None:
            folder, asked = self.workdir / work.tensorboard.folder, work.tensorboard
            return event_files.series_of_events(folder, asked.tag, asked.loss_tag, self._events.earlier)
        if work.measure == "json":
            if work.json_figures is None:
                raise NoFiguresError("workload.json_figures: missing")
            printed = bytes(self.outputs.standard[rank])
            ranks = self.place.nodes * self.place.ranks_per_node
            return json_output.series_of_json(
                work.json_figures, self.workdir, printed, wall_seconds, self._earlier_json, ranks
            )
        series = StepSeries()
        series.add(wall_seconds)
        return series

    def _exits(self) -> dict[int, dict[str, float]]:
        return self._reports("exit")

    def _pids(self) -> dict[int, int]:
        """Processes of ranks that have begun and not ended."""
        ended = self._exits()
        return {rank: int(found["pid"]) for rank, found in self._reports("rank").items() if rank not in ended}

    def _reports(self, kind: str) -> dict[int, dict[str, float]]:
        found = {}
        for rank in self.ranks:
            with suppress(OSError, ValueError, KeyError):
                found[rank] = read_json_object(self.folder / f"{kind}_{rank}.json")
        return found

    def cpu_seconds(self, rank: int) -> float | None:
        """Processor time of a rank; of one that was stopped, as last seen."""
        # What the kernel reports of a rank that was stopped lacks the children that it did not wait for.
        told = (self._exits().get(rank, {}).get("cpu_seconds"), self.processor.get(rank))
        return max((seconds for seconds in told if seconds is not None), default=None)

    def _sample_memory(self, with_children: bool = False) -> None:
        if self.process is not None:
            # torchrun's import of torch alone would pass for another program that keeps the machine busy.
            self.launcher_seconds = own_seconds(self.process.pid) or self.launcher_seconds
        for rank, pid in self._pids().items():
            seconds, peak = usage(pid, with_children)
            if seconds is not None:
                self.processor[rank] = max(seconds, self.processor.get(rank, 0.0))
            if peak is not None:
                self.peaks[rank] = max(peak, self.peaks.get(rank, 0))

    def end_ranks(self) -> None:
        """SIGTERM to the ranks, then SIGKILL; what they forked is left to the node's launcher."""
        locks = extension_locks.held_by(self._pids().values())
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.terminate()
        self._signal_ranks(signal.SIGTERM)
        until = time.monotonic() + _TERM_SECONDS
        while self._pids() and time.monotonic() < until:
            self._read(self.outputs.read(_POLL_SECONDS))
        self._signal_ranks(signal.SIGKILL)
        extension_locks.remove_locks(locks)

    def _signal_ranks(self, number: signal.Signals) -> None:
        for pid in self._pids().values():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def close(self) -> None:
        """Remove the folder: pipes, samples and the script's own files. Logs are in the job folder."""
        self.outputs.__exit__(None, None, None)
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # other nodes' folders are in it
            self.folder.parent.rmdir()
