"""Surroundings of a check: its device, its time, its clock and its sizes.

    bench.device, bench.rehearsal, bench.folder
    timed = bench.clock.seconds(step, calls=16)          # samples of seconds a call
    bench.figure("share", timed, of=bytes / bandwidth, bar=0.65)

A GPU is timed by CUDA events around a number of calls, read after one synchronisation; a CPU by perf_counter. Every
sample is long enough for the clock, and a figure is the median of its samples with a 95 % interval.
"""

import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.reporting.results import Figure, Sense
from engine.prompts.decoded import synchroniser
from reports.numbers.statistics import median_interval

_LEAST_SAMPLE_SECONDS = 2e-3
_MOST_CALLS = 4096
_TOLD_CHARACTERS = 400
_DRIVER = Path("/sys/module/nvidia/version")
_NO_ERROR = "no error"


@dataclass(frozen=True)
class Timed:
    """Seconds of one call, sample by sample."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.samples)


class Clock:
    """Times calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.synchronise = synchroniser(device)

    def once(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, the device waited for before and after."""
        self.synchronise()
        began = time.perf_counter()
        call()
        self.synchronise()
        return time.perf_counter() - began

    def seconds(
        self,
        call: Callable[[], object],
        samples: int = 20,
        warm_up: int = 3,
        limit_seconds: float = 5.0,
        calls: int | None = None,
    ) -> Timed:
        """Return samples of the seconds of a call, after warm-up calls; fewer, but at least 3, if the limit ends first.

        calls: in a row, in one sample; None for so many as take 2 ms, so that the cost of an event does not count.
        """
        for _ in range(warm_up):
            call()
        if calls is None:
            each = self.once(call)
            calls = max(1, min(_MOST_CALLS, round(_LEAST_SAMPLE_SECONDS / max(each, 1e-9))))
        deadline = time.perf_counter() + limit_seconds
        found: list[float] = []
        while len(found) < samples and (len(found) < 3 or time.perf_counter() < deadline):
            found.append(self._sample(call, calls) / calls)
        return Timed(tuple(found))

    def _sample(self, call: Callable[[], object], calls: int) -> float:
        if not self._cuda:
            began = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - began
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000  # milliseconds


@dataclass
class Bench:
    """What a check gets. deadline: of time.monotonic; folder: its own, removed afterwards; out: of all results."""

    report: Callable[[Figure], None]
    rehearsal: bool
    deadline: float
    folder: Path
    out: Path

    def __post_init__(self) -> None:
        if not self.rehearsal and not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU here; --rehearse runs the checks on the CPU")
        self.device = torch.device("cpu") if self.rehearsal else torch.device("cuda", 0)
        if self.rehearsal:
            torch.set_num_threads(1)
            # Compiling takes a minute on a CPU and says nothing of a GPU: what is to be compiled runs as it is.
            torch.compiler.set_stance("force_eager")
        else:
            torch.cuda.set_device(self.device)
        self.clock = Clock(self.device)

    @property
    def seconds_left(self) -> float:
        """Until the process is ended."""
        return self.deadline - time.monotonic()

    def seen(self, name: str, value: float | str | None, unit: str = "", note: str = "") -> None:
        """Report a value that no bar is set for."""
        self.report(Figure(name, value, unit, note=note))

    def judged(
        self, name: str, value: float | str, bar: float | str, sense: Sense, unit: str = "", note: str = ""
    ) -> None:
        """Report a value whose bar holds on every device: correctness, not speed."""
        self.report(Figure(name, value, unit, bar, sense, note=note, speed=False))

    def figure(
        self,
        name: str,
        values: Iterable[float],
        unit: str = "",
        bar: float | None = None,
        sense: Sense = "at least",
        note: str = "",
    ) -> float:
        """Report the median of values with its interval; return it."""
        known = list(values)
        low, high = median_interval(known) or (None, None)
        middle = statistics.median(known)
        self.report(Figure(name, middle, unit, bar, sense, low, high, len(known), note))
        return middle

    def not_reached(self, name: str, why: str, bar: float | None = None, sense: Sense = "at least") -> None:
        """Report that a figure could not be had."""
        self.report(Figure(name, None, bar=bar, sense=sense, note=why))

    def attempt(self, name: str, part: Callable[[], None], seconds: float = 0.0) -> None:
        """Run a part of the check; what it raises is reported as its figure, and the next part goes on.

        A package that is missing, or what the engine does not support here, leaves the part not reached; any other
        error is a missed bar. seconds: that it takes at least; with fewer left it is not begun.
        """
        if self.seconds_left < seconds:
            self.not_reached(name, f"{self.seconds_left:.0f} s were left of this check's share")
            return
        try:
            part()
        except (ModuleNotFoundError, NotImplementedError) as error:
            self.not_reached(name, _told(error))
        except Exception as error:
            traceback.print_exc()
            self.judged(name, _told(error), _NO_ERROR, "is")
        finally:
            free_memory(self.device)

    def surroundings(self) -> dict[str, Any]:
        """Return device, driver and versions."""
        found: dict[str, Any] = {
            "device": "CPU (rehearsal)",
            "host": platform.platform(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        if not self.rehearsal:
            properties = torch.cuda.get_device_properties(self.device)
            found |= {
                "device": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
                "processors": properties.multi_processor_count,
                "driver": _DRIVER.read_text().strip() if _DRIVER.exists() else None,
            }
        return found


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_TOLD_CHARACTERS]


def free_memory(device: torch.device) -> None:
    """Give back what no tensor uses any more."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
