"""What a step on CPUs waits for: gloo's transfers, what of them hides behind the backward pass, and what they cost.

    waits = waits_of(setup, backward_seconds)
    waits.exposed, waits.stolen

FSDP2 and DeepSpeed call gloo in the thread that computes: all of it is waited for. DDP hands buckets to gloo's thread
as gradients appear, one after another over one link; what is left of that when the backward pass ends is waited for.
The rest was not free: what the processor does for a transfer (the kernel's copies, the sums), it takes from the core
that computes. That share is known from the transfer between ranks of one machine, where there is no wire to wait for;
only the wire hides. Within one machine therefore nothing does.
"""

from dataclasses import dataclass

from configs.cell import Strategy
from configs.hardware import Machine
from engine.planner.setup import TrainingSetup
from engine.planner.timing.traffic import Transfer, ddp_buckets, elements_of, matrices_of, reversed_weights, traffic

_HANDLED_BYTES: dict[Strategy, tuple[int, int]] = {
    "ddp": (0, 2 * 4), "fsdp": (2 * 4, 2 * 4), "zero1": (0, 10 * 4), "zero2": (0, 10 * 4), "zero3": (2 * 4, 10 * 4),
}  # fmt: skip
"""Of a parameter, read and written in the thread that computes, besides the exchange itself: for each time that it is
gathered, and for each time that its gradient is reduced. Counted in the sources: DDP copies gradients into buckets
(reducer.cpp); FSDP2 copies gathered shards out and gradients in (_fsdp_collectives.py); DeepSpeed copies gradients into
its bucket, divides, flattens and copies back, and its own part twice by halves (stage_1_and_2.py). One probe of a step
of 12.6 million parameters, on a busy machine, is near that at 9 GB/s: FSDP2 took 36 ms, ZeRO-1 48 ms of processor time
more than DDP; another had FSDP2 at 13 ms (this project, 2026-11)."""


_ZERO3_MATRIX_SECONDS = 2e-3
"""What DeepSpeed's hooks around every module take in Python, there and back, by matrix that is gathered: processor
seconds of the same step (42 matrices) were about 136 ms more than DDP's, 50 of them copies. One run on a busy machine,
so an upper end: a quiet one without a shaped link had ZeRO-3 no slower than the other stages, where this has it slowest
(docs/examples/strategies)."""


@dataclass(frozen=True)
class Waits:
    """Seconds of a step. transfers: of all, were nothing else to do; exposed: waited for; stolen: taken from computing
    by those that hide."""

    transfers: float
    exposed: float
    stolen: float = 0.0


def waits_of(setup: TrainingSetup, backward_seconds: float) -> Waits:
    """Of one step. backward_seconds: of the micro-batch in which gradients are exchanged.

    Raises ValueError naming the link that is not known.
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
    """When each bucket is full, in seconds after the backward pass began."""
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
    """Of a transfer were its ranks on one machine; all of it where no link between nodes is known."""
    if machine.between is None or machine.inside is None:
        return transfer.seconds(machine)
    near = machine.model_copy(update={"accelerators": transfer.ranks * transfer.stride})
    return min(transfer.seconds(near), transfer.seconds(machine))


def handling_seconds(setup: TrainingSetup) -> float:
    """Of copying weights and gradients in and out of what is exchanged, in one step."""
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
