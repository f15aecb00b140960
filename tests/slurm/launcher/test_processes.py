"""How the processes of a launch are ended, also where a look at them takes long."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm.launcher import processes
from slurm.launcher.processes import end_tree


class Stubborn:
    """A process that ends at one signal only."""

    pid = 1

    def __init__(self, ends_at: str) -> None:
        self.ends_at = ends_at
        self.received: list[str] = []

    def terminate(self) -> None:
        self.received.append("terminate")

    def kill(self) -> None:
        self.received.append("kill")

    def slowly_found(self) -> list["Stubborn"]:
        """As on a machine whose cores others have: longer than the limits of this test."""
        time.sleep(0.05)
        return [] if self.ends_at in self.received else [self]


def ended(process: Stubborn, **limits: float) -> list[int]:
    find: Callable[[], Any] = process.slowly_found
    return end_tree(find, **limits)


def test_nobody_is_given_up_before_it_was_killed_however_long_a_look_takes() -> None:
    process = Stubborn("kill")
    assert ended(process, grace_seconds=0.01, limit_seconds=0.02) == []
    assert process.received == ["terminate", "kill"]


def test_everybody_is_asked_to_end_before_it_is_killed_however_long_a_look_takes() -> None:
    process = Stubborn("terminate")
    assert ended(process, grace_seconds=0.01, limit_seconds=1.0) == []
    assert process.received == ["terminate"]


def test_who_outlives_the_limit_is_named() -> None:
    process = Stubborn("never")
    assert ended(process, grace_seconds=0.01, limit_seconds=0.02) == [1]
    assert process.received == ["terminate", "kill"]


def test_kills_that_the_kernel_does_not_count_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In sandboxes such as gVisor, which have no /proc/vmstat, no launch began."""
    read = Path.read_text

    def read_text(path: Path, *more: Any, **named: Any) -> str:
        return read(tmp_path / "none" if str(path) == "/proc/vmstat" else path, *more, **named)

    monkeypatch.setattr(processes, "_memory_events", list)
    monkeypatch.setattr(Path, "read_text", read_text)
    assert processes.oom_kills() == 0
