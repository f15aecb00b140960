"""What `rankwise doctor` looks at: each function asks one part of this machine and says what it found.

Nothing here imports torch or Prefect: torch is asked in a process of its own, a Prefect API over HTTP. Of
credentials only the presence is told, never a value. Every question has a time limit.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

from configs.job import Profiler
from slurm.profilers import why_not

State = Literal["ok", "warning", "missing"]

_SHOWN = ("torch", "prefect", "fastapi", "transformers", "submitit", "huggingface-hub")
_COMMAND_SECONDS = 5.0
_TORCH_SECONDS = 8.0
_CONNECT_SECONDS = 3.0
_GIB = 2**30
_ASK_TORCH = """
import json, torch
import torch.distributed as d
cuda = torch.cuda.is_available()
built = d.is_available()
print(json.dumps({
    "version": torch.__version__, "built_for": torch.version.cuda or torch.version.hip,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "backends": {name: bool(built and getattr(d, f"is_{name}_available")()) for name in ("gloo", "nccl", "mpi")},
    "nccl": list(torch.cuda.nccl.version()) if built and d.is_nccl_available() else None,
}))
"""


@dataclass(frozen=True)
class Check:
    """One finding. `warning`: usable, with a drawback; `missing`: not usable here. `remedy` where there is one."""

    name: str
    state: State
    detail: str
    remedy: str | None = None


def check_python() -> list[Check]:
    """The interpreter."""
    detail = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.release()}"
    return [Check("python", "ok", detail)]


def check_packages(constraints: Path) -> list[Check]:
    """Installed versions against what the project asks for, and against the versions that were tested.

    constraints: the constraints file, which only a source checkout has.
    """
    try:
        lines = importlib.metadata.requires("rankwise") or []
    except importlib.metadata.PackageNotFoundError:
        return [Check("packages", "missing", "rankwise itself is not installed", "run `make study`, which installs it")]
    tested = _pins(constraints)
    needed = [requirement for requirement in map(Requirement, lines) if requirement.marker is None]
    found = [_package(requirement, tested.get(_normal(requirement.name))) for requirement in needed]
    shown = [check for check in found if check.name.removeprefix("package ") in _SHOWN or check.state != "ok"]
    return [*shown, Check("packages", "ok", f"{len(found) - len(shown)} others as required")]


def _package(requirement: Requirement, tested: str | None) -> Check:
    name = f"package {_normal(requirement.name)}"
    repair = "install the versions of constraints.txt again: pip install --constraint constraints.txt --editable ."
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", "not installed", repair)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name, "missing", f"{version}, needed is {requirement.specifier}", repair)
    if tested is not None and not Requirement(f"{requirement.name}=={tested}").specifier.contains(version, True):
        return Check(name, "warning", f"{version}, tested with {tested}", repair)
    return Check(name, "ok", version)


def _pins(constraints: Path) -> dict[str, str]:
    try:
        lines = constraints.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split("#")[0].split(";")[0].strip().partition("==") for line in lines)
    return {_normal(name): version.strip() for name, equals, version in pairs if equals}


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


def check_cores_and_memory() -> list[Check]:
    """What the scheduler and the container let this process have."""
    allowed, whole = len(os.sched_getaffinity(0)), os.cpu_count()
    quota = _cgroup_cores()
    cores = Check("cores", "ok", f"{allowed} of {whole} may be used")
    if quota is not None and quota < allowed:
        detail = f"{cores.detail}, but the container gets the time of {quota:g}"
        cores = Check("cores", "warning", detail, "measure on no more ranks than that, or raise the container's limit")
    memory = psutil.virtual_memory()
    free = memory.available
    limit = _cgroup_number("memory.max")
    note = ""
    if limit is not None and limit < memory.total:
        free = min(free, max(0, limit - (_cgroup_number("memory.current") or 0)))
        note = f", container's limit {limit / _GIB:.1f} GiB"
    detail = f"{free / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free{note}"
    if free < 2 * _GIB:
        return [cores, Check("memory", "warning", detail, "end other programs; the quickstart needs about 2 GiB")]
    return [cores, Check("memory", "ok", detail)]


def _cgroup_cores() -> float | None:
    """Share of cores by the CPU controller: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _cgroup_number(name: str) -> int | None:
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):
        return None


def check_folders(runs: Path, cache: Path) -> list[Check]:
    """Room for records and models, and for what ranks share in memory."""
    found = [_room("run folder", runs, 1), _room("cache folder", cache, 5)]
    shared = Path("/dev/shm")
    if not shared.is_dir():
        remedy = "mount a tmpfs at /dev/shm; NCCL and data loaders share memory there"
        return [*found, Check("shared memory", "warning", "no /dev/shm", remedy)]
    usage = shutil.disk_usage(shared)
    detail = f"{usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free in /dev/shm"
    if usage.free < 512 * 2**20:
        # Containers get 64 MiB: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
        return [*found, Check("shared memory", "warning", detail, "start the container with --shm-size=8g")]
    return [*found, Check("shared memory", "ok", detail)]


def _room(name: str, folder: Path, enough_gib: int) -> Check:
    folder = folder.absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(
            name, "missing", f"{folder}: {there} cannot be written", "name another folder, or change its owner"
        )
    free = shutil.disk_usage(there).free
    detail = f"{free / _GIB:.1f} GiB free in {folder}"
    if free < enough_gib * _GIB:
        return Check(name, "warning", detail, f"free some; below {enough_gib} GiB a large model or run may not fit")
    return Check(name, "ok", detail)


def check_gpus() -> list[Check]:
    """What the NVIDIA driver says: devices, and how they are wired."""
    if shutil.which("nvidia-smi") is None:
        remedy = "nothing, to measure on the CPU; for NVIDIA GPUs install the driver"
        return [Check("gpu", "missing", "no nvidia-smi on PATH", remedy)]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    text, problem = _command(query)
    if problem or not text:
        remedy = "see whether the driver is loaded: nvidia-smi, dmesg | grep -i nvrm"
        return [Check("gpu", "missing", f"nvidia-smi: {problem or 'lists no device'}", remedy)]
    devices = text.splitlines()
    wiring, problem = _command(["nvidia-smi", "topo", "-m"])
    topology = Check("gpu topology", "warning" if problem else "ok", problem or wiring)
    return [Check("gpu", "ok", f"{len(devices)}: {'; '.join(devices)}"), topology]


def check_torch() -> list[Check]:
    """What torch can use, asked in a process of its own."""
    text, problem = _command([sys.executable, "-P", "-W", "ignore", "-c", _ASK_TORCH], _TORCH_SECONDS)
    try:
        answer: dict[str, Any] = json.loads(text.splitlines()[-1]) if not problem else {}
    except (ValueError, IndexError):
        answer, problem = {}, "gave no answer that can be read"
    if problem:
        remedy = "see the whole error: python -c 'import torch, torch.distributed'"
        state: State = "warning" if problem.startswith("no answer") else "missing"
        return [Check("torch", state, problem, remedy)]
    built_for = f"built for {answer['built_for']}" if answer["built_for"] else "built for the CPU only"
    devices = ", ".join(answer["devices"]) or "no GPU usable"
    found = [Check("torch", "ok", f"{answer['version']}, {built_for}, {devices}")]
    if shutil.which("nvidia-smi") and not answer["devices"]:
        remedy = "install the torch build for your driver: https://pytorch.org/get-started/locally"
        found = [Check("torch", "warning", found[0].detail, remedy)]
    remedies = {"gloo": "install torch again", "nccl": "nothing, on the CPU; else a CUDA build of torch"}
    for name, built in answer["backends"].items():
        version = ".".join(map(str, answer["nccl"])) if name == "nccl" and answer["nccl"] else "built in"
        remedy = remedies.get(name, "nothing: Rankwise uses nccl or gloo")
        found.append(
            Check(f"backend {name}", "ok", version)
            if built
            else Check(f"backend {name}", "missing", "not built into this torch", remedy)
        )
    return found


def check_slurm_tool(name: str, arguments: tuple[str, ...]) -> list[Check]:
    """One command of Slurm: whether it is there, and whether its daemon answers it."""
    if shutil.which(name) is None:
        remedy = "nothing, without a cluster; on one, work on a login node or load its Slurm module"
        return [Check(f"slurm {name}", "missing", "not on PATH", remedy)]
    text, problem = _command([name, *arguments])
    if problem:
        daemon = "slurmdbd" if name == "sacct" else "slurmctld"
        return [Check(f"slurm {name}", "warning", problem, f"see whether {daemon} runs and slurm.conf names its host")]
    return [Check(f"slurm {name}", "ok", f"answers ({len(text.splitlines())} lines)")]


def check_tools() -> list[Check]:
    """Compiler and git."""
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    found = []
    for name, command in (("C++ compiler", compiler), ("git", "git" if shutil.which("git") else None)):
        if command is None:
            package = "git" if name == "git" else "build-essential"
            found.append(Check(name, "missing", "not on PATH", f"apt-get install {package}"))
            continue
        text, problem = _command([command, "--version"])
        first = text.splitlines()[0] if text else ""
        found.append(Check(name, "warning" if problem else "ok", problem or first))
    return found


def check_profilers() -> list[Check]:
    """What `measuring.profiler` can name here."""
    found = []
    for name in get_args(Profiler):
        detail, _, remedy = (why_not(name) or "").partition("; ")
        found.append(Check(name, "missing", detail, remedy) if detail else Check(name, "ok", "may be used"))
    return found


def check_master(master: str) -> list[Check]:
    """A TCP connection to the address where rank 0 waits (or another service), within 3 seconds."""
    host, colon, port = master.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return [Check("master", "missing", f"{master!r} is not an address and port", "write it as HOST:PORT")]
    begun = time.monotonic()
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS) as connection:
            passed, own = (time.monotonic() - begun) * 1000, connection.getsockname()[0]
        return [Check("master", "ok", f"{master} accepts connections: {passed:.1f} ms, from {own}")]
    except (socket.gaierror, UnicodeError):
        detail, remedy = "the name is unknown", "check its spelling, use the IP address, or add it to /etc/hosts"
    except ConnectionRefusedError:
        detail = "refused: the host answers, but nothing listens on this port"
        remedy = "start the master first (or `python -m http.server PORT` there, to test the way), and check the port"
    except TimeoutError:
        detail = f"no answer within {_CONNECT_SECONDS:g} s"
        remedy = "open the port in the firewall or security group; check that the host is up"
    except OSError as error:
        detail = f"no route ({error.strerror or error})"
        remedy = "check that both machines are in one network, or that a route or VPN joins theirs"
    return [Check("master", "missing", f"{master}: {detail}", remedy)]


def check_credentials() -> list[Check]:
    """Which credentials are present. Values are neither read further nor shown."""
    set_names = {name for name, value in os.environ.items() if value}
    home = Path.home()
    hub = Check("credentials hub", "missing", "HF_TOKEN is not set", "nothing, for public models; else export HF_TOKEN")
    if "HF_TOKEN" in set_names:
        hub = Check("credentials hub", "ok", "HF_TOKEN is set")
    return [hub, _aws(set_names, home), _google(set_names, home), _azure(set_names, home)]


def _aws(set_names: set[str], home: Path) -> Check:
    pair = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    files = [
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"),
        home / ".aws" / "config",
    ]
    if pair <= set_names:
        return Check("credentials aws", "ok", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are set")
    if pair & set_names:
        absent = (pair - set_names).pop()
        return Check("credentials aws", "warning", f"{absent} is not set, its partner is", "set both, or neither")
    if any(path.is_file() for path in files):
        return Check("credentials aws", "ok", "a file of the AWS command line is there")
    return Check("credentials aws", "missing", "none", "nothing, without AWS; else `aws configure`")


def _google(set_names: set[str], home: Path) -> Check:
    name = "GOOGLE_APPLICATION_CREDENTIALS"
    if name in set_names:
        if Path(os.environ[name]).is_file():
            return Check("credentials google", "ok", f"the file that {name} names is there")
        return Check("credentials google", "warning", f"the file that {name} names is not there", f"correct {name}")
    if (home / ".config" / "gcloud" / "application_default_credentials.json").is_file():
        return Check("credentials google", "ok", "application default credentials are there")
    remedy = "nothing, without Google Cloud; else `gcloud auth application-default login`"
    return Check("credentials google", "missing", "none", remedy)


def _azure(set_names: set[str], home: Path) -> Check:
    needed = ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET")
    absent = [name for name in needed if name not in set_names]
    if not absent:
        return Check("credentials azure", "ok", f"{', '.join(needed)} are set")
    if (home / ".azure" / "azureProfile.json").is_file():
        return Check("credentials azure", "ok", "the profile of the Azure command line is there")
    if len(absent) < len(needed):
        detail = f"{', '.join(absent)} not set"
        return Check("credentials azure", "warning", detail, f"set all of {', '.join(needed)}, or `az login`")
    return Check("credentials azure", "missing", "none", "nothing, without Azure; else `az login`")


def check_prefect_api() -> list[Check]:
    """The Prefect API that the user chose, and whether it answers."""
    from flows.prefect_settings import api_named_by_environment

    try:
        url = api_named_by_environment()
    except ValueError as error:
        return [Check("prefect api", "missing", str(error), "repair the file, or set PREFECT_API_URL")]
    if url is None:
        return [Check("prefect api", "ok", "none named: Rankwise starts a local one when it runs a study")]
    try:
        parts = urlsplit(url)
        # A user and password in the address are not for the screen.
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
        health = parts._replace(path=parts.path.split("/api")[0] + "/api/health", query="").geturl()
        with urllib.request.urlopen(health, timeout=_CONNECT_SECONDS) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500:
            return [Check("prefect api", "ok", f"{shown} answers (HTTP {error.code} to a stranger)")]
        status = error.code
    except ValueError:
        return [Check("prefect api", "missing", "its address is not a URL", "write it as http://HOST:PORT/api")]
    except OSError as error:
        reason = getattr(error, "reason", error)
        remedy = "start it (`prefect server start`), correct PREFECT_API_URL, or unset it to use a local one"
        return [Check("prefect api", "missing", f"{shown} does not answer ({reason})", remedy)]
    if status >= 500:
        return [Check("prefect api", "warning", f"{shown} answers HTTP {status}", "see the log of that server")]
    return [Check("prefect api", "ok", f"{shown} answers")]


def _command(argv: list[str], seconds: float | None = None) -> tuple[str, str | None]:
    """Output of a command, and what went wrong (None: nothing)."""
    seconds = seconds or _COMMAND_SECONDS
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(argv, **streams, text=True, errors="replace", start_new_session=True)
    except OSError as error:
        return "", f"cannot be started ({error.strerror or error})"
    with process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # With its children: they hold the pipe, and waiting for its end would have no limit.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "", f"no answer within {seconds:g} s"
    if process.returncode != 0:
        last = (errors.strip() or output.strip()).splitlines()
        return output, f"failed with exit code {process.returncode}{': ' + last[-1][:300] if last else ''}"
    return output.rstrip(), None
