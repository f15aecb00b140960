"""Checks of GPUs and of torch's build for them: the makers' tools are asked, torch is in a process of its own.

    check_nvidia(), check_amd(), check_intel()      # nvidia-smi; amd-smi, else rocm-smi; xpu-smi
    check_torch()                                   # its build against what these list

A build of torch computes on the GPUs of one maker: CUDA on NVIDIA's, ROCm on AMD's, XPU on Intel's.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from flows.cli.doctor.checks import CheckState, DoctorCheck, run_command

Maker = Literal["NVIDIA", "AMD", "Intel"]
_BUILD_OF: dict[Maker, str] = {"NVIDIA": "CUDA", "AMD": "ROCm", "Intel": "XPU"}
_TORCH_SECONDS = 25.0
"""Its import takes 2 s, and 10 s on a busy machine."""
_TOOL_SECONDS = 15.0
"""For a maker's tool to list the devices: without persistence mode the driver wakes each of them first."""
_SELECTOR = "https://pytorch.org/get-started/locally"
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the first branch of the driver that runs it (CUDA Toolkit release notes, "CUDA Toolkit and
Minimum Required Driver Version for CUDA Minor Version Compatibility")."""
_ASK_TORCH = """
import json, torch
import torch.distributed as d
cuda, xpu = torch.cuda.is_available(), hasattr(torch, "xpu") and torch.xpu.is_available()
built, gpus = d.is_available(), range(torch.cuda.device_count()) if cuda else ()
print(json.dumps({
    "version": torch.__version__, "CUDA": torch.version.cuda, "ROCm": torch.version.hip,
    "XPU": getattr(torch.version, "xpu", None),
    "devices": [torch.cuda.get_device_name(i) for i in gpus] if cuda
        else [torch.xpu.get_device_name(i) for i in range(torch.xpu.device_count())] if xpu else [],
    "capabilities": [torch.cuda.get_device_capability(i) for i in gpus] if torch.version.hip is None else [],
    "kernels": torch.cuda.get_arch_list() if cuda else [],
    "backends": {name: bool(built and getattr(d, f"is_{name}_available")()) for name in ("gloo", "nccl", "mpi")},
    "nccl": list(torch.cuda.nccl.version()) if built and d.is_nccl_available() else None,
    "bfloat16": torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
}))
"""


@dataclass(frozen=True)
class ListedGpus:
    """What a maker's tool says. problem: why it lists nothing; names with memory where it gives one; driver's version.

    tool: None if there is none on PATH.
    """

    tool: str | None
    names: tuple[str, ...] = ()
    driver: str | None = None
    problem: str | None = None

    @property
    def text(self) -> str:
        """`2: AMD Instinct MI300X, 191 GiB; AMD Instinct MI300X, 191 GiB; driver 6.10.5`."""
        parts = [*self.names, *([f"driver {self.driver}"] if self.driver else [])]
        return f"{len(self.names)}: {'; '.join(parts)}"


def check_nvidia() -> list[DoctorCheck]:
    """Check NVIDIA's driver: devices, slices and topology."""
    found = nvidia_gpus()
    if found.tool is None:
        remedy = "not needed to measure on the CPU; for NVIDIA GPUs install the driver"
        return [DoctorCheck("gpu nvidia", "missing", "no nvidia-smi on PATH", remedy)]
    if not found.names:
        slow = "nvidia-smi -pm 1 (persistence mode) lets it answer sooner; on a busy machine run it again"
        return [_unlisted("gpu nvidia", found, "nvidia-smi, dmesg | grep -i nvrm", slow)]
    checks = [DoctorCheck("gpu nvidia", "ok", found.text)]
    listing, problem = run_command(["nvidia-smi", "-L"])
    slices = [] if problem else re.findall(r"^\s+MIG (\S+)\s", listing, re.MULTILINE)
    if slices:
        checks.append(
            DoctorCheck("gpu slices", "ok", f"{len(slices)} MIG devices, each for one rank: {_counted(slices)}")
        )
    wiring, problem = run_command(["nvidia-smi", "topo", "-m"])
    return [*checks, DoctorCheck("gpu topology", "warning" if problem else "ok", problem or wiring)]


def check_amd() -> list[DoctorCheck]:
    """Check AMD's driver by amd-smi, or by its predecessor."""
    found = amd_gpus()
    if found.tool is None:
        return [DoctorCheck("gpu amd", "missing", "no amd-smi or rocm-smi on PATH", "not needed without AMD GPUs")]
    if not found.names:
        return [_unlisted("gpu amd", found, "lsmod | grep amdgpu, dmesg | grep -i amdgpu")]
    return [DoctorCheck("gpu amd", "ok", f"{found.text} ({found.tool})")]


def check_intel() -> list[DoctorCheck]:
    """Check Intel's driver; this version computes on no Intel GPU, and says so."""
    found = intel_gpus()
    if found.tool is None:
        return [DoctorCheck("gpu intel", "missing", "no xpu-smi on PATH", "not needed without Intel GPUs")]
    if not found.names:
        return [_unlisted("gpu intel", found, "lsmod | grep -e xe -e i915, and the package of Level Zero")]
    remedy = "not measured by this version: ranks compute on the cores of this machine"
    return [DoctorCheck("gpu intel", "warning", found.text, remedy)]


def _unlisted(name: str, found: ListedGpus, look: str, slow: str = "on a busy machine run it again") -> DoctorCheck:
    """Why a maker's tool lists no device. One that is slow says nothing of the driver."""
    late = (found.problem or "").startswith("no response")
    driver = f"check that the driver is loaded: {look}"
    remedy = f"{slow}; else {driver}" if late else driver
    return DoctorCheck(name, "warning" if late else "missing", f"{found.tool}: {found.problem}", remedy)


def nvidia_gpus() -> ListedGpus:
    """Ask nvidia-smi, which prints a line for each GPU."""
    if shutil.which("nvidia-smi") is None:
        return ListedGpus(None)
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    text, problem = run_command(query, _TOOL_SECONDS)
    rows = [line.rsplit(", ", 2) for line in text.splitlines() if line.count(", ") >= 2] if not problem else []
    if not rows:
        return ListedGpus("nvidia-smi", problem=problem or "no device listed")
    return ListedGpus("nvidia-smi", tuple(f"{name}, {memory}" for name, memory, _ in rows), rows[0][2])


def amd_gpus() -> ListedGpus:
    """Ask amd-smi, else rocm-smi, for JSON."""
    tools = {
        "amd-smi": ["static", "--asic", "--vram", "--driver", "--json"],
        "rocm-smi": ["--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json"],
    }
    failed = None
    for tool, arguments in tools.items():
        if shutil.which(tool) is None:
            continue
        data, problem = _json([tool, *arguments])
        found = _of_amd_smi(data) if tool == "amd-smi" else _of_rocm_smi(data)
        if found.names:
            return found
        failed = failed or ListedGpus(tool, problem=problem or "no device listed")
    return failed or ListedGpus(None)


def _of_amd_smi(data: Any) -> ListedGpus:
    """Of a list of devices, which newer versions put under `gpu_data`."""
    rows = [row for row in _rows(data.get("gpu_data") if isinstance(data, dict) else data)]
    names = []
    for row in rows:
        size = _part(_part(row, "vram"), "size")
        memory = f", {size['value']} {size.get('unit', 'MB')}" if isinstance(size.get("value"), int) else ""
        names.append(f"{_part(row, 'asic').get('market_name', 'AMD GPU')}{memory}")
    driver = next((str(version) for row in rows if (version := _part(row, "driver").get("version"))), None)
    return ListedGpus("amd-smi", tuple(names), driver)


def _of_rocm_smi(data: Any) -> ListedGpus:
    """Of an object with `card0`, `card1` and so on, and `system` with the driver."""
    found = data if isinstance(data, dict) else {}
    names = []
    for name, row in found.items():
        if name.startswith("card") and isinstance(row, dict):
            size = str(row.get("VRAM Total Memory (B)", ""))
            memory = f", {int(size) / 2**30:.0f} GiB" if size.isdigit() else ""
            names.append(f"{row.get('Card Series') or row.get('Card series') or 'AMD GPU'}{memory}")
    return ListedGpus("rocm-smi", tuple(names), _part(found, "system").get("Driver version"))


def intel_gpus() -> ListedGpus:
    """Ask xpu-smi for JSON."""
    if shutil.which("xpu-smi") is None:
        return ListedGpus(None)
    data, problem = _json(["xpu-smi", "discovery", "-j"])
    rows = _rows(data.get("device_list")) if isinstance(data, dict) else []
    names = tuple(str(row.get("device_name", "Intel GPU")) for row in rows)
    return ListedGpus("xpu-smi", names, problem=None if names else problem or "no device listed")


def check_torch() -> list[DoctorCheck]:
    """Check torch's devices and backends in a separate process, and its build against the GPUs of this machine."""
    text, problem = run_command([sys.executable, "-P", "-W", "ignore", "-c", _ASK_TORCH], _TORCH_SECONDS)
    try:
        answer: dict[str, Any] = json.loads(text.splitlines()[-1]) if not problem else {}
    except (ValueError, IndexError):
        answer, problem = {}, "printed no valid JSON"
    if problem:
        remedy = "print the complete error: python -c 'import torch, torch.distributed'"
        state: CheckState = "warning" if problem.startswith("no response") else "missing"
        return [DoctorCheck("torch", state, problem, remedy)]
    build = next((name for name in _BUILD_OF.values() if answer[name]), None)
    built_for = f"built for {build} {answer[build]}" if build else "built for the CPU only"
    detail = f"{answer['version']}, {built_for}, {', '.join(answer['devices']) or 'no usable GPU'}"
    wrong = next(_wrong_build(answer, build), None)
    state = "ok" if wrong is None else "warning"
    return [DoctorCheck("torch", state, f"{detail}{f'; {wrong[0]}' if wrong else ''}", wrong[1] if wrong else None),
            *_bfloat16(answer), *_backends(answer)]  # fmt: skip


def _wrong_build(answer: dict[str, Any], build: str | None) -> Iterator[tuple[str, str]]:
    """Yield why torch cannot compute on the GPUs that the tools list, with the remedy."""
    listed: dict[Maker, ListedGpus] = {"NVIDIA": nvidia_gpus(), "AMD": amd_gpus(), "Intel": intel_gpus()}
    there = {maker: found for maker, found in listed.items() if found.names}
    makers = [maker for maker in there if _BUILD_OF[maker] == build]
    reinstall = f"pip install --force-reinstall 'torch=={answer['version'].partition('+')[0]}' --index-url INDEX"
    for maker, found in there.items() if not makers else ():
        if maker != "Intel":  # nothing of ours computes on those
            remedy = f"{reinstall}, with the INDEX that {_SELECTOR} names for {_BUILD_OF[maker]}"
            yield f"this machine has {len(found.names)} {maker} GPU{'s' * (len(found.names) > 1)}", remedy
    if "NVIDIA" in makers and not answer["devices"]:
        driver, wanted = there["NVIDIA"].driver or "", int(str(answer["CUDA"]).partition(".")[0])
        branch, least = driver.partition(".")[0], _LEAST_DRIVER.get(wanted)
        if branch.isdigit() and least is not None and int(branch) < least:
            runs = max((major for major, first in _LEAST_DRIVER.items() if first <= int(branch)), default=None)
            other = f"; or {reinstall}, with the INDEX that {_SELECTOR} names for CUDA {runs}" if runs else ""
            yield (
                f"driver {driver} is too old for CUDA {answer['CUDA']}",
                f"update the driver to {least} or newer{other}",
            )
    if makers and not answer["devices"]:
        remedy = "check CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and the permissions of the devices in /dev"
        yield f"it finds none of {there[makers[0]].text}", remedy
    for name, capability in zip(answer["devices"], answer["capabilities"], strict=False):
        if answer["kernels"] and not _has_kernels(capability, answer["kernels"]):
            held = " ".join(answer["kernels"])
            remedy = f"{reinstall}, with the INDEX of another version of CUDA, or an older torch: {_SELECTOR}"
            yield (
                f"{name} has compute capability {capability[0]}.{capability[1]}, and the build has {held} only",
                remedy,
            )


def _has_kernels(capability: list[int], kernels: list[str]) -> bool:
    """Whether a device runs some of a build's kernels: compiled ones of its own major version up to its minor one, or
    PTX of any before (CUDA C++ Programming Guide, "Compute Capability" and "PTX Compatibility")."""
    own = (capability[0], capability[1])
    for kernel in kernels:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", kernel)
        if match is None:
            continue
        version = int(match[2]), int(match[3])
        if version <= own and (match[1] == "compute" or version[0] == own[0]):
            return True
    return False


def _bfloat16(answer: dict[str, Any]) -> Iterator[DoctorCheck]:
    """Yield how torch computes bfloat16 on the CPU (emulated on a Zen 3: 17 to 80 times as long as float32)."""
    if answer["devices"]:
        return
    if answer["bfloat16"]:
        yield DoctorCheck("bfloat16 on the CPU", "ok", "by instructions of the processor")
        return
    detail = "this processor has no AVX-512 or AMX: torch emulates it, and trains many times slower than in float32"
    remedy = "train in float32 here. Inference is not affected: kernels of ours widen it, where there is a C compiler"
    yield DoctorCheck("bfloat16 on the CPU", "warning", detail, remedy)


def _backends(answer: dict[str, Any]) -> Iterator[DoctorCheck]:
    remedies = {"gloo": "reinstall torch", "nccl": "not needed on the CPU; else a CUDA build of torch"}
    for name, built in answer["backends"].items():
        version = ".".join(map(str, answer["nccl"])) if name == "nccl" and answer["nccl"] else "built in"
        remedy = remedies.get(name, "not needed: Rankwise uses nccl or gloo")
        yield (
            DoctorCheck(f"backend {name}", "ok", version)
            if built
            else DoctorCheck(f"backend {name}", "missing", "not built into this torch", remedy)
        )


def _json(command: list[str]) -> tuple[Any, str | None]:
    text, problem = run_command(command, _TOOL_SECONDS)
    try:
        return (None, problem) if problem else (json.loads(text), None)
    except ValueError:
        return None, "printed no valid JSON"


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _part(row: Any, name: str) -> dict[str, Any]:
    part = row.get(name) if isinstance(row, dict) else None
    return part if isinstance(part, dict) else {}


def _counted(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
