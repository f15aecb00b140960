"""Which accelerator a process takes, and that no two take one."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from configs.common.files.project_files import ROOT
from engine.rank.devices import VisibleDevice, claim_device

THREE = [VisibleDevice(0, "GPU-a", 10 << 30), VisibleDevice(1, "GPU-b", 30 << 30), VisibleDevice(2, "GPU-c", 20 << 30)]


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKWISE_LOCKS", str(tmp_path))
    return tmp_path


def test_idle_devices_are_taken_by_free_memory_and_by_one_run_each(locks: Path) -> None:
    code = (
        "import sys, tests.engine.rank.test_devices as tests; from engine.rank.devices import claim_device; "
        "claim = claim_device(None, tests.THREE); print(claim.device, flush=True); sys.stdin.readline()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "cuda:1\n"
    mine = [claim_device(None, THREE) for _ in range(2)]
    assert [str(claim.device) for claim in mine] == ["cuda:2", "cuda:0"]
    with pytest.raises(ValueError, match=r"all 3 accelerators are taken by other runs; wait .* device='cuda:0'"):
        claim_device(None, THREE)
    other.kill()
    other.communicate()
    again = claim_device(None, THREE)
    assert str(again.device) == "cuda:1"
    for claim in (*mine, again):
        claim.release()
        claim.release()
    assert str(claim_device(None, THREE).device) == "cuda:1"


def test_a_named_device_is_given_and_marked(locks: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = claim_device("cuda:1", THREE)
    idle = claim_device(None, THREE)
    assert (str(named.device), str(idle.device)) == ("cuda:1", "cuda:2")
    assert str(claim_device("cuda:2", THREE).device) == "cuda:2"
    assert "cuda:2 is taken by another run and will be shared with it" in caplog.text
    with (locks / "rankwise-device-GPU-b.lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(ValueError, match="device: cuda:5 is not here; there is: cuda:0, cuda:1, cuda:2"):
        claim_device("cuda:5", THREE)
    assert str(claim_device(None, []).device) == "cpu"


def test_a_device_whose_owner_is_gone_is_idle(locks: Path) -> None:
    """An orchestrator that could not be initialized kept its GPU until the process, a notebook's, was ended."""
    claim_device(None, THREE[:1])
    again = claim_device(None, THREE[:1])
    assert str(again.device) == "cuda:0"
