"""What is asked of hosts, by stand-ins; on real SSH servers: tests/slurm/test_ssh_hosts.py."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from configs.targets.target import SshTarget
from slurm.ssh import host_checks
from slurm.ssh.connection import Facts
from slurm.ssh.host_checks import HostNeed, hosts_identity, lacking

FACTS = {
    "folder": "/home/bench/.rankwise", "writable": True, "free_bytes": 1 << 30, "cores": 8, "memory_bytes": 1 << 35,
    "cpu_model": "Xeon", "boot": "b", "place": "net:[1]", "python": [3, 11, 2], "address": "10.0.0.7",
    "hostname": "gpu-a", "gpus": {"names": [], "error": "nvidia-smi is not installed"},
}  # fmt: skip


class StandInHost:
    """A host that has nothing of ours yet."""

    name = "gpu-a"
    address = SimpleNamespace(host="gpu-a", python="python3")

    def __init__(self, **facts: Any) -> None:
        self._facts = Facts(FACTS | facts, 0.0)

    async def facts(self, fresh: bool = False) -> Facts:
        return self._facts

    async def ask(self, operation: str, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        assert operation == "sizes"
        return {"sizes": [None for _ in arguments["paths"]]}, b""


def problems(monkeypatch: pytest.MonkeyPatch, target: SshTarget, need: HostNeed, **facts: Any) -> list[str]:
    monkeypatch.setattr(host_checks, "hosts_of", lambda _: [StandInHost(**facts)])
    return asyncio.run(lacking(target, need))


def test_a_hosts_own_disk_need_not_hold_what_lies_in_the_shared_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries and models go to `shared` alone: home folders with a small quota were refused."""
    need = HostNeed(model_bytes=20 << 30)
    (said,) = problems(monkeypatch, SshTarget(hosts=["gpu-a"]), need)
    assert said.startswith("hosts: gpu-a: 1.0 GiB free in /home/bench/.rankwise, 28.2 GiB are needed. Make room")
    assert problems(monkeypatch, SshTarget(hosts=["gpu-a"], shared="/scratch"), need) == []
    assert problems(monkeypatch, SshTarget(hosts=["gpu-a"], shared="/scratch"), need, writable=False) == []
    assert (
        "8 cores needed"
        in problems(monkeypatch, SshTarget(hosts=["a"], shared="/scratch"), HostNeed(cores=8), cores=4)[0]
    )


@pytest.mark.parametrize(
    ("names", "told"), [(["H100", "H100"], ", 2 x H100"), (["T4", "H100", "T4"], ", 2 x T4, 1 x H100"), ([], "")]
)
def test_hosts_are_known_by_all_their_gpus(names: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with an H100 beside T4s was called one of `3 x T4`."""
    monkeypatch.setattr(host_checks, "hosts_of", lambda _: [StandInHost(gpus={"names": names})])
    identity = asyncio.run(hosts_identity(SshTarget(hosts=["gpu-a"])))
    assert identity == f"hosts gpu-a of 8 CPUs, Xeon, 32 GiB{told}"
