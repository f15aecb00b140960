"""Compile a C source of this package with the system's compiler at first use, and load it.

Binary wheels would have to target the oldest supported processor; a source compiled on the target machine uses all
instructions of its processor. The library is cached per user by the hash of all its inputs, so that a second process
loads it in about 15 ms. Without a compiler, callers use their torch path and report the reason:

    library = load_library(Path(__file__).with_name("linear.c"))
    if library is None:
        print(unavailable_reason())

`RANKWISE_KERNELS=off` turns the compiled kernels off; `RANKWISE_KERNELS=avx2` compiles them for any x86-64 processor
with AVX2, to test the path of an older one on a newer one.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import stat
import subprocess
import tempfile
from pathlib import Path

from configs.common.files.flushing import flush_file
from configs.common.system.proc import read_fields

MODES = ("on", "off", "avx2")
_COMPILE_SECONDS = 300
_loaded: dict[tuple[Path, tuple[str, ...], str], ctypes.CDLL | None] = {}
_reasons: dict[tuple[str, str], str] = {}  # by mode and source


class _BuildError(RuntimeError):
    """Reason for a missing library, in one line."""


def load_library(source: Path, *flags: str) -> ctypes.CDLL | None:
    """Return the library compiled from one C file, with further compiler flags, or None if that is not possible.

    Safe for concurrent processes. The result is cached for the process; `unavailable_reason()` explains a None.
    """
    mode = kernel_mode()
    key = (source, flags, mode)
    if key not in _loaded:
        try:
            _loaded[key] = ctypes.CDLL(str(_compiled(source, flags, mode)))
        except (_BuildError, OSError) as error:
            _reasons[mode, source.name] = f"{source.name}: {error}"
            _loaded[key] = None
    return _loaded[key]


def loaded_libraries() -> list[ctypes.CDLL]:
    """Return the libraries loaded in the current mode."""
    mode = kernel_mode()
    return [library for (_, _, of), library in _loaded.items() if library is not None and of == mode]


@functools.cache
def parallel_address() -> int | None:
    """Return the address of GOMP_parallel in torch's OpenMP: a second thread pool would compete for the cores."""
    import torch

    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def kernel_mode() -> str:
    """Return the mode set by RANKWISE_KERNELS. Raises ValueError for anything but on, off and avx2."""
    mode = os.environ.get("RANKWISE_KERNELS", "on")
    if mode not in MODES:
        raise ValueError(f"RANKWISE_KERNELS={mode!r} is not one of {', '.join(MODES)}")
    return mode


def unavailable_reason(source: str | None = None) -> str | None:
    """Return why the library of a source, `linear.c`, or the last one is unavailable in the current mode, if it is."""
    found = [why for (mode, name), why in _reasons.items() if mode == kernel_mode() and source in (None, name)]
    return found[-1] if found else None


def _compiled(source: Path, flags: tuple[str, ...], mode: str) -> Path:
    """Return the path of the shared object; compile it if the cache lacks it."""
    if mode == "off":
        raise _BuildError("RANKWISE_KERNELS=off")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise _BuildError(f"written for x86-64, this machine is {platform.machine()}")
    march = "x86-64-v3" if mode == "avx2" else "native"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    command = [*compiler, "-O3", f"-march={march}", "-shared", "-fPIC", *flags]
    parts = (*_texts(source), shlex.join(command).encode(), _version(tuple(compiler)), _processor_flags())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]
    library = _cache_folder() / f"{source.stem}-{digest}.so"
    if not library.exists():
        _compile([*command, str(source)], library)
    return library


def _texts(source: Path) -> list[bytes]:
    """Return the source and the headers beside it that it includes."""
    text = source.read_bytes()
    headers = re.findall(rb'^#include "(.+)"', text, re.MULTILINE)
    return [text, *(part for header in headers for part in _texts(source.parent / header.decode()))]


def _compile(command: list[str], library: Path) -> None:
    """Compile under a temporary name first, so that the final name is always a complete library."""
    handle, name = tempfile.mkstemp(suffix=".so", prefix=f".{library.stem}-", dir=library.parent)
    os.close(handle)
    try:
        done = _run([*command, "-o", name, "-lm"])
        if done.returncode:
            raise _BuildError(f"{shlex.join(command)} failed: {_first_error(done.stderr)}")
        flush_file(Path(name))  # a torn library would be found again and again
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        # A compiler that speaks the language of the locale need not write in Python's encoding (PYTHONUTF8).
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS)
    except OSError as error:
        raise _BuildError(f"no C compiler: {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise _BuildError(f"{command[0]} took more than {_COMPILE_SECONDS} s") from None


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])


@functools.cache
def _version(compiler: tuple[str, ...]) -> bytes:
    done = _run([*compiler, "--version"])
    if done.returncode:
        raise _BuildError(f"{shlex.join(compiler)} --version failed: {_first_error(done.stderr)}")
    return done.stdout.encode()


@functools.cache
def _processor_flags() -> bytes:
    """Return the expansion of -march=native, because nodes with different processors may share a home folder."""
    return b" ".join(sorted(flag.encode() for flag in processor_flags()))


@functools.cache
def processor_flags() -> frozenset[str]:
    """The features of the first processor as Linux names them (`avx2`, `amx_bf16`, ...); empty if unknown."""
    return frozenset(read_fields("/proc/cpuinfo").get("flags", "").split())


def _cache_folder() -> Path:
    """Return a folder writable by this user only, because its contents are loaded into the process."""
    # A relative path is to be ignored (XDG Base Directory Specification): each working folder would have a cache.
    named = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "")
    home = named if os.path.isabs(named) else os.path.expanduser("~/.cache")
    of_home = Path(home) / "rankwise" / "kernels"
    # A tilde is left where neither HOME nor the system's list of users knows the home; it would become a folder here.
    if os.path.isabs(home) and _is_private(of_home):
        return of_home
    temporary = tempfile.gettempdir()
    of_user = Path(temporary) / f"rankwise-kernels-{os.getuid()}"
    # A link there may be another user's, who chooses by it among the folders of this one.
    if not of_user.is_symlink() and _is_private(of_user):
        return of_user
    if _is_noexec(temporary):
        raise _BuildError(
            f"no code can be loaded from {home} or {temporary} (mounted noexec, or not writable); "
            "set XDG_CACHE_HOME to a folder of another disk"
        )
    return Path(tempfile.mkdtemp(prefix="rankwise-kernels-"))


def _is_private(folder: Path) -> bool:
    """Return whether code in a folder of this user, made if it is not there, can be written and loaded."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError:
        return False
    own = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return own and os.access(folder, os.W_OK | os.X_OK) and not _is_noexec(folder)


def _is_noexec(folder: str | Path) -> bool:
    """Whether the disk forbids to map code from it, as temporary ones of containers and hardened machines do."""
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)
