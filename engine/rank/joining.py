"""Initialise a rank: select the device, create the process groups, build the workload context."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configs.common.system.collector import imported_for_good
from engine.rank.processes import RankPlace
from engine.rank.stores import join_store, serve_own_store

if TYPE_CHECKING:
    import torch

    from configs.families.config import ModelConfig
    from configs.plans.job import Job
    from configs.plans.paths import JobPaths
    from engine.context import Context


class DeviceError(NotImplementedError):
    """The ranks of this node cannot compute on its GPUs as they are asked to."""


def choose_device(
    place: RankPlace, wanted: Literal["cpu"] | None = None, expected: bool | None = None, dtype: str = "float32"
) -> "tuple[torch.device, str | None]":
    """Return this rank's own GPU, or the CPU on a node without GPUs; and the backend: one rank needs none.

    wanted: cpu, to compute on the CPU whatever there is. expected: whether the node must have GPUs; None: if the driver
    lists some. Raises DeviceError, instead of taking the CPU, for fewer GPUs than ranks, for GPUs that torch does not
    find, and for a dtype that they do not have.
    """
    import torch

    from engine.parallel.communicator import choose_backend

    device = torch.device("cpu")
    if wanted != "cpu":
        device = _own_gpu(place, expected, dtype) or device
    return device, choose_backend(device) if place.world_size > 1 else None


def _own_gpu(place: RankPlace, expected: bool | None, dtype: str) -> "torch.device | None":
    """Return None on a node without GPUs."""
    import torch

    from engine.planner.accelerators import device_text, local_accelerators

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        listed = local_accelerators() if expected is None else ()
        if not listed and not expected:
            return None
        there = f"this node has {device_text(listed)}" if listed else "the target asks for GPUs"
        raise DeviceError(
            f"device: {there}, but torch {torch.__version__} finds no GPU. Install the build of torch for them, "
            f"{_ON_THE_CPU}"
        )
    needed = 1 if place.own_device_only else place.local_world_size
    if found < needed:
        raise DeviceError(f"device: {needed} ranks on this node, but {found} GPU{'s' * (found > 1)}. {_FEWER}")
    device = torch.device("cuda", place.device_index)
    _check_dtype(device, dtype)
    torch.cuda.set_device(device)
    return device


_LIBRARIES = {
    "transformers": ("transformers",),
    "deepspeed": ("deepspeed", "transformers"),
    "onnxruntime": ("onnxruntime", "transformers"),
}
"""Distributions by the engine that they are, or that takes models from them."""
_ON_THE_CPU = "or set `device: cpu` of the target to compute on its cores (in a script: CUDA_VISIBLE_DEVICES=)"
_FEWER = f"Start one rank for each GPU, {_ON_THE_CPU}"
_BFLOAT16_CAPABILITY = 8
"""CUDA C++ Programming Guide, "Arithmetic Instructions": bfloat16 from compute capability 8.0; torch emulates it below
that."""


def _check_dtype(device: "torch.device", dtype: str) -> None:
    import torch

    if dtype != "bfloat16" or torch.version.hip is not None:
        return
    known = torch.cuda.get_device_properties(device)
    if known.major < _BFLOAT16_CAPABILITY:
        raise DeviceError(
            f"dtype: {known.name} has compute capability {known.major}.{known.minor}, and bfloat16 requires "
            f"{_BFLOAT16_CAPABILITY}.0. Use float16 or float32"
        )


def alone_device() -> "torch.device":
    """Return the device of a process that is no rank of others, as `choose_device`."""
    cores = sorted(os.sched_getaffinity(0))
    return choose_device(RankPlace(0, 0, 1, 1, allowed=cores, cores=cores))[0]


def choose_job_device(job: "Job", place: RankPlace) -> "tuple[torch.device, str | None]":
    """Return a rank's device and backend for a job.

    GPUs are expected if the target asks for them. Where it does not, a scheduler's node may list those of other jobs;
    this machine and hosts by SSH, rented ones too, list their own.
    """
    from configs.targets.resources import ClusterTarget, ScheduledTarget

    target = job.target
    asked = isinstance(target, ClusterTarget) and target.gpus_per_node is not None
    expected = asked if asked or isinstance(target, ScheduledTarget) else None
    return choose_device(place, target.device, expected, job.cell.dtype)


def join_group(place: RankPlace, backend: str | None, timeout_seconds: float, prefix: str | None) -> Callable[[], None]:
    """Create the process group of all ranks; return its barrier. With a prefix, an additional group."""
    if backend is None:
        return lambda: None
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_seconds)
    # Without it NCCL guesses the device from the rank, and connects only at the first collective.
    device = torch.device("cuda", place.device_index) if backend == "nccl" else None
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's, which serves the store
    if prefix is None and has_agent:
        dist.init_process_group(backend, timeout=timeout, device_id=device)
    else:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = prefix is None and place.rank == 0
        store = (serve_own_store if serves else join_store)(address, port, timeout)
        if prefix is not None:  # of the agent's store; each group uses a separate key prefix
            store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout, device_id=device
        )

    def barrier() -> None:
        if backend == "nccl":
            torch.cuda.synchronize()
            dist.barrier(device_ids=[place.device_index])
            torch.cuda.synchronize()
        else:
            dist.barrier()

    return barrier


def make_context(
    job: "Job", paths: "JobPaths", place: RankPlace, prefix: str | None = None
) -> "tuple[Context, dict[str, Any]]":
    """Build the context: device, process group and manifest; and the environment, which rank 0's parts contain."""
    with imported_for_good("torch"):
        import torch

        from configs.plans.model_manifest import read_model_manifest
        from configs.workloads import descriptor_of
        from engine.context import Context
        from engine.parallel import flight_recorder as flight
        from engine.parallel.communicator import open_communicators
        from engine.rank import host_usage
        from engine.rank.computing import computing_environment

    torch.set_num_threads(place.threads)
    device, backend = choose_job_device(job, place)
    if place.world_size > 1:
        flight.turn_on()
    barrier = join_group(place, backend, job.measuring.group_timeout_seconds, prefix)
    context = Context(
        job=job,
        paths=paths,
        rank=place.rank,
        world_size=place.world_size,
        device=device,
        manifest=read_model_manifest(Path(job.manifest)) if job.manifest else None,
        barrier=barrier,
        job_cores=place.allowed,
    )
    cell = job.cell
    if cell.engine == "rankwise" and descriptor_of(cell.workload).own_groups:
        transport = cell.workload.group_transport
        context.communicators = open_communicators(
            context.grid, device, backend, job.measuring.group_timeout_seconds, transport
        )
    if place.rank:
        return context, {}
    environment = host_usage.measured_environment(job.cell.env, len(place.allowed))
    environment |= {
        "backend": backend,
        "tensor_transport": context.communicators.tensor.transport,
        "pipeline_transport": context.communicators.pipeline.transport,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": place.threads,
        "cores_per_rank": job.cell.cores_per_rank,
        "cores_shared": place.cores_shared,
    }
    environment |= computing_environment(cell, device, _config_of(context), context.communicators.tensor.transport)
    return context, environment | engine_libraries(context) | other_server(job)


def engine_libraries(context: "Context") -> "dict[str, Any]":
    """Versions of the libraries whose code a cell measures beside torch's: `libraries.transformers`; none of ours."""
    from configs.common.system.versions import version_of
    from configs.families.checkpoint import is_trained_here
    from configs.workloads import descriptor_of

    cell, manifest = context.job.cell, context.manifest
    names = set(_LIBRARIES.get(cell.engine, ()))
    if cell.layout.strategy.startswith("zero"):
        names.add("deepspeed")
    if descriptor_of(cell.workload).trains and manifest is not None and not is_trained_here(manifest.config):
        names.add("transformers")
    return {"libraries": {name: version_of(name) for name in sorted(names)}} if names else {}


def other_server(job: "Job") -> "dict[str, Any]":
    """Which server that is not ours the cell's requests go to: `servers.vllm: vllm 0.32.0`; nothing of ours."""
    from configs.serving.installations import DISTRIBUTIONS, installation, installed_version
    from configs.targets.target import EndpointTarget
    from configs.workloads import descriptor_of

    cell, target = job.cell, job.target
    if not descriptor_of(cell.workload).starts_server:
        return {}
    said = f"{target.model} at {target.url}" if isinstance(target, EndpointTarget) else ""
    for name in DISTRIBUTIONS:
        if name == cell.engine:
            said = installed_version(name, installation(job.engines, name, Path(job.cache)))
    return {"servers": {cell.engine: said}} if said else {}


def _config_of(context: "Context") -> "ModelConfig | None":
    """Return the model's configuration; None without a model, or of a family that the engine lacks."""
    from configs.families.config import ModelConfig

    if context.manifest is None:
        return None
    try:
        return ModelConfig.parse(context.manifest.config)
    except (ValueError, KeyError, TypeError, AttributeError):  # refused where the model is loaded
        return None
