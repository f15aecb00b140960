"""Memory of a process in a container or job, by files as the kernel has them."""

from pathlib import Path

import psutil
import pytest

from benchmarks.planner.cells import made_up_calibration
from configs.common.system.memory import host_memory_available, host_memory_total
from engine.planner import local
from engine.planner.local import LocalMachine, estimated_machine, this_fingerprint


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory", ""])
def test_a_control_group_limits_the_memory(controllers: str, tmp_path: Path) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
    top = tmp_path / "cgroup"
    outer = (top / "memory" if controllers else top) / "job"
    inner = outer / "step"
    inner.mkdir(parents=True)
    for folder, limit, used, cached in ((outer, "1000", "700", "100"), (inner, "max", "600", "0")):
        for name, value in zip((*names, "memory.stat"), (limit, used, f"total_inactive_file {cached}"), strict=True):
            (folder / name).write_text(value)
    membership = tmp_path / "membership"
    membership.write_text(f"3:{controllers}:/job/step\n" if controllers else "0::/job/step\n")
    assert host_memory_available(top, membership) == 400
    assert host_memory_total(top, membership) == 1000
    membership.write_text("1:cpu:/other\n")
    for elsewhere in (membership, tmp_path / "absent"):
        assert host_memory_available(top, elsewhere) > 2**20
        assert host_memory_total(top, elsewhere) == psutil.virtual_memory().total


def test_the_planner_plans_for_no_more_memory_than_a_job_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit: cells that fit the machine were started and killed."""
    calibration = made_up_calibration()
    assert calibration.memory_bytes > 2**30
    monkeypatch.setattr(local, "host_memory_total", lambda: 2**30)
    calibrated = LocalMachine(this_fingerprint(), calibration, estimated_machine(this_fingerprint()))
    for machine in (calibrated.while_busy(2), calibrated.estimate):
        assert machine.host_memory_bytes == 2**30
        assert machine.accelerator.memory_bytes <= 2**30
