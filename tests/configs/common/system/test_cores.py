"""Cores that ranks may have, by made control groups: a CPU quota leaves fewer than the machine shows."""

from pathlib import Path

import pytest

from configs.common.system import cores
from configs.common.system.cores import quota_cores, usable_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("member", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000", "cpu.max": "max 100000"}, 4.0),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "400000 100000"}, 0.5),
        ("2:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"}, 3.0),
        ("2:cpu:/job\n0::/\n", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/job\n", {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", {}, None),
    ],
    ids=["container", "parent", "least", "v1", "v1 without", "other controller", "none"],
)
def test_the_least_quota_around_the_process(
    tmp_path: Path, member: str, files: dict[str, str], quota: float | None
) -> None:
    write(tmp_path / "member", member)
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    assert quota_cores(tmp_path / "groups", tmp_path / "member") == quota
    assert quota_cores(tmp_path / "groups", tmp_path / "no such file") is None


@pytest.mark.parametrize(("quota", "usable"), [(None, 8), (4.9, 4), (0.5, 1), (64.0, 8)])
def test_ranks_fit_into_the_quota(quota: float | None, usable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "quota_cores", lambda: quota)
    assert usable_cores() == usable
