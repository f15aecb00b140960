"""The communicator of a group that a script has created itself."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.api.current_group import device_and_backend, world_communicator
from tests.support.api_groups import leave_the_pools_group
from tests.support.rank_pool import RankPool


def of_a_group_without_a_backend(rank: int, store: str) -> tuple[str, str, float]:
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=2)
    device, backend = device_and_backend()
    total = world_communicator().all_reduce(torch.tensor([10.0**rank], device=device)).item()
    return device.type, backend, total


def test_a_group_without_a_named_backend_has_that_of_its_device(tmp_path: Path) -> None:
    """Its backend was "undefined", and its device the CPU where it has GPUs."""
    with RankPool(2) as pool:
        pool.run(leave_the_pools_group)
        for found in pool.run(of_a_group_without_a_backend, str(tmp_path / "store")):
            assert found in (("cpu", "gloo", 11.0), ("cuda", "nccl", 11.0))


def sizes_of_groups(rank: int, stores: list[str]) -> list[int]:
    """Groups of a script, one after the other, and none between them."""
    sizes = []
    for store in stores:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        first = world_communicator()
        assert world_communicator() is first
        sizes.append(int(first.all_reduce(torch.tensor([1])).item()))
        dist.destroy_process_group()
        sizes.append(world_communicator().size)
    return sizes


def test_a_communicator_is_of_the_group_that_there_is(tmp_path: Path) -> None:
    """That of a destroyed group was used on."""
    with RankPool(2) as pool:
        pool.run(leave_the_pools_group)
        assert pool.run(sizes_of_groups, [str(tmp_path / name) for name in "ab"]) == [[2, 1, 2, 1]] * 2


@pytest.mark.parametrize(
    ("backends", "gpus", "expected"),
    [
        ("cpu:gloo,cuda:nccl", True, ("cuda:3", "nccl")),
        ("cpu:gloo,cuda:nccl", False, ("cpu", "gloo")),
        ("cuda:nccl", True, ("cuda:3", "nccl")),
        ("cpu:gloo,cuda:gloo", True, ("cpu", "gloo")),
        ("cpu:mpi", False, ("cpu", "mpi")),
    ],
)
def test_tensors_are_those_of_the_gpu_where_the_group_exchanges_them(
    backends: str, gpus: bool, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "get_backend", lambda: "undefined")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    device, backend = device_and_backend()
    assert (str(device), backend) == expected
