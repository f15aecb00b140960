"""Programs that start by fork(2) in a process that has imported their modules: `python -m`, without the imports.

    child = fork(lambda: run_module("engine.worker", [job_json], environment))
    child.wait(timeout=1.0)             # as subprocess.Popen

The process that forks may have imported modules and done nothing else. `unfit_to_fork()` checks what would break in a
child: threads, which fork(2) does not copy, and an open accelerator driver, which a child cannot use again. A program
that was forked shows its own command line in /proc, by which the processes of a job are found.
"""

import ctypes
import importlib
import io
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

COMMAND_LINE_BYTES = 8192
"""Room for the command lines of forked programs: a process keeps the room that it was started with."""

_DRIVERS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel")
_BINDING = frozenset({"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET"})
_POLL_SECONDS = 0.01


class Forked:
    """A child of this process, with the part of `subprocess.Popen` that its users need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._reap(os.WNOHANG)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as soon as there is one. Raises subprocess.TimeoutExpired."""
        if timeout is not None and self.poll() is None and not wait_for_exit(self.pid, timeout):
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
        if self.returncode is None:
            self._reap(0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the child has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> None:
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # somebody else has waited for it, as in subprocess
            self.returncode = 0
            return
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)


def fork(run: Callable[[], int]) -> Forked:
    """Start a child that calls `run`, exits with its result, and never returns here."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Forked(pid)
    code = 1
    # Handlers of this child may raise at any line, of the outer blocks too: only the innermost `finally` is certain.
    try:
        try:
            code = _result(run, before)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
    finally:
        os._exit(code)


def _result(run: Callable[[], int], mask: set[int | signal.Signals]) -> int:
    """The exit code of a child's program, as the interpreter would choose it. mask: blocked signals of the parent."""
    try:
        _reset_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return run()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        with suppress(OSError):
            traceback.print_exc()
        return 1


def _reset_signals() -> None:
    """As after execve(2): a handler of the parent becomes the default, what was ignored stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGCHLD):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_module(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Become `python -m module arguments` in this process: environment, standard input, command line. Its exit code.

    The module has a function `main(arguments) -> exit code`. For a child of `fork` alone.
    """
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a process that is killed shall not take its last lines with it
    sys.argv = [module, *arguments]
    set_command_line([sys.executable, "-m", module, *arguments])
    code: int = importlib.import_module(module).main(list(arguments))
    return code


def set_command_line(arguments: Sequence[str]) -> None:
    """Show these arguments as this process's command line, cut to the room that there is.

    The room is the memory of the arguments that the process was started with: /proc/<pid>/stat, fields 48 and 49
    (proc(5)). Where the kernel does not say where they lie, nothing is changed.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])
    if not 0 < first < end:
        return
    text = b"\0".join(os.fsencode(argument) for argument in arguments)
    room = end - first
    ctypes.memmove(first, text[: room - 1].ljust(room, b"\0"), room)


def unfit_to_fork() -> str | None:
    """Why children of this process could not work; None where they can.

    Threads of libraries that end them at a fork and begin them anew when they are needed (OpenBLAS) do no harm.
    """
    if _threads() > 1:
        fork(lambda: 0).wait()
    if _threads() > 1:
        return f"{_threads()} threads run in it"
    for entry in os.scandir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(entry.path)
            if target.startswith(_DRIVERS):
                return f"it has opened {target}"
    return None


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def binds_threads(environment: Mapping[str, str]) -> bool:
    """Whether OpenMP binds threads to cores, by those of the process that imports it: a rank must import for itself."""
    return not _BINDING.isdisjoint(environment)


def wait_for_exit(pid: int, seconds: float) -> bool:
    """Whether a process of this user has ended, waiting so long for it. A pid that nobody has counts as ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # a kernel before 5.3
        return _poll_for_exit(pid, seconds)
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(max(0.0, seconds) * 1000))
    finally:
        os.close(descriptor)


def _poll_for_exit(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in ("Z", "X"):
            return True
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(_POLL_SECONDS, left))
