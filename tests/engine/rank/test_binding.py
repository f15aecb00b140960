"""Ranks beside their GPUs: cores by the kernel's files of the PCI devices, memory by its own call, slices by UUID."""

import os
from pathlib import Path

import pytest

from configs.plans.paths import RunPaths
from configs.records.record import Status
from configs.targets.target import LocalTarget
from engine.planner.accelerators import LocalAccelerator
from engine.rank.binding import bind, devices_of_ranks, threads
from engine.rank.processes import RankPlace
from tasks.campaign.records import collect_job
from tests.support.cluster.launches import launch, noop_measurement, part, write_job
from tests.support.nvml import build_driver, python_with_gpus

BOUND = """
from configs.targets.target import LocalTarget
from engine.rank.binding import bind, devices_of_ranks
from engine.rank.processes import place_from_environment
import os
place = place_from_environment()
bind(place, 1, devices_of_ranks(place, LocalTarget()))
print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"], place.own_device_only)
"""


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What the kernel is asked for: this machine has not the cores of the tests."""
    asked: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: asked.append(list(cores)))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # put back after the test
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return asked


def machine(root: Path, *nodes: tuple[int, str]) -> list[LocalAccelerator]:
    """GPUs on NUMA nodes with these cores."""
    found = []
    for number, (node, cores) in enumerate(nodes):
        pci = f"0000:{number + 16:02x}:00.0"
        folder = root / "sys/bus/pci/devices" / pci
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (folder / "local_cpulist").write_text(f"{cores}\n")
        found.append(LocalAccelerator(name="GPU", pci=pci))
    return found


def bound(rank: int, cores_per_rank: int, devices: list[LocalAccelerator], root: Path, allowed: int = 16) -> RankPlace:
    cores = list(range(allowed))
    place = RankPlace(rank, rank, len(devices), len(devices), allowed=cores, cores=cores)
    bind(place, cores_per_rank, devices, root)
    return place


def test_ranks_have_separate_cores_of_the_node_of_their_gpu(tmp_path: Path, pinned: list[list[int]]) -> None:
    """Four GPUs, the first and the third on the second socket."""
    devices = machine(tmp_path, (1, "8-15"), (0, "0-7"), (1, "8-15"), (0, "0-7"))
    places = [bound(rank, 3, devices, tmp_path) for rank in range(4)]
    assert [place.cores for place in places] == [[8, 9, 10], [0, 1, 2], [11, 12, 13], [3, 4, 5]] == pinned
    assert [place.numa_node for place in places] == [1, 0, 1, 0]
    assert not any(place.cores_shared for place in places)
    figures = places[0].binding
    assert (figures["numa_node"], figures["bound_cores"]) == (1, 3)
    assert isinstance(figures["numa_memory"], bool)


def test_too_few_cores_of_a_node_are_shared_and_the_record_says_so(tmp_path: Path, pinned: list[list[int]]) -> None:
    devices = machine(tmp_path, (0, "0-3"), (0, "0-3"), (1, "4-7"))
    first, second, third = (bound(rank, 4, devices, tmp_path, allowed=8) for rank in range(3))
    assert first.cores == second.cores == [0, 1, 2, 3] and first.cores_shared and second.cores_shared
    assert third.cores == [4, 5, 6, 7] and not third.cores_shared


def test_cores_that_the_job_does_not_have_are_not_taken(tmp_path: Path, pinned: list[list[int]]) -> None:
    """The GPU is on the second socket, the job on cores of the first: its own cores it is."""
    place = bound(0, 2, machine(tmp_path, (1, "8-15")), tmp_path, allowed=4)
    assert (place.cores, place.numa_node, place.binding) == ([0, 1], None, {})


@pytest.mark.parametrize("gpus", [0, 2])
def test_without_numa_nodes_cores_are_shared_out_in_order(tmp_path: Path, pinned: list[list[int]], gpus: int) -> None:
    devices = [LocalAccelerator(name="GPU", pci="0000:10:00.0")] * gpus
    place = RankPlace(1, 1, 2, 2, allowed=list(range(8)), cores=list(range(8)))
    bind(place, 2, devices, tmp_path)
    assert (place.cores, place.threads, place.cores_shared) == ([2, 3], 2, False)
    few = RankPlace(1, 1, 2, 2, allowed=[0], cores=[0])
    bind(few, 1, devices, tmp_path)
    assert few.cores == [0] and few.cores_shared


def test_a_rank_sees_its_slice_alone(tmp_path: Path) -> None:
    driver = build_driver(tmp_path)
    stub = {"STUB_GPUS": "1", "STUB_SLICES": "3", "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3"}
    for rank in "02":
        said = python_with_gpus(driver, BOUND, **stub, RANK=rank, LOCAL_RANK=rank)
        assert said == f"MIG-stub0-{rank} PCI_BUS_ID True"


def test_ranks_on_the_cpu_have_no_devices() -> None:
    place = RankPlace(0, 0, 1, 1, allowed=[0], cores=[0])
    assert devices_of_ranks(place, LocalTarget(device="cpu")) == ()


def test_threads_are_those_of_the_environment_or_one_per_core() -> None:
    assert [threads({"OMP_NUM_THREADS": text}, 4) for text in ("", "3", " 2,1")] == [4, 3, 2] and threads({}, 5) == 5
    for wrong in ("all", "0", "-2", "2.5", ","):
        with pytest.raises(ValueError, match=f"OMP_NUM_THREADS: got {wrong}, expected a number of threads"):
            threads({"OMP_NUM_THREADS": wrong}, 4)


@pytest.mark.slow
def test_a_launch_that_cannot_use_the_gpus_leaves_records_that_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver with GPUs, and a torch that finds none: unsupported, in both passes, and nothing runs on the CPU."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch finds a GPU here")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_driver(tmp_path)))
    monkeypatch.setenv("STUB_GPUS", "2")
    measurements = [noop_measurement("one"), noop_measurement("two")]
    for name, memory in (("timed", False), ("memory", True)):
        paths = write_job(tmp_path / "run", measurements, name=name, memory=memory)
        end = launch(paths)
        assert end.status is not Status.COMPLETED
        for measurement in measurements:
            found = part(paths, measurement)
            assert found.status is Status.UNSUPPORTED and found.failure is not None
            assert found.failure.message.startswith("device: this node has 2 x NVIDIA H100 80GB HBM3, but torch ")
            assert "set `device: cpu` of the target" in found.failure.message
        records = collect_job(RunPaths(tmp_path / "run"), name).records
        assert [record.status for record in records] == [Status.UNSUPPORTED] * 2
        assert records[0].failure is not None and "finds no GPU" in records[0].failure.message
