"""Readers of /proc against what this process really does."""

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from engine.rank import host_usage

MIB = 2**20


def spin(seconds: float) -> None:
    """Use the processor for so many CPU seconds of this process."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_process_cpu_counts_work_and_not_sleep() -> None:
    # In a process of its own: threads that other tests left in this one work while it sleeps.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        worked, slept = pool.submit(cpu_of_work_and_sleep).result()
    assert 0.19 < worked < 0.5
    assert slept < 0.1


def cpu_of_work_and_sleep() -> tuple[float, float]:
    """CPU seconds while 0.2 s were worked, and while 0.2 s were slept."""
    before = host_usage.process_cpu_seconds()
    spin(0.2)
    worked = host_usage.process_cpu_seconds()
    time.sleep(0.2)
    return worked - before, host_usage.process_cpu_seconds() - worked


def test_machine_busy_contains_this_process() -> None:
    cores = os.sched_getaffinity(0)
    before, began = host_usage.machine_busy_seconds(cores), time.monotonic()
    spin(0.3)
    after, elapsed = host_usage.machine_busy_seconds(cores), time.monotonic() - began
    assert before is not None and after is not None
    tick = 0.02
    assert 0.3 - 2 * tick <= after - before <= elapsed * len(cores) + 2 * tick * len(cores)


def test_machine_busy_of_a_core_that_is_not_there_is_unknown() -> None:
    assert host_usage.machine_busy_seconds([1_000_000]) is None


def test_peak_memory_is_of_what_was_touched_and_can_be_reset() -> None:
    before = host_usage.resident_memory_bytes()
    block = np.ones(64 * MIB, dtype=np.uint8)
    peak = host_usage.peak_memory_bytes()
    assert before is not None and peak is not None
    assert peak >= before + 60 * MIB
    del block
    host_usage.reset_peak_memory()
    after = host_usage.peak_memory_bytes()
    assert after is not None and after < peak - 50 * MIB


def test_storage_counts_what_is_written(tmp_path: Path) -> None:
    before = host_usage.storage_bytes()
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(MIB))
        file.flush()
        os.fsync(file.fileno())
    after = host_usage.storage_bytes()
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        written = after.written - before.written
        assert written == 0 or MIB <= written < 2 * MIB, "nothing on a tmpfs, else the file and some of its folder"


def test_variables_in_force_are_kept_and_secrets_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_SECRET", "s3cret")
    monkeypatch.setenv("MY_SWITCH", "on")
    monkeypatch.setenv("UNRELATED", "x")
    kept = host_usage.variables_in_force(["MY_SWITCH", "NOT_SET"])
    assert (kept["NCCL_DEBUG"], kept["NCCL_SECRET"], kept["MY_SWITCH"]) == ("INFO", "(hidden)", "on")
    assert "UNRELATED" not in kept and "NOT_SET" not in kept


@pytest.mark.parametrize(
    "name",
    ["NVIDIA_TF32_OVERRIDE", "HSA_OVERRIDE_GFX_VERSION", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
     "RCCL_MSCCL_ENABLE", "CUBLAS_WORKSPACE_CONFIG"],
)  # fmt: skip
def test_variables_of_gpu_libraries_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record did not say that TF32 was turned on for all libraries, nor what AMD's were told."""
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")
    kept = host_usage.variables_in_force([])
    assert kept[name] == "1" and "NVIDIA_DRIVER_CAPABILITIES" not in kept


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_COMMIT", "a" * 40)
    monkeypatch.setenv("RANKWISE_DIRTY", "1")
    environment = host_usage.measured_environment([], cores=2)
    assert (environment["commit"], environment["dirty"], environment["cores"]) == ("a" * 40, True, 2)
    assert environment["memory_bytes"] == psutil.virtual_memory().total
    assert environment["numpy"] == np.__version__
    monkeypatch.delenv("RANKWISE_COMMIT")
    monkeypatch.delenv("RANKWISE_DIRTY")
    unknown = host_usage.measured_environment([], cores=2)
    assert (unknown["commit"], unknown["dirty"]) == (None, None)


@pytest.mark.slow
def test_a_peak_that_was_taken_does_not_hide_the_next() -> None:
    code = (
        "import numpy as np, torch; from engine.rank.host_usage import peak_memory_bytes, take_peak;"
        "cpu = torch.device('cpu'); big = np.ones(50_000_000); del big;"
        "first = take_peak(cpu); small = np.ones(10_000_000); print(first, peak_memory_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    assert 200e6 < first - second < 420e6


def test_a_peak_that_cannot_be_reset_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in gVisor, or for a Python with capabilities: every memory pass ended in `No such file or directory`."""
    import torch

    monkeypatch.setattr(host_usage, "_peaks", {"cannot be reset": False})
    monkeypatch.setattr(host_usage, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
    assert host_usage.peak_memory_bytes() is not None
    host_usage.reset_peak_memory()
    assert host_usage.peak_memory_bytes() is None and host_usage.take_peak(torch.device("cpu")) is None
