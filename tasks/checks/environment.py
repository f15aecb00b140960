"""The environment in which a run measures, against the one in which its folder was begun. Does not import Prefect.

facts = check_environment(run, accept=False, targets=study.targets)
"""

import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import psutil

from configs.common.base import canonical_json, write_atomically
from configs.common.files.reading import read_json_object
from configs.common.system.versions import version_of
from configs.plans.paths import RunPaths
from configs.targets.rented import RentedTarget
from configs.targets.resources import ClusterTarget
from configs.targets.target import EndpointTarget, LocalTarget, SshTarget, Target
from engine.planner.accelerators import device_text
from engine.planner.local import cpu_model, local_devices
from slurm.schedulers.inventory import Inventory
from slurm.ssh.host_checks import hosts_identity as identity_of_hosts
from slurm.ssh.loop import wait_for

_PACKAGES = ("torch", "numpy", "transformers", "rankwise")


class EnvironmentChanged(ValueError):
    """The run folder holds measurements of another machine or other versions."""


def check_environment(
    run: RunPaths,
    accept: bool,
    targets: Iterable[Target] = (LocalTarget(),),
    servers: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Compare today's environment with the one that the run folder was begun in; keep today's, and other targets'.

    servers: other projects' that the study measures (`tasks.checks.installed`). Raises EnvironmentChanged, and
    ClusterError where a cluster of the targets cannot be asked.
    """
    targets = tuple(targets)
    clusters = [target for target in targets if not isinstance(target, LocalTarget)]
    settings = {f"settings of target {target.name}": target.unkeyed_settings or "the defaults" for target in clusters}
    today = {**machine_fingerprint(targets), **settings, **servers}
    path = run.folder / "environment.json"
    before: dict[str, Any] = {}
    stale: set[str] = set()
    if path.exists():
        with suppress(ValueError):
            before = read_json_object(path)
        # Of a target that the study has since, nothing was measured elsewhere.
        changed = [name for name in today if name in before and before[name] != today[name]]
        lines = [f"  {name}: was {_fact_text(before[name])}, now {_fact_text(today[name])}" for name in changed]
        stale = _facts_of_another_kind(before, targets)
        for target in targets:
            here, there = f"gpus of target {target.name}", f"target {target.name}"
            if here in stale:
                lines.append(f"  {there}: was this machine, now {_fact_text(today[there])}")
            elif there in stale:
                lines.append(f"  {there}: was {_fact_text(before[there])}, now this machine")
        if lines and not accept:
            told = "\n".join(lines)
            raise EnvironmentChanged(
                f"{run.folder}: measured in a different environment:\n{told}\n"
                "Use --accept-environment to resume in this environment, or --runs for another folder"
            )
    kept = {name: fact for name, fact in before.items() if name not in stale} | today
    if kept != before:
        write_atomically(path, canonical_json(kept))
    return today


def _fact_text(fact: Any) -> str:
    """A fact for a person: `none` for what there is not; of rented nodes `instance aws/g5.xlarge, image ami-1`."""
    if isinstance(fact, dict):
        return ", ".join(f"{name} {value}" for name, value in fact.items() if value is not None)
    return "none" if fact is None else str(fact)


def _facts_of_another_kind(before: Mapping[str, Any], targets: Iterable[Target]) -> set[str]:
    """Names of facts that targets had when they were a cluster and are this machine now, or the other way round.

    A target's name, not its kind, is in the key of a cell: the records of one would be taken for the other's.
    """
    found: set[str] = set()
    for target in targets:
        of_cluster = (f"target {target.name}", f"settings of target {target.name}")
        found |= set(of_cluster if isinstance(target, LocalTarget) else (f"gpus of target {target.name}",))
    return found & before.keys()


def machine_fingerprint(targets: Iterable[Target] = (LocalTarget(),)) -> dict[str, Any]:
    """What makes figures comparable: machines and versions.

    Of a cluster its name, partition and kind of nodes count, not the machine that submits: a run may go on from
    another one. Of an endpoint the server and the model there count, too. Raises ClusterError.
    """
    facts: dict[str, Any] = {}
    inventory = Inventory()
    for target in targets:
        if isinstance(target, SshTarget):
            facts[f"target {target.name}"] = wait_for(identity_of_hosts(target))
        elif isinstance(target, RentedTarget):
            facts[f"target {target.name}"] = {"instance": f"{target.kind}/{target.instance}", "image": target.image}
        elif isinstance(target, ClusterTarget):
            facts[f"target {target.name}"] = inventory.identity(target)
        else:
            facts |= this_machine() | {f"gpus of target {target.name}": device_text(local_devices(target)) or None}
            if isinstance(target, EndpointTarget):  # neither is in the key of a cell
                facts[f"server of target {target.name}"] = f"{target.model} at {target.url}"
    return facts | {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}


def this_machine() -> dict[str, Any]:
    """What the machine is on which local targets lie."""
    return {
        "host": platform.node(),
        "cpu_model": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
