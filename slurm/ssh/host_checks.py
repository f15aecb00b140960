"""What hosts that are reached by SSH lack for a study, before anything is carried to them.

problems = await lacking(target, needs)         # ["hosts: gpu-b: 0.2 GiB free in /home/bench/.rankwise, ..."]
kind = await hosts_identity(target)                   # "hosts gpu-a, gpu-b of 32 CPUs, 251 GiB"
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement

from configs.common.printable import plural, some_of
from configs.targets.ssh_host import SshHost
from configs.targets.target import SshTarget
from slurm.ssh.connection import Facts, Host, HostError, HostRefused, hosts_of
from slurm.ssh.staging import libraries_name
from slurm.staging.packages import node_requirements

_GIB = 1 << 30
CLOCK_SECONDS = 2.0
"""Between clocks of two nodes: what a launch took and cost is told by the launchers' and the records' times."""
LEAST_FREE_BYTES = _GIB // 4
LIBRARIES_BYTES = 8 * _GIB
"""PyTorch with the libraries of CUDA, unpacked, and pip's copies meanwhile."""


@dataclass(frozen=True)
class HostNeed:
    """What the cells of a target need of each of its hosts, at most."""

    nodes: int = 1
    cores: int = 1
    memory_bytes: int = 0
    model_bytes: int = 0


async def lacking(target: SshTarget, need: HostNeed) -> list[str]:
    """What is wrong with hosts, each named and with its remedy, as `field: what is wrong`."""
    hosts = hosts_of(target)
    answers = await asyncio.gather(*(_of_host(target, *each, need) for each in zip(target.hosts, hosts, strict=True)))
    problems = [f"hosts: {problem}" for _, found in answers for problem in found]
    places: dict[str, list[str]] = {}
    for host, (facts, _) in zip(hosts, answers, strict=True):
        if facts is not None:
            places.setdefault(facts.place, []).append(host.name)
    same = [names for names in places.values() if len(names) > 1]
    return problems + [f"hosts: {some_of(names)} are one and the same machine. Leave all but one out" for names in same]


async def _of_host(target: SshTarget, given: SshHost, host: Host, need: HostNeed) -> tuple[Facts | None, list[str]]:
    try:
        facts = await host.facts(fresh=True)
        missing = await _missing_libraries(host) if target.python is not None else []
        carried = target.shared is None  # else a host's own folder gets nothing
        installs = carried and target.python is None and not await _has_libraries(host, facts)
    except HostError as error:
        return None, [f"{error.strerror or error}. Set `folder` to one that can be made and read there"]
    except OSError as error:
        return None, [f"{error.strerror or error}. Check that it is up and that `ssh {host.address.host}` works"]
    except HostRefused as error:
        return None, [str(error)]
    problems = [*(_disk(facts, need, installs) if carried else ()), *_machine(target, facts, need)]
    if need.nodes > 1 and ":" in (address := facts.address_of(given)):
        problems.append(
            f"the other hosts of a job would reach it by {address}, and need IPv4. Set its `address` to one of IPv4"
        )
    if missing:
        what = f"{host.address.python} lacks {', '.join(missing)}"
        problems.append(f"{what}. Install them there, or leave `python` out to have them installed")
    return facts, [f"{host.name}: {problem}" for problem in problems]


def _disk(facts: Facts, need: HostNeed, installs: bool) -> list[str]:
    if not facts.data["writable"]:
        return [f"{facts.folder} is not writable. Set `folder` to one that is"]
    least = LEAST_FREE_BYTES + need.model_bytes + (LIBRARIES_BYTES if installs else 0)
    if facts.data["free_bytes"] >= least:
        return []
    free = f"{facts.data['free_bytes'] / _GIB:.1f} GiB free in {facts.folder}"
    return [f"{free}, {least / _GIB:.1f} GiB are needed. Make room, or set `folder` to a larger disk"]


def _machine(target: SshTarget, facts: Facts, need: HostNeed) -> list[str]:
    problems = []
    if abs(facts.clock_seconds) > CLOCK_SECONDS:
        ahead = "ahead of" if facts.clock_seconds > 0 else "behind"
        problems.append(
            f"its clock is {abs(facts.clock_seconds):,.0f} s {ahead} this machine's. Set it, as by `chronyc makestep`"
        )
    if need.cores > facts.data["cores"]:
        problems.append(
            f"{plural(need.cores, 'core')} needed, it has {facts.data['cores']}. Lower ranks_per_node or cores_per_rank"
        )
    if need.memory_bytes > facts.data["memory_bytes"]:
        there = facts.data["memory_bytes"] / _GIB
        problems.append(f"{need.memory_bytes / _GIB:.1f} GiB of memory are needed, it has {there:.1f} GiB")
    gpus = facts.data["gpus"]
    if target.gpus_per_node is not None and len(gpus["names"]) < target.gpus_per_node:
        why = f": {gpus['error']}" if gpus.get("error") else ""
        problems.append(
            f"{plural(target.gpus_per_node, 'GPU')} needed, its driver shows {len(gpus['names'])}{why}. See that "
            "`nvidia-smi` works there, or lower gpus_per_node"
        )
    return problems


async def _missing_libraries(host: Host) -> list[str]:
    names = [Requirement(line).name for line in node_requirements()[1]]
    found = (await host.ask("versions", names=names))[0]["versions"]
    return [name for name in names if found[name] is None]


async def _has_libraries(host: Host, facts: Facts) -> bool:
    folder = f"{facts.folder}/rankwise/{libraries_name(facts)}"
    return (await host.ask("sizes", paths=[folder]))[0]["sizes"][0] is not None


async def hosts_identity(target: SshTarget) -> str:
    """What figures of a target are comparable by: `hosts gpu-a, gpu-b of 8 CPUs, Xeon, 31 GiB`. Raises OSError."""
    found = await asyncio.gather(*(host.facts() for host in hosts_of(target)))
    return f"hosts {', '.join(host.name for host in hosts_of(target))} of {' or '.join(_kinds(found))}"


def _kinds(found: Sequence[Facts]) -> list[str]:
    kinds = set()
    for facts in found:
        gpus = Counter(facts.data["gpus"]["names"])
        devices = "".join(f", {count} x {name}" for name, count in gpus.items())
        memory = f"{facts.data['memory_bytes'] / _GIB:.0f} GiB"
        kinds.add(f"{facts.data['cores']} CPUs, {facts.data['cpu_model']}, {memory}{devices}")
    return sorted(kinds)
