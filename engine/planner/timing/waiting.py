"""Exposed communication of a step on CPUs: gloo's transfers, the part hidden behind the backward pass, and its cost.

    waits = waits_of(setup, backward_seconds)
    waits.exposed, waits.stolen

FSDP2 and DeepSpeed call gloo in the compute thread, so all of it is exposed. DDP passes buckets to gloo's thread as
gradients appear, one after another over one link; the remainder at the end of the backward pass is exposed. The hidden
part is not free: the CPU work of a transfer (the kernel's copies, the sums) takes time from the computing core. That
share is known from transfers between ranks of one machine, which have no network time; only network time is hidden.
Within one machine nothing is hidden.
"""

from dataclasses import dataclass

from configs.common.execution import Strategy
from configs.hardware.hardware import Machine
from engine.planner.setup import TrainingSetup
from engine.planner.timing.traffic import Transfer, ddp_buckets, elements_of, matrices_of, reversed_weights, traffic

_HANDLED_BYTES: dict[Strategy, tuple[int, int]] = {
    "ddp": (0, 2 * 4), "fsdp": (2 * 4, 2 * 4), "zero1": (0, 10 * 4), "zero2": (0, 10 * 4), "zero3": (2 * 4, 10 * 4),
}  # fmt: skip
"""Bytes per parameter read and written in the compute thread, besides the exchange: per gather of the weight, and per
reduction of its gradient. Counted in the sources: DDP copies gradients into buckets (reducer.cpp); FSDP2 copies
gathered shards out and gradients in (_fsdp_collectives.py); DeepSpeed copies gradients into its bucket, divides,
flattens and copies back, and its own part twice by halves (stage_1_and_2.py). One probe of a step of 12.6 million
parameters, on a busy machine, agrees at 9 GB/s: FSDP2 took 36 ms, ZeRO-1 48 ms of processor time more than DDP; another
had FSDP2 at 13 ms (this project, 2026-11).
"""


_ZERO3_MATRIX_SECONDS = 2e-3
"""Python time of DeepSpeed's hooks around every module, forward and backward, per gathered matrix: processor seconds of
the same step (42 matrices) were about 136 ms more than DDP's, 50 of them copies. One run on a busy machine, so an upper
bound: a quiet one without a shaped link had ZeRO-3 no slower than the other stages, where this has it slowest
(docs/examples/strategies).
"""


@dataclass(frozen=True)
class Waits:
    """Seconds of a step. transfers: all, without overlap; exposed: waiting; stolen: compute time lost to hidden
    ones.
    """

    transfers: float
    exposed: float
    stolen: float = 0.0


def waits_of(setup: TrainingSetup, backward_seconds: float) -> Waits:
    """Predict one step. backward_seconds: of the micro-batch in which gradients are exchanged.

    Raises ValueError naming the unknown link.
    """
    transfers = traffic(setup)
    whole = sum(transfer.seconds(setup.machine) for transfer in transfers)
    summed = [transfer for transfer in transfers if transfer.purpose == "gradients"]
    if setup.layout.strategy != "ddp" or not summed:
        return Waits(whole, whole)
    others = whole - sum(transfer.seconds(setup.machine) for transfer in summed)
    end = 0.0
    for ready, transfer in zip(_ready(setup, backward_seconds), summed, strict=True):
        end = max(end, ready) + transfer.seconds(setup.machine)
    busy = sum(_processor_seconds(transfer, setup.machine) for transfer in summed)
    left = max(0.0, end - backward_seconds)
    hidden = max(0.0, whole - others - left)
    return Waits(whole, others + left, hidden * min(1.0, busy / max(1e-12, whole - others)))


def _ready(setup: TrainingSetup, backward_seconds: float) -> list[float]:
    """Return when each bucket is full, in seconds after the start of the backward pass."""
    weights = reversed_weights(setup)
    found, place, reached = [], 0, 0.0
    for elements in ddp_buckets(setup):
        taken = 0.0
        while place < len(weights) and taken < elements - 0.5:
            reached, size = weights[place]
            taken, place = taken + size, place + 1
        found.append(reached * backward_seconds)
    return found


def _processor_seconds(transfer: Transfer, machine: Machine) -> float:
    """Return a transfer's time between ranks of one machine; the whole time if no link between nodes is known."""
    if machine.between is None or machine.inside is None:
        return transfer.seconds(machine)
    near = machine.model_copy(update={"accelerators": transfer.ranks * transfer.stride})
    return min(transfer.seconds(near), transfer.seconds(machine))


def handling_seconds(setup: TrainingSetup) -> float:
    """Return the seconds of copying weights and gradients to and from communication buffers, in one step."""
    strategy, machine = setup.layout.strategy, setup.machine
    if setup.layout.dp == 1 or strategy not in _HANDLED_BYTES:
        return 0.0
    blocks, root = elements_of(setup)
    gathered, reduced = _HANDLED_BYTES[strategy]
    gathers = setup.accumulation * (blocks * (2 if setup.reshard and strategy == "fsdp" else 1) + root)
    each = strategy in ("zero2", "zero3") or (strategy == "fsdp" and not setup.deferred)
    reductions = (setup.accumulation if each else 1) * (blocks + root)
    hooks = _ZERO3_MATRIX_SECONDS * matrices_of(setup) * setup.accumulation if strategy == "zero3" else 0.0
    return hooks + (gathered * gathers + reduced * reductions) / machine.accelerator.bytes_per_second
