"""Crashes planted in a check, to see that the others are still reported. Imports the standard library only.

python -m benchmarks.gpu --rehearse --out DIR --plant decode=segfault
"""

import ctypes
import importlib
import os
import signal
import time
from collections.abc import Callable


def _segfault() -> None:
    ctypes.string_at(0)


def _hang() -> None:
    while True:
        time.sleep(3600)


def _out_of_memory() -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.empty(1 << 50, dtype=torch.uint8, device=device)


def _missing() -> None:
    importlib.import_module("a_package_that_is_not_installed")


def _full_disk() -> None:
    with open("/dev/full", "w") as file:  # every write to it fails with ENOSPC (full(4))
        file.write("a result")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


PLANTS: dict[str, Callable[[], None]] = {
    "segfault": _segfault,
    "hang": _hang,
    "oom": _out_of_memory,
    "missing": _missing,
    "full-disk": _full_disk,
    "kill": _kill,
}


def parse_plants(asked: list[str], checks: set[str]) -> dict[str, str]:
    """Return the plant of each check from `NAME=KIND`. Raises ValueError for an unknown check or kind."""
    found = {}
    for one in asked:
        check, _, kind = one.partition("=")
        if check not in checks or kind not in PLANTS:
            raise ValueError(f"--plant {one}: use CHECK={'|'.join(PLANTS)} with a check of {', '.join(sorted(checks))}")
        found[check] = kind
    return found
