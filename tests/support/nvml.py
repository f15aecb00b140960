"""A driver's library with GPUs that the environment describes (`nvml_stub.c`), found by what loads NVML."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def build_driver(folder: Path) -> Path:
    """Compile the library into a folder, for LD_LIBRARY_PATH; skip the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = Path(__file__).with_name("nvml_stub.c"), folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return folder


def with_gpus(driver: Path, **stub: str) -> dict[str, str]:
    """The environment of a process that sees the library's GPUs: STUB_GPUS="8", ..."""
    return os.environ | {"LD_LIBRARY_PATH": str(driver)} | stub


def python_with_gpus(driver: Path, program: str, **stub: str) -> str:
    """What a Python program prints in a fresh process, because a library is loaded once."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=with_gpus(driver, **stub), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
