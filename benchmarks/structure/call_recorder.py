"""Record which functions of a checkout are called in a run, and which of them lie on the way of a measurement.

`benchmarks.structure.trace` copies this file as `sitecustomize.py` into a folder on PYTHONPATH, so each Python process
of the run loads it before anything else; it must not import anything but the standard library. Each process appends
lines to a file that is named after its pid, at the first sight of each function: a rank ends without running exit
handlers, and a launcher replaces itself by another program.

    called <tab> file <tab> function <tab> caller's file    it was called by our code (""), not during an import
    way <tab> file <tab> function <tab>                     it was on the call stack at one of the events below

Events: a file of the run folder is opened, renamed or linked; a process is started or replaced; a rank reads the clock.
"""

import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

_ROOT = os.environ.get("RANKWISE_TRACE_ROOT", "")
_FOLDER = os.environ.get("RANKWISE_TRACE_FOLDER", "")
_RUNS = os.environ.get("RANKWISE_TRACE_RUNS", "")
_IS_FUNCTION = 1  # CO_OPTIMIZED: set for functions, not for bodies of modules and classes
_STARTS = ("subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system")
_FILES = ("open", "os.rename", "os.link", "os.symlink")
_IS_RANK = "engine.worker" in sys.orig_argv
_seen: set[tuple[str, CodeType, str]] = set()


def _profile(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        code = frame.f_code
        if _is_ours(code):
            caller = _caller(frame)
            if ("called", code, caller) not in _seen and not _is_importing(frame):
                _write("called", code, caller)
    elif event == "c_call" and _IS_RANK and argument is time.perf_counter:
        _write_stack(frame)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS or (
        event in _FILES and any(str(one).startswith(_RUNS) for one in arguments if isinstance(one, (str, os.PathLike)))
    ):
        _write_stack(sys._getframe(1))


def _path(argument: Any) -> Any:
    return os.fspath(argument) if isinstance(argument, os.PathLike) else argument


def _write_stack(frame: FrameType | None) -> None:
    if _is_importing(frame):
        return
    while frame is not None:
        code = frame.f_code
        if _is_ours(code) and ("way", code, "") not in _seen:
            _write("way", code, "")
        frame = frame.f_back


def _is_ours(code: CodeType) -> bool:
    return bool(code.co_flags & _IS_FUNCTION) and code.co_filename.startswith(_ROOT)


def _caller(frame: FrameType) -> str:
    """The file of ours whose function calls, through libraries or not; "" if there is none."""
    back = frame.f_back
    while back is not None and not back.f_code.co_filename.startswith(_ROOT):
        back = back.f_back
    return "" if back is None else back.f_code.co_filename[len(_ROOT) :]


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def _write(kind: str, code: CodeType, caller: str) -> None:
    _seen.add((kind, code, caller))
    line = f"{kind}\t{code.co_filename[len(_ROOT) :]}\t{code.co_qualname}\t{caller}\n"
    descriptor = os.open(f"{_FOLDER}/{os.getpid()}.calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


if _ROOT and _FOLDER and _RUNS:
    threading.setprofile(_profile)
    sys.addaudithook(_audit)
    sys.setprofile(_profile)
