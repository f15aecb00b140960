"""Traffic of a forecast: transfers of a step by ranks, and their latency and transfer time over links.

traffic = ddp_traffic(parameters)
latency, transfer = latency_and_transfer(traffic(64)[0], machine)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from configs.hardware.hardware import Machine
from engine.planner.timing.collectives import ring
from engine.planner.timing.traffic import DDP_BUCKET_BYTES, Transfer

Traffic = Callable[[int], Sequence[Transfer]]
"""Ranks -> transfers of one step."""


def ddp_traffic(parameters: float) -> Traffic:
    """Return DistributedDataParallel's traffic of a step: every gradient, in float32, in buckets.

    None without parameters.
    """
    gradients = 4.0 * parameters
    buckets = max(1, round(gradients / DDP_BUCKET_BYTES))

    def traffic(ranks: int) -> Sequence[Transfer]:
        if ranks == 1 or not parameters:
            return ()
        return (Transfer("gradients", "all_reduce", gradients / buckets, buckets, ranks, 1, "last_backward"),)

    return traffic


def latency_and_transfer(transfer: Transfer, machine: Machine) -> tuple[float, float]:
    """Return the seconds of a transfer due to latency, and due to bandwidth.

    On CPUs the collectives are gloo's, whose all-reduce is always a ring (gloo/allreduce.cc); others choose a tree if
    that is faster.
    """
    if machine.accelerator.kind == "cpu" and transfer.collective == "all_reduce" and transfer.ranks > 1:
        group = ring(transfer.ranks, machine, transfer.stride)
        bytes_around = 2 * (transfer.ranks - 1) / transfer.ranks * transfer.bytes
        return transfer.calls * 2 * group.hops_seconds, bytes_around / group.bytes_per_second
    latency = replace(transfer, bytes_per_call=0.0).seconds(machine)
    return latency, max(0.0, transfer.seconds(machine) - latency)


def joined_alike(machine: Machine, ranks: int) -> Machine:
    """Return this many ranks, each pair joined by the link within the measured machine."""
    return machine.model_copy(update={"accelerators": max(ranks, machine.accelerators)})
