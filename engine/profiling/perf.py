"""One measurement of the perf pass: Linux's `perf` counts and samples this rank during one pass.

    outcome = perf_measurement(measurement, context, workload)

`perf stat` and `perf record` attach to the running rank (-p) and are enabled only in the region marked by the workload,
exactly, through their control pipe, perf-stat(1) `--control`. Loading, warm-up and Python's start are therefore
excluded. Their output is beside the rank's part: `perf_rank_<r>.data`, which `perf report -i` opens, and
`perf_rank_<r>.txt` with the counters and the hottest functions. Unavailable events (hardware counters in most virtual
machines) are None, and the text lists them.
"""

import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from configs.common.files.reading import read_text
from configs.plans.job import Measurement
from configs.records.record import Figure
from engine.context import Context, RankResult, WorkloadFunction
from engine.profiling.region import run_recorded
from engine.prompts.decoded import synchroniser

SAMPLES_HZ = 999
_EVENTS = {
    "task-clock": "perf_task_clock_seconds",
    "context-switches": "perf_context_switches",
    "cpu-migrations": "perf_cpu_migrations",
    "page-faults": "perf_page_faults",
    "cycles": "perf_cycles",
    "instructions": "perf_instructions",
    "cache-references": "perf_cache_references",
    "cache-misses": "perf_cache_misses",
}
_ANSWER_SECONDS = 30.0
_REPORT_SECONDS = 60.0
_HOTTEST = 25
_MILLISECOND = 1e-3
_PLAIN = {"LC_ALL": "C"}
"""perf writes numbers as the user's locale does, which may have a decimal comma."""
_EVENT = re.compile(r"(?:[\w-]+/)?([\w-]+)")
"""`cycles`, `cycles:u`, and `cpu_atom/cycles/` of one kind of cores among two."""
_BUILD = re.compile(r"-[0-9a-f]{32}\.so$")
"""Suffix of a library's name added by `engine.kernels.build`."""


def perf_measurement(measurement: Measurement, context: Context, workload: WorkloadFunction) -> RankResult:
    """Run the workload under perf in its marked region. Figures are perf's and the workload's.

    Raises NotImplementedError if perf may not observe a process here, or if no region is marked.
    """
    recorder = _Recorder(measurement, context)
    outcome = run_recorded(measurement, context, workload, recorder.record)
    return RankResult(outcome.figures | recorder.figures)


class _Recorder:
    """Runs `perf stat` and `perf record` over one region of a measurement."""

    def __init__(self, measurement: Measurement, context: Context) -> None:
        self.figures: dict[str, Figure] = {}
        self._measurement = measurement
        self._context = context

    @contextmanager
    def record(self) -> Iterator[None]:
        """Count and sample the block."""
        context, synchronise = self._context, synchroniser(self._context.device)
        data = context.paths.perf_data(self._measurement.name, context.rank)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            counted = Path(folder) / "stat.csv"
            count = ["stat", "-x", ";", "-e", ",".join(_EVENTS), "-o", str(counted)]
            sample = ["record", "-F", str(SAMPLES_HZ), "-g", "-o", str(data)]
            programs = [stack.enter_context(_Perf(arguments)) for arguments in (count, sample)]
            synchronise()
            context.barrier()
            for program in programs:
                program.say("enable")
            began = time.perf_counter()
            yield
            synchronise()
            seconds = time.perf_counter() - began
            for program in programs:
                program.say("disable")
            for program in programs:
                program.end()
            counters = read_counters(read_text(counted))
        hottest = hottest_functions(data)
        samples = sum(each.samples for each in hottest)
        self.figures = {"perf_wall_seconds": seconds, **counters, "perf_samples": samples}
        if hottest:
            self.figures["perf_hottest"] = f"{hottest[0].name} ({hottest[0].library})"[:200]
            self.figures["perf_hottest_share"] = hottest[0].samples / samples
        text = perf_text(self._measurement, context, self.figures, hottest)
        context.paths.perf_text(self._measurement.name, context.rank).write_text(text)


class _Perf:
    """One perf process attached to this one, events disabled until enabled; ended on exit."""

    def __init__(self, arguments: list[str]) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        control = ["-p", str(os.getpid()), "-D", "-1", "--control", f"fd:{orders},{answers}"]
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self._process = subprocess.Popen(
            ["perf", arguments[0], *control, *arguments[1:]],
            pass_fds=(orders, answers),
            env=os.environ | _PLAIN,
            stdin=subprocess.DEVNULL,
            stdout=self._messages,
            stderr=self._messages,
        )
        os.close(orders)
        os.close(answers)

    def __enter__(self) -> "_Perf":
        self.say("disable")  # no effect; the reply shows that perf has attached
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._orders)
        os.close(self._answers)
        self._messages.close()

    def say(self, order: str) -> None:
        """Send a command and wait for its acknowledgement."""
        with suppress(BrokenPipeError):
            os.write(self._orders, f"{order}\n".encode())
        ready, _, _ = select.select([self._answers], [], [], _ANSWER_SECONDS)
        if not ready or not os.read(self._answers, 64):
            raise NotImplementedError(f"measuring.profiler: perf cannot record a rank here: {self._said()}")

    def end(self) -> None:
        """End perf and let it write its data."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_ANSWER_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"perf did not end within {_ANSWER_SECONDS:g} s") from error

    def _said(self) -> str:
        self._messages.seek(0)
        lines = [line.strip() for line in self._messages.read().decode(errors="replace").splitlines()]
        said = " ".join(line for line in lines if line)
        return said[:300] or f"it did not answer within {_ANSWER_SECONDS:g} s"


def read_counters(csv: str) -> dict[str, Figure]:
    """Parse `perf stat -x ;`: value;unit;event;... a line (perf-stat(1), CSV FORMAT). Not counted: None.

    On a processor with two kinds of cores each kind has a line, which are added.
    """
    figures: dict[str, Figure] = dict.fromkeys(_EVENTS.values())
    for line in csv.splitlines():
        fields = line.split(";")
        event = _EVENT.match(fields[2]) if len(fields) > 2 else None
        name = _EVENTS.get(event[1]) if event else None
        if name is None:
            continue
        with suppress(ValueError):  # "<not supported>", "<not counted>"
            value = float(fields[0]) * _MILLISECOND if fields[1] == "msec" else int(float(fields[0]))
            before = figures[name]
            figures[name] = value + before if isinstance(before, int | float) else value
    return figures


class Function(NamedTuple):
    """A function and its number of samples."""

    samples: int
    library: str
    name: str


def hottest_functions(data: Path) -> list[Function]:
    """Return every function sampled in a `perf.data`, the hottest first; empty without samples."""
    command = ["perf", "report", "--stdio", "-q", "--no-children", "-g", "none", "-F", "overhead,sample,dso,symbol"]
    try:
        done = subprocess.run(
            [*command, "-t", ";", "-i", str(data)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # a symbol may be any bytes
            timeout=_REPORT_SECONDS,
            # Otherwise symbols of system libraries would be requested over the network.
            env=os.environ | _PLAIN | {"DEBUGINFOD_URLS": ""},
        )
    except subprocess.TimeoutExpired:
        return []
    return read_functions(done.stdout)


def read_functions(report: str) -> list[Function]:
    """Parse lines `overhead;samples;library;[.] function`. A native kernel is named as its source, without the hash."""
    found = []
    for line in report.splitlines():
        fields = [field.strip() for field in line.split(";", 3)]
        if len(fields) == 4 and fields[1].isdigit():
            symbol = fields[3].removeprefix("[.] ").removeprefix("[k] ")
            found.append(Function(int(fields[1]), _BUILD.sub("", fields[2]), symbol))
    return sorted(found, key=lambda each: -each.samples)


def perf_text(measurement: Measurement, context: Context, figures: dict[str, Figure], hottest: list[Function]) -> str:
    """Format counters under perf's names, then the hottest functions."""
    seconds = figures["perf_wall_seconds"]
    lines = [
        f"{measurement.cell.label}, rank {context.rank} of {context.world_size}: one pass after warm-up, "
        f"{seconds:.4f} s",
        "",
    ]
    for event, name in _EVENTS.items():
        value = figures[name]
        if value is not None:
            lines.append(f"{value:>20,.4f} s  {event}" if isinstance(value, float) else f"{value:>20,}    {event}")
    missing = [event for event, name in _EVENTS.items() if figures[name] is None]
    if missing:
        lines.append(f"not given by this kernel or machine: {', '.join(missing)}")
    samples = sum(each.samples for each in hottest)
    lines += ["", f"hottest functions, of {samples} samples at {SAMPLES_HZ} a second of CPU time"]
    lines += [f"{each.samples / samples:>8.1%}  {each.library}  {each.name}" for each in hottest[:_HOTTEST]]
    return "\n".join(lines) + "\n"
