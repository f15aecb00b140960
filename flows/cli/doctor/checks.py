"""Checks of `rankwise doctor`: each function examines one part of this machine.

No module of torch or Prefect is imported here: torch is queried in a separate process, a Prefect API over HTTP.
Only the presence of credentials is reported, never a value. Every check has a time limit.
"""

import http.client
import importlib.metadata
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
from shlex import quote
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

from configs.common.base import expanded
from configs.common.files.reading import read_text
from configs.common.printable import plural
from configs.common.secrets import without_password
from configs.common.system.cores import quota_cores
from configs.common.system.memory import host_memory_available, host_memory_total
from configs.common.system.versions import version_of
from configs.spec.measuring import Profiler
from slurm.launcher.profilers import why_not

CheckState = Literal["ok", "warning", "missing"]

_SHOWN = ("torch", "prefect", "fastapi", "transformers", "submitit", "huggingface-hub")
_COMMAND_SECONDS = 5.0
_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 10.0
"""For a Prefect API: as long as a run waits for each of its answers."""
_GIB = 2**30


@dataclass(frozen=True)
class DoctorCheck:
    """One finding. `warning`: usable, with a drawback; `missing`: not usable here. `remedy` where there is one."""

    name: str
    state: CheckState
    detail: str
    remedy: str | None = None


def check_python() -> list[DoctorCheck]:
    """Check the Python interpreter."""
    detail = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.release()}"
    return [DoctorCheck("python", "ok", detail)]


def check_packages(constraints: Path) -> list[DoctorCheck]:
    """Check installed versions against the requirements and the tested versions.

    constraints: the constraints file.
    """
    try:
        lines = importlib.metadata.requires("rankwise") or []
    except importlib.metadata.PackageNotFoundError:
        return [DoctorCheck("packages", "missing", "rankwise is not installed", "run `make study`, which installs it")]
    tested = _pins(constraints)
    needed = [requirement for requirement in map(Requirement, lines) if requirement.marker is None]
    found = [_package(requirement, tested.get(_normal(requirement.name)), constraints) for requirement in needed]
    shown = [check for check in found if check.name.removeprefix("package ") in _SHOWN or check.state != "ok"]
    return [*shown, DoctorCheck("packages", "ok", f"{len(found) - len(shown)} others as required")]


def _package(requirement: Requirement, tested: str | None, constraints: Path) -> DoctorCheck:
    name = f"package {_normal(requirement.name)}"
    repair = f"install the tested version: pip install --constraint {quote(str(constraints))} '{requirement}'"
    version = version_of(requirement.name)
    if version is None:
        return DoctorCheck(name, "missing", "not installed", repair)
    if not requirement.specifier.contains(version, prereleases=True):
        return DoctorCheck(name, "missing", f"{version}, needed is {requirement.specifier}", repair)
    if tested is not None and not Requirement(f"{requirement.name}=={tested}").specifier.contains(version, True):
        return DoctorCheck(name, "warning", f"{version}, tested with {tested}", repair)
    return DoctorCheck(name, "ok", version)


def _pins(constraints: Path) -> dict[str, str]:
    try:
        lines = read_text(constraints).splitlines()
    except OSError:
        return {}
    pairs = (line.split("#")[0].split(";")[0].strip().partition("==") for line in lines)
    return {_normal(name): version.strip() for name, equals, version in pairs if equals}


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


def check_cores_and_memory() -> list[DoctorCheck]:
    """Check the cores and memory available to this process."""
    allowed, whole = len(os.sched_getaffinity(0)), os.cpu_count()
    quota = quota_cores()
    cores = DoctorCheck("cores", "ok", f"{allowed} of {whole} available")
    if quota is not None and quota < allowed:
        detail = f"{cores.detail}, but the container's CPU quota is {quota:g} core{'s' if quota != 1 else ''}"
        cores = DoctorCheck(
            "cores", "warning", detail, "studies take no more ranks than that; raise the container's limit for more"
        )
    whole, limit, free = psutil.virtual_memory().total, host_memory_total(), host_memory_available()
    note = f", the limit of this container or job; the machine has {whole / _GIB:.1f} GiB" if limit < whole else ""
    detail = f"{free / _GIB:.1f} of {limit / _GIB:.1f} GiB free{note}"
    if free < 2 * _GIB:
        return [cores, DoctorCheck("memory", "warning", detail, "end other programs; the quickstart needs about 2 GiB")]
    return [cores, DoctorCheck("memory", "ok", detail)]


def check_folders(runs: Path, cache: Path) -> list[DoctorCheck]:
    """Check free disk space for records and models, and the size of shared memory."""
    found = [
        _room("run folder", runs, 1, "name another folder with --runs"),
        _room("cache folder", cache, 5, "set RANKWISE_CACHE to another folder"),
    ]
    shared = Path("/dev/shm")
    if not shared.is_dir():
        remedy = "mount a tmpfs at /dev/shm; NCCL and data loaders share memory there"
        return [*found, DoctorCheck("shared memory", "warning", "no /dev/shm", remedy)]
    usage = shutil.disk_usage(shared)
    detail = f"{usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free in /dev/shm"
    if usage.free < 512 * 2**20:
        # Containers get 64 MiB: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
        return [*found, DoctorCheck("shared memory", "warning", detail, "start the container with --shm-size=8g")]
    return [*found, DoctorCheck("shared memory", "ok", detail)]


def _room(name: str, folder: Path, enough_gib: int, elsewhere: str) -> DoctorCheck:
    folder = folder.absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return DoctorCheck(
            name, "missing", f"{folder}: {there} is not writable", f"{elsewhere}, or change the owner of this one"
        )
    free = shutil.disk_usage(there).free
    detail = f"{free / _GIB:.1f} GiB free in {folder}"
    if free < enough_gib * _GIB:
        return DoctorCheck(
            name, "warning", detail, f"free some; below {enough_gib} GiB a large model or run may not fit"
        )
    return DoctorCheck(name, "ok", detail)


def check_slurm_tool(name: str, arguments: tuple[str, ...]) -> list[DoctorCheck]:
    """Check that one Slurm command is installed and that its daemon responds."""
    if shutil.which(name) is None:
        remedy = "not needed without a cluster; on one, use a login node or load its Slurm module"
        return [DoctorCheck(f"slurm {name}", "missing", "not on PATH", remedy)]
    text, problem = run_command([name, *arguments])
    if problem:
        daemon = "slurmdbd" if name == "sacct" else "slurmctld"
        remedy = f"check that {daemon} runs and slurm.conf names its host"
        from slurm.schedulers.commands.listing import DENIED

        if DENIED in problem:
            remedy = "the site hides this from its users (PrivateData of slurm.conf); jobs are submitted all the same"
        return [DoctorCheck(f"slurm {name}", "warning", problem, remedy)]
    return [DoctorCheck(f"slurm {name}", "ok", f"responds ({plural(len(text.splitlines()), 'line')})")]


def check_tools() -> list[DoctorCheck]:
    """Check the compiler and git."""
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    found = []
    for name, command in (("C++ compiler", compiler), ("git", "git" if shutil.which("git") else None)):
        if command is None:
            package = "git" if name == "git" else "build-essential"
            found.append(DoctorCheck(name, "missing", "not on PATH", f"apt-get install {package}"))
            continue
        text, problem = run_command([command, "--version"])
        first = text.splitlines()[0] if text else ""
        found.append(DoctorCheck(name, "warning" if problem else "ok", problem or first))
    return found


def check_profilers() -> list[DoctorCheck]:
    """Check the profilers that `measuring.profiler` supports."""
    found = []
    for name in get_args(Profiler):
        detail, _, remedy = (why_not(name) or "").removeprefix(f"{name}: ").partition("; ")
        remedy = f"not needed without measuring.profiler; else {remedy.partition(', or leave measuring.profiler')[0]}"
        found.append(DoctorCheck(name, "missing", detail, remedy) if detail else DoctorCheck(name, "ok", "available"))
    return found


def check_master(master: str) -> list[DoctorCheck]:
    """Check a TCP connection to the address of rank 0 (or another service), within 3 seconds."""
    host, colon, port = master.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return [DoctorCheck("master", "missing", f"{master!r} is not an address and port", "write it as HOST:PORT")]
    begun = time.monotonic()
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS) as connection:
            passed, own = (time.monotonic() - begun) * 1000, connection.getsockname()[0]
        return [DoctorCheck("master", "ok", f"{master} accepts connections: {passed:.1f} ms, from {own}")]
    except (socket.gaierror, UnicodeError):
        detail, remedy = "unknown host name", "check the spelling, use the IP address, or add it to /etc/hosts"
    except ConnectionRefusedError:
        detail = "connection refused: no process listens on this port"
        remedy = "start the master first (or `python -m http.server PORT` there, as a test), and check the port"
    except TimeoutError:
        detail = f"no response within {_CONNECT_SECONDS:g} s"
        remedy = "open the port in the firewall or security group; check that the host is up"
    except OSError as error:
        detail = f"no route ({error.strerror or error})"
        remedy = "check that both machines are in one network or connected by a route or VPN"
    return [DoctorCheck("master", "missing", f"{master}: {detail}", remedy)]


def check_credentials() -> list[DoctorCheck]:
    """Check which credentials are present; their values are never shown. A file that cannot be reached is not there."""
    set_names = {name for name, value in os.environ.items() if value}
    home = expanded("~")
    hub = DoctorCheck(
        "credentials hub", "missing", "HF_TOKEN is not set", "not needed for public models; else export HF_TOKEN"
    )
    if "HF_TOKEN" in set_names:
        hub = DoctorCheck("credentials hub", "ok", "HF_TOKEN is set")
    return [hub, _aws(set_names, home), _google(set_names, home), _azure(set_names, home)]


def _aws(set_names: set[str], home: Path) -> DoctorCheck:
    pair = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    files = [
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"),
        home / ".aws" / "config",
    ]
    if pair <= set_names:
        return DoctorCheck("credentials aws", "ok", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are set")
    if pair & set_names:
        absent = (pair - set_names).pop()
        return DoctorCheck(
            "credentials aws", "warning", f"{absent} is not set, but the other key is", "set both, or neither"
        )
    if any(map(os.path.isfile, files)):
        return DoctorCheck("credentials aws", "ok", "AWS CLI credentials file found")
    return DoctorCheck("credentials aws", "missing", "none", "not needed without AWS; else `aws configure`")


def _google(set_names: set[str], home: Path) -> DoctorCheck:
    name = "GOOGLE_APPLICATION_CREDENTIALS"
    if name in set_names:
        if os.path.isfile(os.environ[name]):
            return DoctorCheck("credentials google", "ok", f"file of {name} found")
        return DoctorCheck("credentials google", "warning", f"file of {name} not found", f"correct {name}")
    if os.path.isfile(home / ".config" / "gcloud" / "application_default_credentials.json"):
        return DoctorCheck("credentials google", "ok", "application default credentials found")
    remedy = "not needed without Google Cloud; else `gcloud auth application-default login`"
    return DoctorCheck("credentials google", "missing", "none", remedy)


def _azure(set_names: set[str], home: Path) -> DoctorCheck:
    needed = ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET")
    absent = [name for name in needed if name not in set_names]
    if not absent:
        return DoctorCheck("credentials azure", "ok", f"{', '.join(needed)} are set")
    if os.path.isfile(home / ".azure" / "azureProfile.json"):
        return DoctorCheck("credentials azure", "ok", "Azure CLI profile found")
    if len(absent) < len(needed):
        detail = f"{', '.join(absent)} not set"
        return DoctorCheck("credentials azure", "warning", detail, f"set all of {', '.join(needed)}, or `az login`")
    return DoctorCheck("credentials azure", "missing", "none", "not needed without Azure; else `az login`")


def check_prefect_api() -> list[DoctorCheck]:
    """Check that the configured Prefect API responds."""
    from flows.server.opener import api_opener
    from flows.server.settings import api_named_by_environment

    try:
        url = api_named_by_environment()
    except ValueError as error:
        return [DoctorCheck("prefect api", "missing", str(error), "correct the file, or set PREFECT_API_URL")]
    if url is None:
        return [DoctorCheck("prefect api", "ok", "none configured: Rankwise starts a local one for each run")]
    try:
        shown = without_password(url)  # of a password, urllib would make a port or a host, and name it in its error
        parts = urlsplit(shown)
        health = parts._replace(path=parts.path.split("/api")[0] + "/api/health").geturl()
        with api_opener(url, os.environ).open(health, timeout=_ANSWER_SECONDS) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500:
            return [DoctorCheck("prefect api", "ok", f"{shown} responds (HTTP {error.code} without credentials)")]
        status = error.code
    except (ValueError, http.client.InvalidURL):
        return [DoctorCheck("prefect api", "missing", "address is not a URL", "write it as http://HOST:PORT/api")]
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            remedy = "its machine may be busy: ask again, or see the log of that server"
            detail = f"{shown} did not answer within {_ANSWER_SECONDS:g} s"
            return [DoctorCheck("prefect api", "warning", detail, remedy)]
        remedy = "start it (`prefect server start`), correct PREFECT_API_URL, or unset it to use a local one"
        return [DoctorCheck("prefect api", "missing", f"{shown} does not respond ({reason})", remedy)]
    if status >= 500:
        return [DoctorCheck("prefect api", "warning", f"{shown} returns HTTP {status}", "see the log of that server")]
    return [DoctorCheck("prefect api", "ok", f"{shown} answers")]


def run_command(argv: list[str], seconds: float | None = None) -> tuple[str, str | None]:
    """Return the output of a command and its problem (None if it succeeded)."""
    seconds = seconds or _COMMAND_SECONDS
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(argv, **streams, text=True, errors="replace", start_new_session=True)
    except OSError as error:
        return "", f"could not be started ({error.strerror or error})"
    with process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # Kill its children too: they hold the pipe, and waiting for its end would have no limit.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "", f"no response within {seconds:g} s"
    if process.returncode != 0:
        last = (errors.strip() or output.strip()).splitlines()
        return output, f"failed with exit code {process.returncode}{': ' + last[-1][:300] if last else ''}"
    return output.rstrip(), None
