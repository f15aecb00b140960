"""Machines that checks are made on."""

import pytest

from engine.planner.accelerators import LocalAccelerator

H100 = LocalAccelerator(name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30)


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight GPUs and two cores, and a build of torch for them."""
    monkeypatch.setattr("engine.planner.local.local_accelerators", lambda environment: (H100,) * 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("tasks.checks.machine.version_of", lambda package: "2.13.0+cu130")
