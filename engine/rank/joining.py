"""Initialise a rank: select the device, create the process groups, build the workload context."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.rank.processes import RankPlace
from engine.rank.stores import join_store

if TYPE_CHECKING:
    import torch

    from configs.families.config import ModelConfig
    from configs.plans.job import Job
    from configs.plans.paths import JobPaths
    from engine.context import Context


def choose_device(place: RankPlace) -> "tuple[torch.device, str | None]":
    """Return a GPU if each rank of this node has its own, else the CPU; and the backend: one rank needs none."""
    import torch

    from engine.parallel.communicator import choose_backend

    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world_size:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    return device, choose_backend(device) if place.world_size > 1 else None


def join_group(place: RankPlace, backend: str | None, timeout_seconds: float, prefix: str | None) -> Callable[[], None]:
    """Create the process group of all ranks; return its barrier. With a prefix, an additional group."""
    if backend is None:
        return lambda: None
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_seconds)
    # Without it NCCL guesses the device from the rank, and connects only at the first collective.
    device = torch.device("cuda", place.local_rank) if backend == "nccl" else None
    if prefix is None:
        dist.init_process_group(backend, timeout=timeout, device_id=device)
    else:
        # torchrun's agent serves the store; each group uses a separate key prefix.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agent = join_store(address, port, timeout)
        store = dist.PrefixStore(prefix, agent)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout, device_id=device
        )

    def barrier() -> None:
        if backend == "nccl":
            torch.cuda.synchronize()
            dist.barrier(device_ids=[place.local_rank])
            torch.cuda.synchronize()
        else:
            dist.barrier()

    return barrier


def make_context(
    job: "Job", paths: "JobPaths", place: RankPlace, prefix: str | None = None
) -> "tuple[Context, dict[str, Any]]":
    """Build the context: device, process group and manifest; and the environment, which rank 0's parts contain."""
    import torch

    from configs.plans.model_manifest import read_model_manifest
    from configs.workloads import descriptor_of
    from engine.context import Context
    from engine.parallel import flight_recorder as flight
    from engine.parallel.communicator import open_communicators
    from engine.rank import host_usage
    from engine.rank.computing import computing_environment

    torch.set_num_threads(place.threads)
    device, backend = choose_device(place)
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
    environment |= computing_environment(cell, device, _config_of(context))
    return context, environment


def _config_of(context: "Context") -> "ModelConfig | None":
    """Return the model's configuration; None without a model, or of a family that the engine lacks."""
    from configs.families.config import ModelConfig

    if context.manifest is None:
        return None
    try:
        return ModelConfig.parse(context.manifest.config)
    except (ValueError, KeyError, TypeError, AttributeError):  # refused where the model is loaded
        return None
