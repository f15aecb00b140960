"""Run checks one after another within a budget; each is a process of its own. Imports the standard library only.

    results = run_checks(CHECKS, Settings(out=Path("results"), budget_seconds=480), print)

A check that crashes, hangs, is killed or misses a package costs its own figures only. Its limit is its share of what is
left of the budget, so that time which one does not use is had by the next ones. Every figure is in the check's file as
soon as it is known. Checks that have finished with every figure are not run again.
"""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu.catalog import Check
from benchmarks.gpu.reporting.results import CheckResult, Figure, pack_results, read_results, write_result
from benchmarks.gpu.running.needs import missing_packages
from configs.common.system.proc import become_subreaper, parent_of, process_ids

ROOT = Path(__file__).parents[3]
_STACKS_SECONDS = 0.5
"""Between asking a process that hangs for its stacks and ending it."""
_ORPHANS_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Settings:
    """How to run. plants: crash to plant, by check. again: run checks that have finished before, too."""

    out: Path
    budget_seconds: float
    rehearsal: bool = False
    again: bool = False
    plants: dict[str, str] = field(default_factory=dict)


def run_checks(checks: Sequence[Check], settings: Settings, say: Callable[[str], None]) -> list[CheckResult]:
    """Run what has not been reached before; return the result of every check, in order."""
    with suppress(OSError):
        settings.out.mkdir(parents=True, exist_ok=True)
    become_subreaper()
    before = {} if settings.again else read_results(settings.out)
    kept = {
        name: result for name, result in before.items() if result.is_whole and result.rehearsal == settings.rehearsal
    }
    deadline = time.monotonic() + settings.budget_seconds
    waiting = [check for check in checks if check.name not in kept]
    for place, check in enumerate(waiting):
        limit = limit_seconds(waiting[place:], deadline - time.monotonic(), settings.rehearsal)
        kept[check.name] = _run_one(check, settings, limit, say)
        pack_results(settings.out)
    return [kept[check.name] for check in checks]


def limit_seconds(waiting: Sequence[Check], left: float, rehearsal: bool) -> float:
    """Return the limit of the first waiting check, with `left` seconds of the budget.

    It is the check's share of what is left, and in a rehearsal at least half of it: there, a process that imports torch
    beside others takes many times its usual seconds, and the limit is against hangs alone.
    """
    check = waiting[0]
    share = check.share / sum(one.share for one in waiting)
    return min(left, max(left * (max(share, 0.5) if rehearsal else share), check.least_seconds))


def _run_one(check: Check, settings: Settings, limit: float, say: Callable[[str], None]) -> CheckResult:
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: UP017  # the same on every Python
    result = CheckResult(check.name, check.title, "running", settings.rehearsal, now, limit_seconds=limit)
    missing = [name for name in missing_packages([check]) if name in check.needs]
    if limit < check.least_seconds:
        result = replace(result, state="not reached", cause=f"{limit:.0f} s of the budget were left")
    elif missing:
        result = replace(result, state="not reached", cause=f"missing here: {', '.join(missing)}")
    else:
        say(f"{check.name}: at most {limit:.0f} s")
        result = _Watched(result, settings).to_the_end(limit)
    _keep(settings.out, result)
    told = f": {result.cause}" if result.cause else ""
    say(f"{check.name}: {result.state} after {result.seconds:.1f} s{told}")
    return result


class _Watched:
    """A check's process while it runs: its lines become figures of the result, which is written after each."""

    def __init__(self, result: CheckResult, settings: Settings) -> None:
        self._result, self._settings, self._rest = result, settings, b""
        self._failed = ""

    def to_the_end(self, limit: float) -> CheckResult:
        """Run the process until it ends or exceeds its limit; none of its descendants is left."""
        _keep(self._settings.out, self._result)
        began = time.monotonic()
        read, write = os.pipe()
        try:
            process = self._start(write, limit)
            os.close(write)
            write = -1
            timed_out = self._listen(process, read, began + limit)
        finally:
            os.close(read)
            if write >= 0:
                os.close(write)
        seconds = time.monotonic() - began
        shutil.rmtree(self._folder, ignore_errors=True)
        return replace(self._result, seconds=seconds, **self._end(process.returncode, timed_out, limit))

    @property
    def _folder(self) -> Path:
        return self._settings.out / "work" / self._result.check

    def _start(self, write: int, limit: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.gpu.running.child", self._result.check, "--to", str(write)]
        command += ["--seconds", f"{limit:.1f}", "--folder", str(self._folder.absolute())]
        command += ["--rehearse"] if self._settings.rehearsal else []
        plant = self._settings.plants.get(self._result.check)
        command += ["--plant", plant] if plant else []
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
        environment = {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths)}
        if self._settings.rehearsal:
            # torch's operators, as on a GPU; kernels for CPUs would be compiled first, for a minute.
            environment |= {"RANKWISE_KERNELS": "off", "OMP_NUM_THREADS": "1"}
        log: Any = subprocess.DEVNULL
        with suppress(OSError):
            log = (self._settings.out / f"{self._result.check}.log").open("wb")
        try:
            return subprocess.Popen(
                command, stdout=log, stderr=log, pass_fds=(write,), env=environment, start_new_session=True
            )
        finally:
            if log is not subprocess.DEVNULL:
                log.close()

    def _listen(self, process: subprocess.Popen[bytes], read: int, deadline: float) -> bool:
        """Take lines until the process has ended; return whether it had to be ended."""
        timed_out = False
        os.set_blocking(read, False)
        with selectors.DefaultSelector() as ready:
            ready.register(read, selectors.EVENT_READ)
            while process.poll() is None:
                # Not the end of the pipe is waited for: a grandchild may hold it.
                if ready.select(_LOOK_SECONDS) and not self._take(read):
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_LOOK_SECONDS)
                if time.monotonic() > deadline:
                    timed_out = True
                    _end(process)
        while self._take(read):
            pass
        _end_orphans()
        return timed_out

    def _take(self, read: int) -> bool:
        """Take what has been sent; return whether anything was."""
        try:
            sent = os.read(read, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + sent).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "figure" in told:
                self._result = self._result.with_figure(Figure(**told["figure"]))
            self._result = replace(self._result, surroundings=told.get("surroundings", self._result.surroundings))
            self._failed = told.get("failed", self._failed)
            _keep(self._settings.out, self._result)
        return bool(sent)

    def _end(self, code: int, timed_out: bool, limit: float) -> dict[str, Any]:
        if timed_out:
            return {"state": "timed out", "cause": f"ended after its limit of {limit:.0f} s; the log has its stacks"}
        if code < 0:
            return {"state": "crashed", "cause": f"ended by {signal.Signals(-code).name}"}
        if code or self._failed:
            return {"state": "failed", "cause": self._failed or f"exit code {code}"}
        return {"state": "finished"}


def _keep(out: Path, result: CheckResult) -> None:
    """Write the result; on a full disk it is still in memory, and in the table."""
    try:
        write_result(out, result)
    except OSError as error:
        print(f"{result.check}: its result could not be written ({error.strerror or error})", file=sys.stderr)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask for the stacks of all threads, then end the process and its session."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_orphans() -> None:
    """End all descendants of this process: what a check started, in whatever session, is its child by now."""
    deadline = time.monotonic() + _ORPHANS_SECONDS  # a process in uninterruptible sleep may stay
    while (left := list(_descendants())) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def _descendants() -> Iterator[int]:
    parents = {}
    for pid in process_ids():
        with suppress(OSError, ValueError, IndexError):
            parents[pid] = parent_of(pid)
    wanted = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in wanted} - wanted:
        wanted |= grown
        yield from grown
