"""The accelerators of this machine as their drivers list them: GPUs, and the slices of GPUs that are divided (MIG).

    found = local_accelerators()            # those that a process with this environment would see
    free_memory_bytes(found)                # what other processes leave of the fullest of them
    variables_for(4, 2)                     # of a process that is to see two of them alone, from the fifth on
    unusable_reason(found, torch_version)   # None, or why this build of torch cannot compute on them

NVIDIA's are asked of NVML (nvidia-ml-py), or listed under /proc/driver/nvidia where the library is missing; AMD's are
nodes of the kernel's driver (/sys/class/kfd/kfd/topology, drivers/gpu/drm/amd/amdkfd/kfd_topology.c). Imports no torch.

A process sees the devices that CUDA_VISIBLE_DEVICES leaves, in its order: indices or UUIDs, the list ends at the first
that is none (CUDA C++ Programming Guide, "CUDA Environment Variables"). Indices count in the order of the PCI bus, as
nvidia-smi's do; ranks are started with CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA counts alike. On AMD's,
ROCR_VISIBLE_DEVICES, which Slurm sets, comes first, and HIP's indices count what it leaves (ROCm, "GPU isolation
techniques").
"""

import ctypes
import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.common.files.reading import read_text

DriverKind = Literal["cuda", "rocm"]
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
_VISIBLE = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
_FEATURE_BYTES = 1 << 16
_MIG_ENABLED = 1  # nvml.h, NVML_DEVICE_MIG_ENABLE


@dataclass(frozen=True)
class LocalAccelerator:
    """One device that a rank can have. Unknown is None. pci: address as under /sys/bus/pci/devices, of a slice's GPU.

    capability: CUDA's compute capability, (major, minor).
    """

    name: str
    kind: DriverKind = "cuda"
    uuid: str | None = None
    memory_bytes: int | None = None
    pci: str | None = None
    capability: tuple[int, int] | None = None
    is_slice: bool = False


def local_accelerators(
    environment: Mapping[str, str] | None = None, root: Path = Path("/")
) -> tuple[LocalAccelerator, ...]:
    """Return the devices that a process with this environment (None: the own one) sees; none without a driver."""
    variables = os.environ if environment is None else environment
    found = _from_nvml() if root == Path("/") else None
    if found is None:
        found = tuple(_from_proc(root))
    return _visible(found or tuple(_from_kfd(root)), variables)


def variables_for(
    first: int, count: int, environment: Mapping[str, str] | None = None, by_place: bool = False
) -> dict[str, str]:
    """Return the variables with which a process sees `count` of the visible devices alone, from place `first` on.

    None at all where there are fewer: such a process says itself what it lacks. environment: None: the own one.
    by_place: the devices' places and not their UUIDs, which not every program reads; slices have UUIDs alone.
    """
    variables = os.environ if environment is None else environment
    devices = local_accelerators(variables)
    own = devices[first : first + count]
    if len(own) < count:
        return {}
    names = _VISIBLE[own[0].kind]
    uuids = [device.uuid for device in own if device.uuid is not None]
    named = not by_place or any(device.is_slice for device in own)  # slices have no indices
    if named and own[0].kind == "cuda" and len(uuids) == count:
        return {names[0]: ",".join(uuids)}
    listed = next((variables[name] for name in names if name in variables), None)
    items = [str(place) for place in range(len(devices))] if listed is None else listed.split(",")
    return DEVICE_ORDER | {names[0]: ",".join(item.strip() for item in items[first : first + count])}


def free_memory_bytes(devices: Sequence[LocalAccelerator], root: Path = Path("/")) -> int | None:
    """Return what is free now on the device that has least, as other processes may have some; None: unknown."""
    found = [_free_by_nvml(one) if one.kind == "cuda" else _free_by_amdgpu(one, root) for one in devices]
    return min((free for free in found if free is not None), default=None)


def _free_by_nvml(device: LocalAccelerator) -> int | None:
    nvml = _nvml()
    if nvml is None or device.uuid is None:
        return None
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(device.uuid)).free)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _free_by_amdgpu(device: LocalAccelerator, root: Path) -> int | None:
    """By the files of its driver (Documentation/gpu/amdgpu/driver-misc.rst, "GPU Memory Usage Information")."""
    folder = root / "sys/bus/pci/devices" / (device.pci or "none")
    try:
        total, used = (int(read_text(folder / f"mem_info_vram_{one}", _FEATURE_BYTES)) for one in ("total", "used"))
    except (OSError, ValueError):
        return None
    return max(0, total - used)


def unusable_reason(devices: Sequence[LocalAccelerator], torch_version: str | None) -> str | None:
    """Return why a build of torch cannot compute on the devices; None if it can, or its version does not tell.

    Wheels name what they were built for after a plus sign: 2.13.0+cpu, +cu130, +rocm7.1, +xpu.
    """
    if not devices or torch_version is None:
        return None
    built = re.match(r"[a-z]*", torch_version.partition("+")[2])
    build = {"cu": "cuda"}.get(built[0], built[0]) if built else ""
    if build not in ("cpu", "cuda", "rocm", "xpu") or build == devices[0].kind:
        return None
    return f"torch {torch_version} cannot use {device_text(devices)}"


def device_text(devices: Sequence[LocalAccelerator]) -> str:
    """`8 x NVIDIA H100 80GB HBM3`; several names in the order of the devices."""
    names = dict.fromkeys(device.name for device in devices)
    return ", ".join(f"{sum(device.name == name for device in devices)} x {name}" for name in names)


def numa_node(pci: str | None, root: Path = Path("/")) -> tuple[int, frozenset[int]] | None:
    """Return the NUMA node of a PCI device and the cores near it.

    None if the machine does not say: one node only, a virtual machine, or no such device
    (Documentation/ABI/testing/sysfs-bus-pci: numa_node is -1 where it is unknown).
    """
    if pci is None:
        return None
    folder = root / "sys/bus/pci/devices" / pci
    try:
        node = int(read_text(folder / "numa_node", _FEATURE_BYTES))
        cores = cores_of(read_text(folder / "local_cpulist", _FEATURE_BYTES))
    except (OSError, ValueError):
        return None
    return (node, cores) if node >= 0 and cores else None


def cores_of(text: str) -> frozenset[int]:
    """Return the cores of a list as the kernel writes it: `0-3,8` is 0, 1, 2, 3 and 8. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if part:
            found |= set(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def _nvml() -> Any:
    """Return NVIDIA's library, which is to be shut down; None if it or the driver is missing."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # its absence costs nothing; the client's import 45 ms
        nvml: Any = importlib.import_module("pynvml")
    except (OSError, ImportError):
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _from_nvml() -> tuple[LocalAccelerator, ...] | None:
    """Return NVIDIA's devices; None if the library or the driver is missing."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(device for handle in handles for device in _nvml_devices(nvml, handle))
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _nvml_devices(nvml: Any, handle: Any) -> Iterator[LocalAccelerator]:
    """Yield a GPU, or its slices if it is divided: CUDA does not offer a divided GPU as a whole (MIG User Guide)."""

    def asked(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(*arguments)
        except nvml.NVMLError:
            return None

    info = asked("nvmlDeviceGetPciInfo", handle)
    # NVML writes a domain of eight digits in capitals, the kernel one of four: 00000000:3B:00.0 -> 0000:3b:00.0.
    pci = info and str(info.busId).lower().removeprefix("0000")
    mode = asked("nvmlDeviceGetMigMode", handle)
    divided = mode is not None and mode[0] == _MIG_ENABLED
    slices = range(asked("nvmlDeviceGetMaxMigDeviceCount", handle) or 0) if divided else ()
    places = [place for index in slices if (place := asked("nvmlDeviceGetMigDeviceHandleByIndex", handle, index))]
    for place in places if divided else [handle]:
        memory = asked("nvmlDeviceGetMemoryInfo", place)
        capability = asked("nvmlDeviceGetCudaComputeCapability", handle)
        yield LocalAccelerator(
            name=asked("nvmlDeviceGetName", place) or asked("nvmlDeviceGetName", handle) or "NVIDIA GPU",
            uuid=asked("nvmlDeviceGetUUID", place),
            memory_bytes=None if memory is None else int(memory.total),
            pci=pci,
            capability=None if capability is None else (int(capability[0]), int(capability[1])),
            is_slice=divided,
        )


def _from_proc(root: Path) -> Iterator[LocalAccelerator]:
    """Yield the GPUs that NVIDIA's kernel module lists; it knows no slices."""
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError, ValueError):
            fields = dict(re.findall(r"^([^:\n]+):\s*(.*\S)", read_text(path, _FEATURE_BYTES), re.MULTILINE))
            if "Model" in fields:
                yield LocalAccelerator(name=fields["Model"], uuid=fields.get("GPU UUID"), pci=path.parent.name)


def _from_kfd(root: Path) -> Iterator[LocalAccelerator]:
    """Yield AMD's GPUs: nodes of the topology with SIMD units."""
    nodes = [path for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*") if path.name.isdigit()]
    for node in sorted(nodes, key=lambda path: int(path.name)):
        properties = _properties(node / "properties")
        if not properties.get("simd_count"):
            continue
        place = properties.get("location_id", 0)
        pci = f"{properties.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
        banks = [_properties(path) for path in node.glob("mem_banks/*/properties")]
        name = "AMD GPU"
        with suppress(OSError, ValueError):
            name = read_text(root / "sys/bus/pci/devices" / pci / "product_name", _FEATURE_BYTES).strip() or name
        memory = sum(bank.get("size_in_bytes", 0) for bank in banks)
        yield LocalAccelerator(name=name, kind="rocm", memory_bytes=memory or None, pci=pci)


def _properties(path: Path) -> dict[str, int]:
    try:
        lines = read_text(path, _FEATURE_BYTES).splitlines()
    except (OSError, ValueError):
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _visible(devices: Sequence[LocalAccelerator], variables: Mapping[str, str]) -> tuple[LocalAccelerator, ...]:
    """Return what the variables leave, in their order."""
    if not devices:
        return ()
    of_runtime = variables.get("ROCR_VISIBLE_DEVICES")
    # The kernel's topology has no UUIDs as the runtime takes them: a list of such is left to the runtime.
    if devices[0].kind == "rocm" and of_runtime is not None and re.fullmatch(r"[0-9, ]*", of_runtime):
        devices = _listed(devices, of_runtime)
        if not devices:
            return ()
    named = next((variables[name] for name in _VISIBLE[devices[0].kind] if name in variables), None)
    return tuple(devices) if named is None else _listed(devices, named)


def _listed(devices: Sequence[LocalAccelerator], named: str) -> tuple[LocalAccelerator, ...]:
    """Return the devices of a list, in its order."""
    found: list[LocalAccelerator] = []
    for item in (part.strip() for part in named.split(",")):
        chosen = _named(devices, item)
        if chosen is None or chosen in found:
            break
        found.append(chosen)
    return tuple(found)


def _named(devices: Sequence[LocalAccelerator], item: str) -> LocalAccelerator | None:
    if re.fullmatch(r"[0-9]{1,4}", item):
        return devices[int(item)] if int(item) < len(devices) else None
    alike = [device for device in devices if device.uuid is not None and item and device.uuid.startswith(item)]
    same = [device for device in alike if device.uuid == item]
    return (same or alike)[0] if len(same or alike) == 1 else None
