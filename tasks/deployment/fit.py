"""Whether a model fits a target's memory, by the planner, and the smallest target on which it would; and the precision
that a target's GPU computes in.

    check_fit(architecture, layout, dtype, max_length, available, "aws/g4dn.xlarge", cache)      # ValueError: no

The key-value cache counts for one sequence of the greatest length: less cannot serve a request.
"""

from math import ceil
from pathlib import Path

from configs.common.execution import Dtype, Layout
from configs.common.printable import plural
from configs.hardware.catalog import catalog
from configs.hardware.hardware import Machine
from configs.hardware.hardware_filter import HardwareFilter, matching
from configs.plans.model_manifest import ModelManifest
from configs.serving.deployment import Deployment
from engine.planner.architecture import Architecture
from engine.planner.families import read_architecture
from engine.planner.local import local_machine
from engine.planner.memory.inference import inference_memory
from engine.planner.setup import InferenceSetup
from tasks.deployment.bundles import WantedBundle, served_length
from tasks.deployment.places import Place
from tasks.deployment.servers import device_groups, free_in_groups
from tasks.deployment.targets import ParsedTarget, parse_target

_GIB = 1 << 30
_SHARE = 0.9
"""Of a machine's memory: the rest is for what the prediction misses."""


def needed_bytes(
    architecture: Architecture, layout: Layout, dtype: Dtype, max_length: int, cache: Path, name: str | None = None
) -> int:
    """Return the predicted peak of the fullest rank. name: instance of the catalog; None: this machine."""
    setup = InferenceSetup(
        architecture=architecture,
        machine=local_machine(cache).estimate if name is None else catalog().listed_instance(name),
        layout=layout.model_copy(update={"dp": 1}),
        prompt_tokens=max_length,
        new_tokens=0,
        compute=dtype,
        weights=dtype,
    )
    return int(inference_memory(setup).total)


def devices_of(target: ParsedTarget) -> int:
    """Return the accelerators of a rented instance; 1 where there are none, and for what is not rented."""
    machine = _rented_machine(target)
    return 1 if machine is None or machine.accelerator.kind == "cpu" else machine.accelerators


def usual_dtype(target: ParsedTarget) -> Dtype:
    """Return the precision where none is asked for: bfloat16, but float16 on rented GPUs that do not multiply it."""
    machine = _rented_machine(target)
    return "float16" if machine is not None and machine.accelerator.lacks("bfloat16") else "bfloat16"


def check_dtype(target: ParsedTarget, dtype: Dtype, given: str) -> None:
    """Raise ValueError, which begins as given, for a precision that ranks on a rented GPU would refuse."""
    machine = _rented_machine(target)
    if machine is not None and machine.accelerator.lacks(dtype):
        raise ValueError(
            f"{given} {dtype}, which {machine.accelerator.title} of {target.text} does not multiply. Use float16 or "
            "float32"
        )


def check_devices(target: ParsedTarget, layout: Layout, nodes: int) -> None:
    """Raise ValueError for a study's layout with more ranks on a rented node than it has GPUs. nodes: of one server."""
    machine, ranks = _rented_machine(target), -(-layout.ranks // nodes)
    if machine is not None and machine.accelerator.kind != "cpu" and ranks > machine.accelerators:
        raise ValueError(
            f"--from: the study chose {layout}, which takes {ranks} GPUs of a node, but {target.text} has "
            f"{plural(machine.accelerators, 'GPU')}. Use an instance with more, or name --model in place of --from"
        )


def _rented_machine(target: ParsedTarget) -> Machine | None:
    """Return what the catalog says of an instance, retired ones included; None: the target is rented nowhere."""
    return None if target.instance is None else catalog().listed_instance(f"{target.kind}/{target.instance}")


def memory_of_rank(name: str, ranks_per_node: int) -> int | None:
    """Return what an instance has for each rank: of its accelerator, or its share of the host's; None: unknown."""
    machine = catalog().listed_instance(name)
    if machine.accelerator.kind != "cpu":
        return int(machine.accelerator.memory_bytes)
    return None if machine.host_memory_bytes is None else machine.host_memory_bytes // ranks_per_node


def free_memory_of_rank(place: Place, device: str | None, ranks: int, machines: int = 1, servers: int = 1) -> int:
    """Return what each rank has: a GPU to itself, where it computes on one, or its share of all machines' memory.

    servers: on the place. Where it has GPUs for several, they get those of which others have least.
    """
    if device != "cpu":
        if machines == 1 and device_groups(place.gpu_count(), ranks) > 1:
            free = sorted((each for each in free_in_groups(place, ranks) if each is not None), reverse=True)
            if free:
                return free[min(servers, len(free)) - 1]
        gpu = place.gpu_memory_bytes()
        if gpu is not None:
            return gpu
    return place.memory_bytes() * machines // ranks


def check_fit(
    architecture: Architecture,
    layout: Layout,
    dtype: Dtype,
    max_length: int,
    available: int | None,
    where: str,
    cache: Path,
    provider: str | None = None,
    name: str | None = None,
    servers: int = 1,
) -> str:
    """Return the check in words. Raises ValueError where it does not fit, naming the smallest target that would do.

    servers: how many of the deployment share the memory that is available.
    """
    need = needed_bytes(architecture, layout, dtype, max_length, cache, name)
    told, fits = _judged(need, available, where, servers)
    if not fits:
        advice = _advice(architecture, dtype, max_length, cache, provider, servers)
        raise ValueError(f"--target {where}: the model does not fit: {told} as {layout}. {advice}")
    return told


def check_fit_beside(
    manifest: ModelManifest, bundle: WantedBundle, place: Place, deployment: Deployment, cache: Path
) -> str:
    """Return the check in words of servers that are placed beside those that run. Raises ValueError: they do not fit.

    place: the deployment's first machine. What is free there is what the running servers leave.
    """
    ranks, sharded = bundle.layout.ranks, any(server.peers for server in deployment.servers)
    device = parse_target(deployment.target).device
    machines = deployment.nodes if sharded else 1  # of one server
    servers = len(deployment.servers)
    if deployment.partition is not None:
        servers = 1  # each job has a node
    elif not sharded:
        servers = ceil(servers / deployment.nodes)
    available = free_memory_of_rank(place, device, ranks, machines, servers)
    if not sharded and device != "cpu":
        servers = ceil(servers / device_groups(place.gpu_count(), ranks))
    architecture = read_architecture(manifest.config, manifest.identity)
    length = served_length(architecture, bundle.max_length)
    need = needed_bytes(architecture, bundle.layout, bundle.dtype, length, cache, _catalog_name(deployment))
    told, fits = _judged(need, available, deployment.target, servers)
    if not fits:
        raise ValueError(
            f"{deployment.name}: the model does not fit where its servers run: {told} as {bundle.layout}. Deploy it to "
            "another target, or take this deployment down first"
        )
    return told


def _catalog_name(deployment: Deployment) -> str | None:
    instance = parse_target(deployment.target).instance
    return None if instance is None else f"{deployment.kind}/{instance}"


def _judged(need: int, available: int | None, where: str, servers: int) -> tuple[str, bool]:
    """Return what a rank needs and has in words, and whether that is enough."""
    if available is None:
        return f"needs about {need / _GIB:.2f} GiB a rank; the memory of {where} is not known", True
    told = f"needs about {need / _GIB:.2f} GiB a rank, {where} has {available / servers / _GIB:.2f} GiB"
    told += f" for each of {servers} servers" if servers > 1 else ""
    return told, need <= _SHARE * available / servers


def _advice(
    architecture: Architecture, dtype: Dtype, max_length: int, cache: Path, provider: str | None, servers: int
) -> str:
    """Return the cheapest instance on which the model fits, as one rank or cut over its accelerators."""
    if servers > 1:
        return "Use fewer --replicas, or more machines"
    for offer in matching(HardwareFilter(provider=provider), catalog(cache)):
        if offer.machine.accelerator.lacks(dtype):
            continue
        devices = offer.machine.accelerators if offer.machine.accelerator.kind != "cpu" else 1
        for tp in sorted({1, devices}):
            if architecture.heads % tp:
                continue
            memory = memory_of_rank(offer.name, 1)
            need = needed_bytes(architecture, Layout(tp=tp), dtype, max_length, cache, offer.name)
            if memory is not None and need <= _SHARE * memory:
                sharded = " --sharded" if tp > 1 else ""
                return f"The smallest that would do: --target {offer.name.replace('/', ':', 1)}{sharded}"
    return "No instance of the catalog would do alone; use --sharded with --nodes"
