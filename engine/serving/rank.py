"""A rank of a server's replica: it computes steps until the HTTP process is gone or says that it ends.

    python -m engine.serving.rank SETTINGS_JSON SOCKET      (RANK, LOCAL_RANK, WORLD_SIZE... as torchrun sets them)

The first rank takes requests from the socket, schedules them, tells the others each step and sends what was chosen.
"""

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.rank.processes import RankPlace, die_with_parent, leave, place_from_environment

if TYPE_CHECKING:
    from configs.plans.job import Job
    from configs.serving.settings import ServingSettings
    from engine.context import Context
    from engine.inference.model import Shard
    from engine.inference.paged import PagedSizes
    from engine.serving.scheduling import SchedulerLimits
    from engine.serving.step_message import StepMessage
    from engine.serving.stepping import StepRunner

_IDLE_SHARE = 0.2
"""Of the time limit of the group: an idle rank tells the others so often that it lives."""


def as_job(settings: "ServingSettings") -> "Job":
    """Return the launch that a replica's ranks are, for what they share with measurements."""
    from configs.plans.job import Job, Measurement
    from configs.spec.cell import Cell
    from configs.spec.measuring import Measuring
    from configs.targets.target import LocalTarget
    from configs.workloads.generate import GenerateWorkload

    layout = settings.layout.model_copy(update={"dp": 1})
    cell = Cell(
        workload=GenerateWorkload(),
        layout=layout,
        dtype=settings.dtype,
        compression=settings.compression,
        cores_per_rank=settings.cores_per_rank,
    )
    return Job(
        name="serve",
        study="serve",
        measuring_pass="timed",
        measuring=Measuring(group_timeout_seconds=settings.group_timeout_seconds),
        target=LocalTarget(device=settings.device),
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),),
        ranks_per_node=layout.ranks,
        timeout_seconds=1,
        manifest=settings.manifest,
        inputs=settings.folder,
        cache=settings.folder,
    )


def sizes_of(settings: "ServingSettings") -> "PagedSizes":
    """Return the sizes of each rank's cache."""
    from engine.inference.paged import PagedSizes

    return PagedSizes(
        settings.blocks, settings.block, settings.max_sequences, settings.max_length, settings.max_step_tokens
    )


def limits_of(settings: "ServingSettings") -> "SchedulerLimits":
    """Return the limits of each step."""
    from engine.serving.scheduling import SchedulerLimits

    return SchedulerLimits(settings.max_sequences, settings.max_step_tokens, settings.max_length)


def serve(settings: "ServingSettings", place: RankPlace, context: "Context", socket_path: Path) -> int:
    """Compute steps until the server ends. Returns the exit code."""
    import torch

    from engine.inference.weights import finalize_weights, load_shard
    from engine.kernels.linear import why_no_cpu_kernels
    from engine.models.weights import DTYPES, check_kind
    from engine.rank.agreement import raise_on_all_ranks
    from engine.serving.step_message import StepMessage
    from engine.serving.stepping import StepRunner

    raise_on_all_ranks(lambda: check_kind(context, "generate"), context)
    shard = raise_on_all_ranks(lambda: load_shard(context, DTYPES[settings.dtype]), context)
    finalize_weights(context)
    cache = raise_on_all_ranks(lambda: shard.new_paged_cache(sizes_of(settings)), context)
    obstacle = batch_dependence(shard, cache.batch_invariant)
    if settings.batch_invariant and obstacle is not None:
        raise ValueError(f"--batch-invariant: {obstacle}")
    runner = StepRunner(shard, context.communicators.pipeline, cache)
    # One rank alone reads what it wrote.
    device = context.device if context.communicators.world.size > 1 else torch.device("cpu")
    limits = limits_of(settings)
    message = StepMessage(
        limits.max_step_tokens, limits.max_sequences, limits.max_length, settings.block, device, limits.max_scored
    )
    runner.warm_up()
    gc.freeze()  # the model and the libraries stay until the end: the collector need not look at them between steps
    context.barrier()
    if place.rank:
        return _follow(runner, message, context)
    ready = {
        "pid": os.getpid(),
        "cache_bytes": cache.nbytes,
        "batch_invariant": obstacle is None,
        "transport": context.communicators.tensor.transport,
        "why_no_kernels": why_no_cpu_kernels() if context.device.type == "cpu" else None,
    }
    return _lead(settings, runner, message, context, socket_path, ready)


def batch_dependence(shard: "Shard", attention_invariant: bool) -> str | None:
    """Return why a request's bits may depend on its company; None if they do not."""
    if not attention_invariant:
        return "attention here is torch's, whose sums depend on the batch (our kernels need float32 or bfloat16, a CPU)"
    paths = {one.path for one in shard.weights.packed()} & {"mkldnn", "torch"}
    if paths:
        return f"products here are of {', '.join(sorted(paths))}, whose sums depend on the batch"
    return None


def _follow(runner: "StepRunner", message: "StepMessage", context: "Context") -> int:
    world = context.communicators.world
    while True:
        message.share(world)
        step = message.read()
        if step is None:
            return 0
        if len(step.tokens):
            runner.run(step)


def _lead(
    settings: "ServingSettings",
    runner: "StepRunner",
    message: "StepMessage",
    context: "Context",
    socket_path: Path,
    ready: dict[str, Any],
) -> int:
    from engine.serving.blocks import BlockPool
    from engine.serving.channel import Channel
    from engine.serving.first_rank import FirstRank
    from engine.serving.scheduling import Scheduler

    world = context.communicators.world
    channel = Channel(socket_path)
    limits = limits_of(settings)
    pool = BlockPool(settings.blocks, settings.block, settings.prefix_caching)
    first = FirstRank(
        channel,
        Scheduler(limits, pool),
        message,
        idle_seconds=_IDLE_SHARE * settings.group_timeout_seconds,
        defers=runner.on_gpu or world.size > 1,
    )
    channel.send({"ready": ready})
    first.lead(runner, world)
    return 0


def main(arguments: list[str]) -> int:
    """Run a rank. Returns the exit code."""
    die_with_parent()
    from configs.common.files.reading import PLAN_BYTES, read_model
    from configs.plans.paths import JobPaths
    from configs.serving.settings import ServingSettings
    from engine.rank.binding import bind, devices_of_ranks
    from engine.rank.joining import make_context

    settings = read_model(Path(arguments[0]), ServingSettings, PLAN_BYTES)
    place, job = place_from_environment(), as_job(settings)
    bind(place, settings.cores_per_rank, devices_of_ranks(place, job.target))
    context, _ = make_context(job, JobPaths(Path(settings.folder)), place)
    return serve(settings, place, context, Path(arguments[1]))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
