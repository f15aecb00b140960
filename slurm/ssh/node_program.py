"""The program that serves a connection on a host. Python's standard library only: nothing is installed there yet.

`slurm.ssh.connection` sends its source, then requests, each a line of JSON with `id`, `op` and, where `body_bytes` says
so, so many bytes after it. Answers come the same way, in any order. It ends when the connection does; jobs go on: they
are in sessions of their own, and everything that is known of one lies in its folder.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from slurm.ssh.node_files import (
    Neighbours,
    children,
    clear_abandoned,
    fetch,
    get,
    hashes,
    install,
    make,
    pack,
    put,
    remove,
    rename,
    sizes,
    unpack,
    unpack_beside,
    whole,
)

INLINE_BYTES = 64 << 10
"""Files up to this size come with the answer that names them."""
_ANSWER_BYTES = 4 << 20
_LISTED_FILES = 4096
"""Of a job, in one answer, whose line may have 2 MiB (a window of SSH): the others are new at the next look."""
_NOT_BROUGHT = ("job.json", "hosts.json", "go")
_MODULES = tuple(
    name.encode()
    for name in (
        "slurm.launch",
        "engine.agents.torchrun_agent",
        "engine.agents.deepspeed_agent",
        "engine.agents.script_agent",
        "engine.worker",
        "slurm.supervision",
        "engine.serving",
        "engine.answering",
        "engine.routing",
    )
)
_TERM_SECONDS, _KILL_SECONDS = 5.0, 1.5
_TIDY_SECONDS = 20.0


# What the host is


def hello(folder: str) -> dict[str, Any]:
    """Facts on the host; the folder is made. Paths of requests are absolute from here on."""
    work = Path(folder) if folder.startswith("/") else Path.home() / folder
    work.mkdir(parents=True, exist_ok=True)
    work = work.resolve()
    disk = shutil.disk_usage(work)
    told = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "hostname": socket.gethostname(),
        "folder": str(work),
        "writable": os.access(work, os.W_OK | os.X_OK),
        "free_bytes": disk.free,
        "time": time.time(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "place": os.readlink("/proc/self/ns/net"),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "platform": [os.uname().machine, *platform.libc_ver()],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "available_bytes": _available_bytes(),
        "cpu_model": _cpu_model(),
        "address": told[2] if len(told) == 4 else None,
        "gpus": _gpus(),
    }


def _available_bytes() -> int | None:
    """Memory that other processes leave; None: the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine


def _gpus() -> dict[str, Any]:
    """Names, driver and free memory of NVIDIA GPUs as their own program tells them; `error`: why it does not.

    In the place of a GPU that is divided (MIG) stand its slices, each with the memory that its profile is named by.
    """
    try:
        done = _nvidia_smi("--query-gpu=name,driver_version,memory.free", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        return {"names": [], "error": "nvidia-smi is not installed"}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"names": [], "error": str(error)}
    if done.returncode != 0:
        return {"names": [], "error": (done.stdout + done.stderr).strip()[:300]}
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    slices = _slices() if rows else {}
    names: list[str] = []
    free_bytes: list[int | None] = []
    for index, (name, _, memory) in enumerate(rows):
        free = int(memory) << 20 if memory.isdigit() else None  # in MiB; None: it does not tell
        for profile in slices.get(index, ()):
            named = re.search(r"([0-9]+)gb", profile)
            names.append(f"{name} MIG {profile}")
            free_bytes.append(int(named[1]) * 10**9 if named else None)
        if index not in slices:
            names.append(name)
            free_bytes.append(free)
    return {"names": names, "driver": rows[0][1] if rows else None, "free_bytes": free_bytes}


def _slices() -> dict[int, list[str]]:
    """By the number of a GPU that is divided: the profiles of its slices, such as 3g.20gb."""
    found: dict[int, list[str]] = {}
    number = -1
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        for line in _nvidia_smi("-L").stdout.splitlines():
            if whole := re.match(r"GPU ([0-9]+):", line):
                number = int(whole[1])
            elif one := re.match(r"\s+MIG (\S+)\s", line):
                found.setdefault(number, []).append(one[1])
    return found


def _nvidia_smi(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Raises OSError and TimeoutExpired."""
    return subprocess.run(
        ["nvidia-smi", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=30,
        stdin=subprocess.DEVNULL,
    )


def versions(names: list[str]) -> dict[str, Any]:
    """Versions of libraries that this interpreter has; None for those that it lacks."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {"versions": found}


# Jobs


def start_job(folder: str, rank: int, argv: list[str], environment: dict[str, str]) -> None:
    """Start a job's launcher in a session of its own; once, however often it is asked for."""
    if not Path(argv[0]).exists() and "/" in argv[0]:
        raise OSError(f"{argv[0]}: no such program on this host")
    try:
        marker = os.open(f"{folder}/.started_{rank}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return
    with os.fdopen(marker, "w") as file, open(f"{folder}/start_{rank}.log", "ab") as log:
        # The shell ends at once, so that the launcher is nobody's child and the connection's end does not touch it.
        script = '"$@" < /dev/null > /dev/null & echo $!'
        shell = subprocess.run(
            ["sh", "-c", script, "sh", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
            cwd=folder,
            start_new_session=True,
            check=True,
            timeout=30,
        )
        pid = int(shell.stdout)
        file.write(f"{pid} {_start_ticks(pid)}\n")


def _start_ticks(pid: int) -> str | None:
    """When a process began, in ticks since boot; None where there is none (proc(5), field 22)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _launcher(folder: str, rank: int) -> int | None:
    """The pid of a job's launcher; None where it is gone or never was."""
    try:
        return _living(Path(f"{folder}/.started_{rank}").read_text())
    except (OSError, ValueError):
        return None


def _living(told: str) -> int | None:
    """The pid that a started launcher's file has; None where the process is gone. Raises ValueError."""
    pid, ticks = told.split()
    return int(pid) if _start_ticks(int(pid)) == ticks else None


def _standing(folder: str, rank: int) -> dict[str, bool]:
    """Whether a job's folder is there, its launcher was started, and still runs.

    A file system that fails for a while (a home folder by NFS with a stale handle or an expired ticket) says nothing of
    the job, which is taken to run.
    """
    try:
        told = Path(f"{folder}/.started_{rank}").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return {"there": _is_there(folder), "started": False, "alive": False}
    except OSError:
        return {"there": True, "started": True, "alive": True}
    try:
        return {"there": True, "started": True, "alive": _living(told) is not None}
    except ValueError:  # nothing was started
        return {"there": True, "started": True, "alive": False}


def _is_there(folder: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(folder).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def look(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Where jobs stand, and which of their files have changed since `known`; small ones come along."""
    answers, body = [], bytearray()
    for job in jobs:
        folder, known = job["folder"], job["known"]
        answer: dict[str, Any] = _standing(folder, job["rank"])  # before the files: what it wrote last is among them
        files: list[list[Any]] = []
        for name, size, changed in _files(folder) if known is not None else ():
            if known.get(name) == [size, changed]:
                continue
            if len(files) == _LISTED_FILES:
                break
            content = None
            if size <= INLINE_BYTES and len(body) < _ANSWER_BYTES:
                with contextlib.suppress(OSError), open(f"{folder}/{name}", "rb") as file:
                    content = file.read()
            files.append([name, size, changed, None if content is None else len(content)])
            body += content or b""
        answers.append(answer | {"files": files})
    return {"jobs": answers, "body": bytes(body)}


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "checkpoints"]
        for name in names:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                told = os.stat(path)
                relative = os.path.relpath(path, folder)
                plain = stat.S_ISREG(told.st_mode) and not name.startswith(".")
                if plain and not name.endswith(".part") and relative not in _NOT_BROUGHT:
                    yield relative, told.st_size, told.st_mtime_ns


def end_job(folder: str, rank: int) -> dict[str, Any]:
    """End a job and return when nothing of it is left; pids of what cannot be ended."""
    launcher = _launcher(folder, rank)
    if launcher is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher, signal.SIGTERM)
    deadline = time.monotonic() + _TERM_SECONDS
    while _launcher(folder, rank) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    limit = None
    while left := _processes(folder):
        now = time.monotonic()
        if limit is not None and now > limit:  # on a busy machine a look may take longer: all are killed at least once
            break
        limit = now + _KILL_SECONDS if limit is None else limit
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return {"left": left}


def _processes(folder: str) -> list[int]:
    """Living processes of a job, by their command lines: each names a file of the job's folder."""
    marker, found = os.fsencode(folder) + b"/", []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{name}/cmdline").read_bytes()
                if marker in line and any(module in line for module in _MODULES) and _start_ticks(int(name)):
                    found.append(int(name))
    return found


# The connection


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more. What may take long is done in a thread."""
    neighbours, writing = Neighbours(), threading.Lock()
    quick = (versions, put, get, sizes, make, neighbours.offer, start_job, look)
    long = (
        hello, hashes, whole, rename, remove, clear_abandoned, unpack, install, pack, unpack_beside, fetch, end_job,
    )  # fmt: skip
    operations: dict[str, Callable[..., dict[str, Any] | None]] = {each.__name__: each for each in (*quick, *long)}
    under_way: list[threading.Thread] = []

    def answer(number: int, operation: Callable[..., dict[str, Any] | None], arguments: dict[str, Any]) -> None:
        try:
            said = operation(**arguments) or {}
            body = said.pop("body", b"")
        except Exception as error:
            said, body = {"error": str(error) or type(error).__name__, "errno": getattr(error, "errno", None)}, b""
        line = json.dumps({"id": number, "body_bytes": len(body), **said}).encode() + b"\n"
        with writing, contextlib.suppress(OSError):
            answers.write(line + body)
            answers.flush()

    while line := requests.readline():
        arguments = json.loads(line)
        number, name, size = arguments.pop("id"), arguments.pop("op"), arguments.pop("body_bytes")
        if size:
            arguments["body"] = requests.read(size)
        operation = operations[name]
        if operation in long:
            thread = threading.Thread(target=answer, args=(number, operation, arguments), daemon=True)
            under_way = [*(each for each in under_way if each.is_alive()), thread]
            thread.start()
        else:
            answer(number, operation, arguments)
    _end_children(under_way)


def _end_children(under_way: Sequence[threading.Thread]) -> None:
    """End what was started for requests, and let the requests remove what they had half made, for some seconds."""
    deadline = time.monotonic() + _TIDY_SECONDS
    while any(thread.is_alive() for thread in under_way) and time.monotonic() < deadline:
        for child in list(children):
            child.kill()
        time.sleep(0.05)
    for child in list(children):
        child.kill()
