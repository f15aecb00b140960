"""The accelerators of a machine: through NVML's client against a driver made here, and by the files of the drivers."""

import json
from pathlib import Path

import pytest

from configs.targets.target import LocalTarget
from engine.planner import accelerators
from engine.planner.accelerators import (
    LocalAccelerator,
    cores_of,
    device_text,
    free_memory_bytes,
    local_accelerators,
    numa_node,
    unusable_reason,
    variables_for,
)
from engine.planner.local import local_machine, local_ranks, machine_of_devices
from tests.support.nvml import build_driver, python_with_gpus

pytest.importorskip("pynvml")
LIST = """
import dataclasses, json
from engine.planner.accelerators import local_accelerators
print(json.dumps([dataclasses.astuple(device) for device in local_accelerators()]))
"""
COUNT = """
from configs.targets.target import LocalTarget
from engine.planner.local import local_ranks
print(local_ranks(LocalTarget(), 1), local_ranks(LocalTarget(max_ranks=4), 1),
      local_ranks(LocalTarget(env={"CUDA_VISIBLE_DEVICES": "0,5,1"}), 1), local_ranks(LocalTarget(device="cpu"), 1))
"""
FREE = """
from engine.planner.accelerators import free_memory_bytes, local_accelerators
found = local_accelerators()
print(free_memory_bytes(found), free_memory_bytes(found[:1]), free_memory_bytes([]))
"""
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


def listed(driver: Path, **stub: str) -> list[list[object]]:
    found: list[list[object]] = json.loads(python_with_gpus(driver, LIST, **stub))
    return found


def test_gpus_are_listed_with_memory_address_and_capability(driver: Path) -> None:
    found = listed(driver, STUB_GPUS="2", STUB_MEMORY="85899345920", STUB_CAPABILITY="90")
    first, second = ("GPU-stub", "0000:10:00.0"), ("GPU-stub1", "0000:11:00.0")
    assert found == [[H100, "cuda", uuid, 80 << 30, pci, [9, 0], False] for uuid, pci in (first, second)]


def test_what_other_processes_have_of_a_gpu_is_not_free(driver: Path) -> None:
    stub = {"STUB_GPUS": "2", "STUB_MEMORY": "1000", "STUB_USED": "100,400"}
    assert python_with_gpus(driver, FREE, **stub) == "600 900 None"
    assert python_with_gpus(driver, FREE, STUB_GPUS="2") == "None None None"  # a driver that does not tell


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("1,0", ["GPU-stub1", "GPU-stub"]),
        ("GPU-stub2", ["GPU-stub2"]),
        ("0,-1,1", ["GPU-stub"]),
        ("0,7,1", ["GPU-stub"]),
        ("0,0", ["GPU-stub"]),
        ("", []),
    ],
)
def test_a_process_sees_what_the_variable_leaves(driver: Path, visible: str, uuids: list[str]) -> None:
    assert [device[2] for device in listed(driver, STUB_GPUS="3", CUDA_VISIBLE_DEVICES=visible)] == uuids


@pytest.mark.parametrize(
    ("stub", "first", "expected"),
    [
        ({"STUB_GPUS": "4"}, 2, {"CUDA_VISIBLE_DEVICES": "GPU-stub2,GPU-stub3"}),
        ({"STUB_GPUS": "4", "CUDA_VISIBLE_DEVICES": "3,0,1"}, 1, {"CUDA_VISIBLE_DEVICES": "GPU-stub,GPU-stub1"}),
        ({"STUB_GPUS": "4"}, 3, {}),  # one alone is left
    ],
)
def test_a_process_can_be_left_some_of_the_visible_devices(
    driver: Path, stub: dict[str, str], first: int, expected: dict[str, str]
) -> None:
    code = "import json; from engine.planner.accelerators import variables_for\n"
    code += f"print(json.dumps(variables_for({first}, 2)))"
    found = json.loads(python_with_gpus(driver, code, **stub))
    assert found == expected
    seen = [device[2] for device in listed(driver, **(stub | found))]
    assert not expected or seen == expected["CUDA_VISIBLE_DEVICES"].split(",")


def test_slices_of_a_divided_gpu_are_devices(driver: Path) -> None:
    """MIG: each slice has a UUID, which CUDA_VISIBLE_DEVICES takes, a name and memory of its own."""
    found = listed(driver, STUB_GPUS="2", STUB_SLICES="3", STUB_MEMORY="85899345920")
    assert [device[2] for device in found] == [f"MIG-stub{gpu}-{part}" for gpu in (0, 1) for part in (0, 1, 2)]
    assert {(device[0], device[3], device[6]) for device in found} == {(f"{H100} MIG 1g.10gb", 10 << 30, True)}
    assert [device[4] for device in found] == ["0000:10:00.0"] * 3 + ["0000:11:00.0"] * 3
    (one,) = listed(driver, STUB_GPUS="2", STUB_SLICES="3", CUDA_VISIBLE_DEVICES="MIG-stub1-2")
    assert one[2] == "MIG-stub1-2"


def test_ranks_of_this_machine_are_its_devices_whatever_its_cores(driver: Path) -> None:
    cores = local_ranks(LocalTarget(device="cpu"), 1)
    assert python_with_gpus(driver, COUNT, STUB_GPUS="16") == f"16 4 3 {cores}"
    assert python_with_gpus(driver, COUNT, STUB_GPUS="8").split()[:3] == ["8", "4", "3"]


def test_without_nvml_the_drivers_files_are_read(tmp_path: Path) -> None:
    for bus in ("3b", "af"):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:{bus}:00.0"
        folder.mkdir(parents=True)
        # As NVIDIA's module writes it, kernel-open/nvidia/nv-procfs.c.
        (folder / "information").write_text(
            "Model: \t\t NVIDIA A10G\nIRQ:   \t\t 77\nGPU UUID: \t GPU-1-" + bus + "\nBus Location: \t 0000:3b:00.0\n"
        )
    first, second = local_accelerators({}, tmp_path)
    assert (first.name, first.pci, first.uuid) == ("NVIDIA A10G", "0000:3b:00.0", "GPU-1-3b")
    assert local_accelerators({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == (second,)
    assert local_accelerators({}, tmp_path / "nothing") == ()


def test_amd_gpus_are_nodes_of_the_kernels_topology(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for node, simd in ((0, 0), (1, 1216)):
        bank = nodes / str(node) / "mem_banks/0"
        bank.mkdir(parents=True)
        (nodes / str(node) / "properties").write_text(
            f"cpu_cores_count 0\nsimd_count {simd}\nlocation_id 1280\ndomain 0\n"
        )
        (bank / "properties").write_text("heap_type 1\nsize_in_bytes 206141652992\nflags 0\n")
    device = tmp_path / "sys/bus/pci/devices/0000:05:00.0"
    device.mkdir(parents=True)
    (device / "product_name").write_text("AMD Instinct MI300X OAM\n")
    (found,) = local_accelerators({}, tmp_path)
    assert (found.kind, found.name, found.pci) == ("rocm", "AMD Instinct MI300X OAM", "0000:05:00.0")
    assert found.memory_bytes == 206141652992 and free_memory_bytes([found], tmp_path) is None
    for name, size in (("total", 206141652992), ("used", 6141652992)):
        (device / f"mem_info_vram_{name}").write_text(f"{size}\n")
    assert free_memory_bytes([found], tmp_path) == 200_000_000_000
    assert local_accelerators({"HIP_VISIBLE_DEVICES": ""}, tmp_path) == ()


def test_amd_gpus_are_left_to_a_process_by_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [LocalAccelerator("MI300X", kind="rocm", pci=str(number)) for number in range(8)]
    monkeypatch.setattr(accelerators, "_from_nvml", lambda: gpus)
    for given, expected in (({}, "2,3"), ({"HIP_VISIBLE_DEVICES": "4, 5,6 ,7"}, "6,7")):
        assert variables_for(2, 2, given)["HIP_VISIBLE_DEVICES"] == expected


def test_a_job_has_the_amd_gpus_that_its_scheduler_leaves_it(tmp_path: Path) -> None:
    """Slurm sets ROCR_VISIBLE_DEVICES; all GPUs of the node were counted, and ranks started for those of others."""
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for node in range(4):
        (nodes / str(node)).mkdir(parents=True)
        (nodes / str(node) / "properties").write_text(f"simd_count 1216\nlocation_id {node << 8}\ndomain 0\n")

    def buses(**variables: str) -> list[str | None]:
        return [found.pci and found.pci[5:7] for found in local_accelerators(variables, tmp_path)]

    assert buses() == ["00", "01", "02", "03"]
    assert buses(ROCR_VISIBLE_DEVICES="2,3") == ["02", "03"]
    assert buses(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="1") == ["03"]  # HIP counts what is left
    assert buses(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="2") == []
    assert buses(ROCR_VISIBLE_DEVICES="") == []
    assert buses(ROCR_VISIBLE_DEVICES="GPU-0123456789ABCDEF") == ["00", "01", "02", "03"]  # not known here


def test_a_build_of_torch_for_other_devices_is_named() -> None:
    gpus, amd = [LocalAccelerator(name="NVIDIA A10G")] * 2, [LocalAccelerator(name="MI300X", kind="rocm")]
    assert unusable_reason(gpus, "2.13.0+cpu") == "torch 2.13.0+cpu cannot use 2 x NVIDIA A10G"
    assert unusable_reason(gpus, "2.13.0+rocm7.1") == "torch 2.13.0+rocm7.1 cannot use 2 x NVIDIA A10G"
    assert unusable_reason(amd, "2.13.0+cu130") == "torch 2.13.0+cu130 cannot use 1 x MI300X"
    usable = ((gpus, "2.13.0+cu130"), (gpus, "2.13.0"), (gpus, "2.14.0a0+git12ab"), (amd, "2.13.0+rocm7.1"))
    for devices, version in (*usable, ([], "2.13.0+cpu"), (gpus, None)):
        assert unusable_reason(devices, version) is None


def test_the_cores_near_a_device_are_those_of_its_numa_node(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (device / "local_cpulist").write_text("8-11,24\n")
    assert numa_node("0000:3b:00.0", tmp_path) == (1, frozenset({8, 9, 10, 11, 24}))
    assert numa_node("0000:af:00.0", tmp_path) is None and numa_node(None, tmp_path) is None
    (device / "numa_node").write_text("-1\n")
    assert numa_node("0000:3b:00.0", tmp_path) is None
    assert cores_of("") == frozenset()


def test_a_machine_of_devices_has_their_memory(tmp_path: Path) -> None:
    here = local_machine(tmp_path).estimate
    machine = machine_of_devices([LocalAccelerator(name=H100, memory_bytes=123)] * 2, 2, here.host_memory_bytes)
    assert (machine.accelerator.kind, machine.accelerators, machine.accelerator.memory_bytes) == ("cuda", 2, 123)
    with pytest.raises(ValueError, match=r"^3 ranks, but this machine has 2 x NVIDIA H100"):
        machine_of_devices([LocalAccelerator(name=H100)] * 2, 3, None)
    assert device_text([]) == ""


def test_ranks_of_different_gpus_count_as_the_slowest_with_the_least_memory() -> None:
    """A workstation with two cards: the second was taken for the first, and cells that do not fit it for fitting."""
    cards = [LocalAccelerator(name="NVIDIA GeForce RTX 4090", memory_bytes=25 << 30),
             LocalAccelerator(name="NVIDIA GeForce RTX 2080 Ti", memory_bytes=11 << 30)]  # fmt: skip
    for order in (cards, cards[::-1]):
        both = machine_of_devices(order, 2, None)
        assert (both.accelerator.name, both.accelerator.memory_bytes) == ("rtx2080ti", 11 << 30)
        first = machine_of_devices(order, 1, None).accelerator
        assert first.memory_bytes == order[0].memory_bytes and first.title.startswith(order[0].name)
