"""What the ranks send each other in one optimizer step, by strategy and layout: bytes and calls.

    for transfer in traffic(setup):
        print(transfer.purpose, transfer.collective, transfer.calls, transfer.bytes_per_call)

DDP all-reduces gradients once, in the last micro-batch (`no_sync` before). ZeRO-1 keeps whole gradients and so reduces
them once too, then gathers the weights that each rank has updated. ZeRO-2 keeps only a shard of the gradients: a
micro-batch's whole gradients have no place to wait for the next, so it reduces them in every micro-batch. ZeRO-3 and
FSDP gather the weights for the forward and, having freed them, again for the backward of every micro-batch (ZeRO,
arXiv 1910.02054); once where they are kept (`reshard` False: FSDP's SHARD_GRAD_OP). Gradients travel in the format of
the weights that were multiplied; a reduction in float32, which the memory model makes room for, would double them.
Tensor parallelism sums a block's two outputs forward and the gradients of its two inputs backward (Megatron-LM,
arXiv 1909.08053): four all-reduces a layer, six where the forward is computed again.
"""

from dataclasses import dataclass
from typing import Literal

from configs.hardware import Machine
from engine.planner.setup import TrainingSetup
from engine.planner.timing import collectives

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "point_to_point"]
Phase = Literal["forward", "backward", "last_backward", "step", "blocking"]

_DDP_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's bucket_cap_mb
_DEEPSPEED_BUCKET_ELEMENTS = 5e8  # reduce_bucket_size and allgather_bucket_size
_SECONDS = {
    "all_reduce": collectives.all_reduce_seconds,
    "all_gather": collectives.all_gather_seconds,
    "reduce_scatter": collectives.reduce_scatter_seconds,
    "point_to_point": collectives.point_to_point_seconds,
}


@dataclass(frozen=True)
class Transfer:
    """Calls of one kind in a step, seen from one rank.

    bytes_per_call: as in `collectives`. phase: what it can hide behind: the forward or backward of every micro-batch,
    the backward of the last one; `step` (after the last backward) and `blocking` hide behind nothing.
    """

    purpose: str
    collective: Collective
    bytes_per_call: float
    calls: int
    ranks: int
    stride: int
    phase: Phase

    @property
    def bytes(self) -> float:
        """In the whole step."""
        return self.bytes_per_call * self.calls

    def seconds(self, machine: Machine, share: float = 1.0) -> float:
        """Of all calls, one after another."""
        call = _SECONDS[self.collective]
        return self.calls * call(self.bytes_per_call, self.ranks, machine, stride=self.stride, share=share)


def weight_bytes(setup: TrainingSetup) -> int:
    """Of one parameter as it is multiplied and gathered."""
    return 4 if setup.precision in ("float32", "bfloat16_autocast") else 2


def activation_bytes(setup: TrainingSetup) -> int:
    """Of one element of the activations."""
    return 4 if setup.precision == "float32" else 2


def traffic(setup: TrainingSetup) -> list[Transfer]:
    """All transfers of a step; empty on one rank."""
    return [*_data_parallel(setup), *_tensor_parallel(setup), *_pipeline(setup)]


def _data_parallel(setup: TrainingSetup) -> list[Transfer]:
    layout, strategy = setup.layout, setup.layout.strategy
    if layout.dp == 1 or strategy == "none":
        return []
    units = max(1, setup.architecture.layers // layout.pp) + 1  # blocks, and the root with the tables
    tensor = setup.architecture.rank_parameters(layout.tp) / layout.pp * weight_bytes(setup)

    def transfer(purpose: str, collective: Collective, phase: Phase, times: int, calls: int = units) -> Transfer:
        return Transfer(purpose, collective, tensor / calls, calls * times, layout.dp, layout.tp, phase)

    every = setup.accumulation
    if strategy == "ddp":
        buckets = max(1, round(tensor / _DDP_BUCKET_BYTES))
        return [transfer("gradients", "all_reduce", "last_backward", 1, buckets)]
    if strategy in ("zero1", "zero2"):
        buckets = max(1, round(tensor / weight_bytes(setup) / _DEEPSPEED_BUCKET_ELEMENTS))
        phase: Phase = "backward" if strategy == "zero2" else "last_backward"
        times = every if strategy == "zero2" else 1
        return [
            transfer("gradients", "reduce_scatter", phase, times, buckets),
            transfer("updated weights", "all_gather", "step", 1, buckets),
        ]
    gathers = [transfer("weights", "all_gather", "forward", every)]
    if setup.reshard:
        gathers.append(transfer("weights again", "all_gather", "backward", every))
    return [*gathers, transfer("gradients", "reduce_scatter", "backward", every)]


def _tensor_parallel(setup: TrainingSetup) -> list[Transfer]:
    layout, architecture = setup.layout, setup.architecture
    if layout.tp == 1:
        return []
    message = setup.micro_batch * setup.sequence_length * architecture.hidden * activation_bytes(setup)
    # A block has two outputs to sum, a decoder's block that looks at an encoder three; each once more backwards.
    crossed = architecture.decoder_layers if architecture.kind == "encoder_decoder" else 0
    outputs = -(-(2 * architecture.layers + crossed) // layout.pp)
    calls = (3 if setup.checkpointing == "full" else 2) * outputs * setup.accumulation
    return [Transfer("sums of blocks", "all_reduce", message, calls, layout.tp, 1, "blocking")]


def _pipeline(setup: TrainingSetup) -> list[Transfer]:
    layout = setup.layout
    if layout.pp == 1:
        return []
    message = setup.micro_batch * setup.sequence_length * setup.architecture.hidden * activation_bytes(setup)
    stride = layout.tp * layout.dp
    return [
        Transfer("stages' borders", "point_to_point", message, 2 * setup.accumulation, layout.pp, stride, "blocking")
    ]
