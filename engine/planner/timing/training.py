"""Predict one optimizer step: compute by a roofline, communication by the alpha-beta model, and their overlap.

    step_time(setup).seconds                    # priors of the device
    step_time(setup, constants)                 # efficiencies from `timing.fitting`
    traffic(setup)                              # bytes and calls of each collective

A micro-batch is the forward and the backward of its slowest stage. Communication of the forward or the backward hides
behind `overlap` of that phase's compute (the ratio is the same in each layer, because blocks are equal); hidden
communication still costs `contention` of its time. Tensor-parallel all-reduces are between dependent products and are
never hidden. A pipeline of p stages and m micro-batches (1F1B) takes m + p - 1 turns: the bubble is p - 1 of them
(GPipe, arXiv 1811.06965; PipeDream-Flush and Megatron-LM, arXiv 2104.04473).
"""

from typing import get_args

from engine.planner.flops import model_flops
from engine.planner.results import StepTime
from engine.planner.setup import TrainingSetup
from engine.planner.timing.compute import block_seconds, offload_seconds, optimizer_seconds, root_seconds
from engine.planner.timing.constants import DeviceConstants, constants_for
from engine.planner.timing.traffic import Phase, Transfer, traffic

__all__ = ["DeviceConstants", "Transfer", "constants_for", "step_time", "traffic"]


def step_time(setup: TrainingSetup, constants: DeviceConstants | None = None) -> StepTime:
    """Return the seconds of one step of `setup`. Raises ValueError naming the unknown link or number format."""
    constants = constants or constants_for(setup.machine.accelerator)
    blocks, root = block_seconds(setup, constants), root_seconds(setup, constants)
    forward, backward = blocks.forward + root.forward, blocks.backward + blocks.again + root.backward
    turns = setup.accumulation
    total: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
    for transfer in traffic(setup):
        total[transfer.phase] += transfer.seconds(setup.machine, constants.link)
    carried = offload_seconds(setup, constants)
    total["forward"] += carried.forward * turns
    total["backward"] += carried.backward * turns
    behind: dict[Phase, float] = {"forward": forward * turns, "backward": backward * turns, "last_backward": backward}
    exposed = sum(_exposed(seconds, behind.get(phase, 0.0), constants) for phase, seconds in total.items())
    compute = (forward + backward) * turns
    turn = (compute + total["blocking"]) / turns
    return StepTime(
        compute_seconds=compute,
        communication_seconds=sum(total.values()),
        exposed_seconds=exposed,
        bubble_seconds=(setup.layout.pp - 1) * turn,
        optimizer_seconds=optimizer_seconds(setup, constants),
        tokens=setup.trained_tokens,
        model_flops=model_flops(setup.architecture, setup.tokens_per_step, setup.sequence_length),
    )


def _exposed(communication: float, compute: float, constants: DeviceConstants) -> float:
    """Return the exposed communication of a phase."""
    hidden = min(communication, constants.overlap * compute)
    return communication - hidden + constants.contention * hidden
