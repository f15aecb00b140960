"""Checks of what only some studies need: DeepSpeed, kernels, ONNX, live streams, ROCm, InfiniBand, network buffers.

Like `flows.cli.doctor.checks`: nothing large is imported, and every problem has a remedy. `system`: the root of /sys,
/proc and /dev, other than / in tests.
"""

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from configs.common.printable import significant
from configs.common.system.versions import version_of
from configs.spec.measuring import LIVE_LIBRARIES
from flows.cli.doctor.checks import DoctorCheck, run_command

ROOT = Path("/")
WANTED_BUFFER_BYTES = 16 << 20
"""Holds 10 Gbit/s over a round trip of 13 ms, or 100 Gbit/s over 1.3 ms (bandwidth-delay product); fasterdata.es.net
advises 16 MiB or more for 10 Gbit/s and above.
"""
_DEFAULT_NCCL_BUFFER_BYTES = 4 << 20  # NCCL's user guide, NCCL_BUFFSIZE
_KERNELS_SECONDS = 25.0
"""To compile takes 4 s, and several times as long on a busy machine."""
_ASK_KERNELS = """
from pathlib import Path
import engine.kernels.build as build
own = Path(build.__file__).parent
wanted = ((own / "linear.c",), (own / "rows.c", "-ffp-contract=off"), (own.parent / "parallel" / "shared_memory.c",))
for source, *flags in wanted:
    if build.load_library(source, *flags) is None:
        print(build.unavailable_reason())
        break
"""
"""An old compiler takes some sources and not others. These need all that the rest needs, which takes longer."""


def check_deepspeed() -> list[DoctorCheck]:
    """Check DeepSpeed, for ZeRO strategies and the engine of its name, and what compiles its operators."""
    version, absent = _versions(["deepspeed"])
    if absent:
        remedy = "not needed without strategies zero1 to zero3 and engine deepspeed; else pip install deepspeed"
        return [DoctorCheck("deepspeed", "missing", "not installed", remedy)]
    lacking = [tool for tool in ("c++", "ninja") if shutil.which(tool) is None]
    if lacking:
        detail = f"{version}, but {' and '.join(lacking)} not on PATH: its operators are compiled at first use"
        remedy = "apt-get install build-essential; pip install ninja (offload nvme also needs libaio-dev)"
        return [DoctorCheck("deepspeed", "warning", detail, remedy)]
    return [DoctorCheck("deepspeed", "ok", f"{version}, with a compiler for its operators")]


def check_kernels() -> list[DoctorCheck]:
    """Compile the engine's kernels for CPUs, where they are not yet, and load them, as a rank does."""
    reason, problem = run_command([sys.executable, "-P", "-W", "ignore", "-c", _ASK_KERNELS], _KERNELS_SECONDS)
    if not reason and not problem:
        return [DoctorCheck("CPU kernels", "ok", "compiled for this processor")]
    why = problem or reason
    remedies = {
        "RANKWISE_KERNELS": "unset it",
        "XDG_CACHE_HOME": "export XDG_CACHE_HOME=FOLDER",
        "written for": "none here",
    }
    remedy = next((known for word, known in remedies.items() if word in why), "apt-get install gcc, or set CC")
    return [DoctorCheck("CPU kernels", "warning", f"torch computes instead, more slowly: {why}", remedy)]


def check_onnx() -> list[DoctorCheck]:
    """Check the libraries of engine onnxruntime and of `rankwise export`."""
    versions, absent = _versions(["onnx", "onnxruntime", "onnxscript"])
    if absent:
        remedy = "not needed without engine onnxruntime and `rankwise export`; else pip install 'rankwise[onnx]'"
        return [DoctorCheck("onnx", "missing", f"{', '.join(absent)} not installed", remedy)]
    return [DoctorCheck("onnx", "ok", versions)]


def check_live() -> list[DoctorCheck]:
    """Check the libraries of each live stream."""
    found = []
    for sink, libraries in LIVE_LIBRARIES.items():
        versions, absent = _versions(libraries)
        if absent:
            remedy = f"not needed without `live: [{sink}]`; else pip install 'rankwise[{sink}]'"
            found.append(DoctorCheck(f"live {sink}", "missing", f"{', '.join(absent)} not installed", remedy))
        else:
            found.append(DoctorCheck(f"live {sink}", "ok", versions))
    return found


def check_rocm(root: Path = ROOT) -> list[DoctorCheck]:
    """Check AMD's driver, the permission to use it, and the build of torch."""
    device = root / "dev" / "kfd"
    if not device.exists():
        return [DoctorCheck("rocm", "missing", "no AMD GPU driver (/dev/kfd)", "not needed without AMD GPUs")]
    if not os.access(device, os.R_OK | os.W_OK):
        remedy = "add the user to the groups of the device: usermod -aG render,video $USER, then log in again"
        return [DoctorCheck("rocm", "warning", "/dev/kfd is there, but not accessible to this user", remedy)]
    torch, absent = _versions(["torch"])
    if absent or "+rocm" not in torch:
        remedy = "install the ROCm build of torch: https://pytorch.org/get-started/locally"
        return [DoctorCheck("rocm", "warning", f"AMD GPU driver found, but torch is {torch or 'missing'}", remedy)]
    return [DoctorCheck("rocm", "ok", f"AMD GPU driver and torch {torch}")]


def check_infiniband(root: Path = ROOT) -> list[DoctorCheck]:
    """Check InfiniBand ports against NCCL_IB_DISABLE."""
    ports = sorted((root / "sys" / "class" / "infiniband").glob("*/ports/*/state"))
    active = [path.parts[-4] for path in ports if "ACTIVE" in path.read_text()]
    disabled = os.environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    if disabled and active:
        detail = f"NCCL_IB_DISABLE is set, but {', '.join(active)} is active: NCCL would use TCP"
        return [DoctorCheck("infiniband", "warning", detail, "unset NCCL_IB_DISABLE, also in `env` of the target")]
    if disabled:
        return [DoctorCheck("infiniband", "ok", "no active port, and NCCL_IB_DISABLE is set")]
    if active:
        return [DoctorCheck("infiniband", "ok", f"{', '.join(active)} active")]
    if ports:
        remedy = "check cable and subnet manager (ibstat); or export NCCL_IB_DISABLE=1 to use TCP"
        return [DoctorCheck("infiniband", "warning", "devices found, but no port is active", remedy)]
    remedy = "not needed: NCCL uses TCP. If it stalls at its start, export NCCL_IB_DISABLE=1"
    return [DoctorCheck("infiniband", "missing", "no device", remedy)]


def check_buffers(root: Path = ROOT) -> list[DoctorCheck]:
    """Check the kernel's limits of socket buffers, and NCCL_BUFFSIZE."""
    limits = {
        "net.core.rmem_max": root / "proc/sys/net/core/rmem_max",
        "net.core.wmem_max": root / "proc/sys/net/core/wmem_max",
        "net.ipv4.tcp_rmem": root / "proc/sys/net/ipv4/tcp_rmem",
        "net.ipv4.tcp_wmem": root / "proc/sys/net/ipv4/tcp_wmem",
    }
    sizes: dict[str, int] = {}
    for name, path in limits.items():
        try:
            sizes[name] = int(path.read_text().split()[-1])  # of minimum, default and maximum
        except (OSError, ValueError, IndexError):
            continue  # not visible in this container
    return [_sockets(sizes), _nccl_buffer()]


def _sockets(sizes: dict[str, int]) -> DoctorCheck:
    if not sizes:
        remedy = "look at `sysctl net.core.rmem_max net.core.wmem_max` on the host"
        return DoctorCheck("socket buffers", "warning", "limits not visible here", remedy)
    small = [name for name, size in sizes.items() if size < WANTED_BUFFER_BYTES]
    shown = ", ".join(f"{name} {significant(size / 2**20)} MiB" for name, size in sizes.items())
    if not small:
        return DoctorCheck("socket buffers", "ok", shown)
    settings = " ".join(_setting(name) for name in small)
    remedy = f"not needed on one node; between nodes on 10 Gbit/s or more: sysctl -w {settings}"
    return DoctorCheck("socket buffers", "warning", shown, remedy)


def _setting(name: str) -> str:
    if name.endswith("_max"):
        return f"{name}={WANTED_BUFFER_BYTES}"
    return f"{name}='4096 {87380 if name.endswith('rmem') else 65536} {WANTED_BUFFER_BYTES}'"


def _nccl_buffer() -> DoctorCheck:
    given = os.environ.get("NCCL_BUFFSIZE")
    if given is None:
        return DoctorCheck("NCCL_BUFFSIZE", "ok", "not set: 4 MiB, NCCL's default")
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        detail, remedy = f"got {given[:40]!r}, expected bytes", "unset it, or set a number such as 8388608"
        return DoctorCheck("NCCL_BUFFSIZE", "warning", detail, remedy)
    if int(given) < _DEFAULT_NCCL_BUFFER_BYTES:
        remedy = "unset it, or set 4194304 or more, unless GPU memory is short"
        return DoctorCheck("NCCL_BUFFSIZE", "warning", f"{int(given):,} bytes, less than the default", remedy)
    return DoctorCheck("NCCL_BUFFSIZE", "ok", f"{int(given):,} bytes")


def _versions(names: Iterable[str]) -> tuple[str, list[str]]:
    """Return the versions of installed distributions as text, and the names of absent ones."""
    versions = {name: version_of(name) for name in names}
    found = [f"{name} {version}" for name, version in versions.items() if version is not None]
    return ", ".join(found), [name for name, version in versions.items() if version is None]
