"""Check machines against the requirements of a plan. Does not import Prefect.

    check_resources(plan, folder)         # what can be said anywhere: cores, memory, disk of this machine
    check_clusters(plan, targets)         # what only the schedulers of its clusters can say; before a run

A study of a cluster can be checked and planned where there is no Slurm.
"""

import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.printable import plural
from configs.common.secrets import redacted
from configs.common.system.cores import quota_cores, usable_cores
from configs.common.system.memory import host_memory_available
from configs.common.system.versions import version_of
from configs.hardware.catalog import accelerator, instance
from configs.hardware.hardware import Accelerator
from configs.hardware.prices import TargetPrices
from configs.plans.model_manifest import ModelManifest
from configs.plans.plan import Plan
from configs.spec.cell import Cell
from configs.spec.measuring import LIVE_LIBRARIES
from configs.spec.study import StudyError
from configs.targets.rented import RentedTarget
from configs.targets.resources import ClusterTarget
from configs.targets.target import LocalTarget, SshTarget, Target
from engine.planner.accelerators import LocalAccelerator, device_text, unusable_reason
from engine.planner.local import local_devices, local_ranks
from slurm.launcher.profilers import why_not
from slurm.schedulers.commands.listing import ClusterError
from slurm.schedulers.commands.partitions import Need
from slurm.schedulers.inventory import Inventory
from slurm.ssh.host_checks import HostNeed, lacking
from slurm.ssh.loop import wait_for
from tasks.providers.clouds import provider_named
from tasks.providers.rental import ProviderError

_LEAST_FREE_DISK_BYTES = 64 << 20
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_resources(plan: Plan, folder: Path) -> None:
    """Raise StudyError naming each resource that the plan lacks here; of clusters nothing is asked."""
    problems = _device_problems(plan) + _rank_problems(plan) + _price_problems(plan)
    problems += _memory_problems(plan) + _cluster_memory_problems(plan)
    problems += _profiler_problems(plan) + _live_problems(plan)
    free = shutil.disk_usage(_existing(folder)).free
    if free < _LEAST_FREE_DISK_BYTES:
        problems.append(
            f"run folder {folder}: {free / 2**20:.0f} MiB free on its disk, expected at least "
            f"{_LEAST_FREE_DISK_BYTES / 2**20:.0f} MiB. Free disk space or use another folder with --runs"
        )
    if problems:
        raise StudyError(problems)


def check_clusters(plan: Plan, in_use: Collection[Target]) -> None:
    """Raise StudyError naming what a cluster or its shared folder lacks, or that its scheduler does not answer.

    in_use: the targets of the plan that are asked (`tasks.campaign.repeats.targets_in_use`).
    """
    problems: list[str] = []
    inventory = Inventory()
    for place, target in enumerate(plan.targets):
        if not isinstance(target, ClusterTarget) or target not in in_use:
            continue
        if isinstance(target, RentedTarget):
            problems += [f"targets[{place}]: {problem}" for problem in _rental_problems(target)]
            continue
        try:
            if isinstance(target, SshTarget):
                found = wait_for(lacking(target, _host_need(plan, target)))
            else:
                found = inventory.lacks(target, _needs(plan, target))
        except ClusterError as error:
            raise StudyError([f"targets[{place}]: {error}"]) from error
        found += _shared_problems(target)
        problems += [f"targets[{place}].{problem}" for problem in found]
    if problems:
        raise StudyError(problems)


def _rental_problems(target: RentedTarget) -> list[str]:
    """Why nothing can be rented: no credentials, or none that the provider accepts."""
    try:
        provider_named(target.kind).identity()
    except (ProviderError, ValueError) as error:
        return [redacted(str(error))]
    return []


def _needs(plan: Plan, target: ClusterTarget) -> list[Need]:
    """What each cell needs of the nodes of a cluster."""
    sizes, found = _sizes(plan), []
    for cell in plan.cells.values():
        if cell.target == target.name:
            weights = 0 if target.gpus_per_node else _weight_bytes(cell, sizes) or 0
            cores = cell.layout.ranks // cell.nodes * cell.cores_per_rank
            found.append(Need(cell.nodes, cores, -(-weights // cell.nodes) >> 20))
    return found


def _host_need(plan: Plan, target: SshTarget) -> HostNeed:
    """The most that a cell needs of each of its hosts, and room for the models of all."""
    needs = _needs(plan, target) or [Need(1, 1)]
    models = {cell.model for cell in plan.cells.values() if cell.target == target.name}
    manifests = [Path(model.manifest) for model in plan.models if model.manifest and model.identity in models]
    files = [file for path in manifests for file in read_model(path, ModelManifest, PLAN_BYTES).files.values()]
    return HostNeed(
        nodes=max(need.nodes for need in needs),
        cores=max(need.cores for need in needs),
        memory_bytes=max(need.memory_mb for need in needs) << 20,
        model_bytes=sum(file.size_bytes for file in files),
    )


def _shared_problems(target: ClusterTarget) -> list[str]:
    """That the folder which all nodes see can be written here, where jobs are made."""
    if target.shared is None:
        return []
    folder = Path(target.shared)
    if not folder.is_dir():
        return [f"shared: no such folder: {folder}. It must have the same path on the nodes and this machine"]
    return [] if os.access(folder, os.W_OK | os.X_OK) else [f"shared: {folder} is not writable"]


def _device_problems(plan: Plan) -> list[str]:
    """That torch as installed here cannot compute on the devices of this machine: ranks never turn to its cores."""
    problems = []
    for place, target in enumerate(plan.targets):
        if not isinstance(target, LocalTarget):
            continue
        reason = unusable_reason(local_devices(target), version_of("torch"))
        if reason is not None:
            problems.append(
                f"targets[{place}].device: {reason}. Install the build for them "
                "(https://pytorch.org/get-started/locally), or set `device: cpu` to measure on the cores"
            )
    return problems


def _rank_problems(plan: Plan) -> list[str]:
    """Of local targets: those of a cluster were held against its nodes when the cells were made."""
    problems = []
    targets = {target.name: target for target in plan.targets}
    holds: dict[tuple[str, int], int] = {}  # not asked for each cell: the driver of GPUs may take a second to start
    for experiment in plan.experiments:
        for point in experiment.points:
            cell = plan.cells[point.cell]
            target, ranks = targets[cell.target], cell.layout.ranks
            if not isinstance(target, LocalTarget):
                continue
            asked = target.name, cell.cores_per_rank
            if asked not in holds:
                holds[asked] = local_ranks(target, cell.cores_per_rank)
            held = holds[asked]
            if ranks > held:
                problems.append(
                    f"experiments.{experiment.name} at {point.label}: {plural(ranks, 'rank')}, but target "
                    f"{target.name} holds {held} ({_held_by(target, cell)})"
                )
    return list(dict.fromkeys(problems))


def _held_by(target: LocalTarget, cell: Cell) -> str:
    """What limits the ranks of a local target: `2 x NVIDIA A10G, one per rank; on the cores with device: cpu`."""
    devices = local_devices(target)
    limit = f", max_ranks: {target.max_ranks}" if target.max_ranks else ""
    if devices:
        return f"{device_text(devices)}, one per rank{limit}; `device: cpu` measures on the cores instead"
    cores, quota = usable_cores(), quota_cores()
    limit += f"; the container's CPU quota is {quota:g}" if quota is not None and int(quota) <= cores else ""
    return f"{plural(cores, 'core')}, {cell.cores_per_rank} per rank{limit}"


def _price_problems(plan: Plan) -> list[str]:
    if plan.measuring.budget_usd is None or plan.usd_per_hour is not None:
        return []
    free = [target for target in plan.targets if plan.prices.get(target.name, TargetPrices()).price is None]
    names = ", ".join(target.name for target in free)
    # The catalog has a price for each region.
    regions = any(target.machine is not None and target.region is None for target in free)
    remedy = "a region in targets[].machine (provider/instance/region), " if regions else ""
    return [
        f"measuring.budget_usd: requires a price for every target, and {names} has none. "
        f"Set {remedy}targets[].price_usd_per_hour or a file in `prices`"
    ]


def _profiler_problems(plan: Plan) -> list[str]:
    profiler = plan.measuring.profiler
    here = any(isinstance(target, LocalTarget) for target in plan.targets)  # a cluster's nodes are not this machine
    problem = why_not(profiler) if profiler and here else None
    return [f"measuring.profiler: {problem}"] if problem else []


def _live_problems(plan: Plan) -> list[str]:
    """Libraries that live streams lack here; a cluster's nodes say so in their logs and train without."""
    if not any(isinstance(target, LocalTarget) for target in plan.targets):
        return []
    problems = []
    for sink in plan.measuring.live:
        missing = [name for name in LIVE_LIBRARIES[sink] if not version_of(name)]
        if missing:
            problems.append(
                f"measuring.live: {sink} requires {', '.join(missing)}: pip install {' '.join(LIVE_LIBRARIES[sink])}"
            )
    return problems


def _memory_problems(plan: Plan) -> list[str]:
    """Weights alone, for all ranks of a cell on this machine, against its memory: less cannot work.

    On GPUs that is the memory of as many of them as the cell has ranks, else what is free of the machine's.
    """
    local = {target.name: local_devices(target) for target in plan.targets if isinstance(target, LocalTarget)}
    sizes, free = _sizes(plan), host_memory_available()
    problems = {}
    for cell in plan.cells.values():
        needed = _weight_bytes(cell, sizes) if cell.target in local else None
        available, where = _available(local.get(cell.target, ()), cell.layout.ranks, free)
        if needed is not None and available is not None and needed > available:
            problems[cell.model, cell.layout.dp] = (
                f"model {cell.model} on {cell.layout}: the weights require {needed / 2**30:.1f} GiB, "
                f"available are {available / 2**30:.1f} GiB{where}"
            )
    return list(problems.values())


def _cluster_memory_problems(plan: Plan) -> list[str]:
    """The same of clusters whose GPUs are known, by the instance that `machine` names or the type in `gres`, and of
    rented nodes, whose memory is known without GPUs too.
    """
    devices = {target.name: _cluster_device(target) for target in plan.targets if isinstance(target, ClusterTarget)}
    sizes = _sizes(plan)
    problems = []
    for cell in plan.cells.values():
        needed, device = _weight_bytes(cell, sizes), devices.get(cell.target)
        count = cell.nodes if device is not None and device.kind == "cpu" else cell.layout.ranks
        if needed is not None and device is not None and needed > device.memory_bytes * count:
            problems.append(
                f"model {cell.model} on {cell.layout}: the weights require {needed / 2**30:.1f} GiB, available are "
                f"{device.memory_bytes * count / 2**30:.1f} GiB on {count} x {device.title} of target {cell.target}"
            )
    return list(dict.fromkeys(problems))


def _cluster_device(target: ClusterTarget) -> Accelerator | None:
    """The GPU that a rank of a cluster has, or all cores of a rented node; None where the catalog does not say."""
    rented = isinstance(target, RentedTarget)
    if target.gpus_per_node is None and not rented:
        return None
    try:
        if target.catalog_name is not None:
            device = instance(target.catalog_name).accelerator
            known = device.kind == "cpu" or target.device is None if rented else device.kind != "cpu"
            return device if known else None
        return accelerator(target.gpu_type) if target.gpu_type is not None else None
    except (ValueError, KeyError):
        return None


def _available(devices: Sequence[LocalAccelerator], ranks: int, free: int) -> tuple[int | None, str]:
    """Bytes for the ranks of a cell, None where a driver does not say, and whose: nothing, or ` on 2 x NVIDIA A10G`.

    free: of the machine's memory, which ranks without devices have.
    """
    if not devices:
        return free, ""
    used = devices[:ranks]
    sizes = [device.memory_bytes for device in used if device.memory_bytes is not None]
    return (sum(sizes) if len(sizes) == len(used) else None), f" on {device_text(used)}"


def _sizes(plan: Plan) -> dict[str, int | None]:
    """Parameters by model. A hub's that was not fetched yet has no manifest; the flow looks again when it has."""
    return {model.identity: _parameters(Path(model.manifest)) for model in plan.models if model.manifest}


def _weight_bytes(cell: Cell, sizes: dict[str, int | None]) -> int | None:
    """What all ranks of a cell hold at least; None where the model's size, or what they hold of it, is not known."""
    parameters = sizes.get(cell.model or "")
    if cell.compression:  # product by product, while the weights are loaded
        return None
    per_parameter = cell.workload.bytes_per_parameter(cell.layout, _DTYPE_BYTES[cell.dtype])
    return None if parameters is None or per_parameter is None else parameters * per_parameter


def _parameters(manifest: Path) -> int | None:
    """At least so many parameters, by the sizes of the weight files were they float32; None without files."""
    files = read_model(manifest, ModelManifest, PLAN_BYTES).files
    total = sum(file.size_bytes for name, file in files.items() if name.endswith(".safetensors"))
    return total // 4 or None


def _existing(folder: Path) -> Path:
    return next(parent for parent in [folder, *folder.parents] if parent.exists())
