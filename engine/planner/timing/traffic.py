"""Communication of one optimizer step, by strategy and layout: bytes and calls.

    for transfer in traffic(setup):
        print(transfer.purpose, transfer.collective, transfer.calls, transfer.bytes_per_call)

DDP all-reduces gradients once, in the last micro-batch (`no_sync` before). ZeRO-1 keeps whole gradients and so reduces
them once too, then gathers the weights that each rank has updated. ZeRO-2 keeps only a shard of the gradients, so it
reduces them in every micro-batch. ZeRO-3 and FSDP gather the weights for the forward and, having freed them, again for
the backward of every micro-batch (ZeRO, arXiv 1910.02054); once if they are kept (`reshard` False: FSDP's
SHARD_GRAD_OP). FSDP2 frees blocks only: the root (tables, head) stays. Hybrid sharding does so within a node, and sums
shards between nodes. Gradients are sent in the format of the multiplied weights, or in float32 with `wide_reduction`.

DeepSpeed 0.19.8: stages 1 and 2 all-reduce whole buckets and each rank keeps its part (`average_tensor` of
stage_1_and_2.py with `use_multi_rank_bucket_allreduce`, its default), in the stream that computes: `overlap_comm` is
off in these stages unless it is set (config.py, `overlap_comm_valid`), which neither our engine nor our files for
DeepSpeed do. On CPUs stage 3 keeps weights gathered until their next use, if they are fewer than `max_reuse_distance`.

Tensor parallelism sums a block's two outputs forward and the gradients of its two inputs backward (Megatron-LM,
arXiv 1909.08053): four all-reduces a layer, six where the forward is computed again.
"""

from dataclasses import dataclass
from typing import Literal

from configs.hardware.hardware import Machine
from engine.planner.setup import TrainingSetup
from engine.planner.timing import collectives

TrafficCollective = Literal["all_reduce", "all_gather", "reduce_scatter", "point_to_point"]
Phase = Literal["forward", "backward", "last_backward", "step", "blocking"]

DDP_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's bucket_cap_mb, which are MiB (nn/parallel/distributed.py)
_DDP_FIRST_BUCKET_BYTES = 2**20  # small, so that the first all-reduce begins early
_DEEPSPEED_BUCKET_ELEMENTS = 5e8  # reduce_bucket_size and allgather_bucket_size
_DEEPSPEED_REUSE_ELEMENTS = 1e9  # stage3_max_reuse_distance: between two uses, forward to backward
_SECONDS = {
    "all_reduce": collectives.all_reduce_seconds,
    "all_gather": collectives.all_gather_seconds,
    "reduce_scatter": collectives.reduce_scatter_seconds,
    "point_to_point": collectives.point_to_point_seconds,
}


@dataclass(frozen=True)
class Transfer:
    """Calls of one kind in a step, seen from one rank.

    bytes_per_call: as in `collectives`. phase: the computation that can hide it: the forward or backward of every
    micro-batch, or the backward of the last one; `step` (after the last backward) and `blocking` are never hidden.
    """

    purpose: str
    collective: TrafficCollective
    bytes_per_call: float
    calls: int
    ranks: int
    stride: int
    phase: Phase

    @property
    def bytes(self) -> float:
        """Bytes in the whole step."""
        return self.bytes_per_call * self.calls

    def seconds(self, machine: Machine, share: float = 1.0) -> float:
        """Return seconds of all calls, one after another."""
        call = _SECONDS[self.collective]
        return self.calls * call(self.bytes_per_call, self.ranks, machine, stride=self.stride, share=share)


def weight_bytes(setup: TrainingSetup) -> int:
    """Return bytes of one parameter as multiplied and gathered."""
    return 4 if setup.precision in ("float32", "bfloat16_autocast") else 2


def activation_bytes(setup: TrainingSetup) -> int:
    """Return bytes of one element of the activations."""
    return 4 if setup.precision == "float32" else 2


def traffic(setup: TrainingSetup) -> list[Transfer]:
    """Return all transfers of a step; empty on one rank."""
    return [*_data_parallel(setup), *_tensor_parallel(setup), *_pipeline(setup)]


def _data_parallel(setup: TrainingSetup) -> list[Transfer]:
    layout, strategy = setup.layout, setup.layout.strategy
    if layout.dp == 1 or strategy == "none":
        return []
    if strategy == "ddp":
        width = weight_bytes(setup)
        found = (_transfer(setup, "gradients", "all_reduce", "last_backward", n * width) for n in ddp_buckets(setup))
        return list(found)
    if strategy in ("zero1", "zero2"):
        return _zero12(setup)
    return _zero3(setup) if strategy == "zero3" and on_gloo(setup) else _fully_sharded(setup)


def _transfer(
    setup: TrainingSetup, purpose: str, collective: TrafficCollective, phase: Phase, size: float, calls: int = 1
) -> Transfer:
    """Return a transfer among all replicas."""
    return Transfer(purpose, collective, size, calls, setup.layout.dp, setup.layout.tp, phase)


def on_gloo(setup: TrainingSetup) -> bool:
    """Return whether ranks on CPUs communicate through gloo."""
    return setup.machine.accelerator.kind == "cpu"


def elements_of(setup: TrainingSetup) -> tuple[float, float]:
    """Return elements of this rank's stage before sharding: in blocks, and in the root."""
    whole = setup.architecture.rank_parameters(setup.layout.tp) / setup.layout.pp
    root = sum(
        weight.shard(setup.layout.tp) * weight.copies for weight in setup.architecture.weights if not weight.block
    )
    outside = min(whole, root / setup.layout.pp)
    return whole - outside, outside


def ddp_buckets(setup: TrainingSetup) -> list[float]:
    """Return elements of DDP's buckets in the order of the backward pass; a weight is never split."""
    width = weight_bytes(setup)
    cap, filled, buckets = float(_DDP_FIRST_BUCKET_BYTES), 0.0, []
    for _, size in reversed_weights(setup):
        filled += size
        if filled * width >= cap:
            buckets.append(filled)
            filled, cap = 0.0, float(DDP_BUCKET_BYTES)
    return [*buckets, filled] if filled else buckets


def reversed_weights(setup: TrainingSetup) -> list[tuple[float, float]]:
    """Return (completed share of the backward pass, elements) of weights, in the order of their gradients.

    The share is that of the products' FLOPs; a tied head's gradient waits for the embedding's. A block is approximated
    by eight weights of equal size, which is accurate enough for bucket borders.
    """
    architecture, layout = setup.architecture, setup.layout
    layers = max(1, architecture.layers // layout.pp)
    blocks, _ = elements_of(setup)
    heads = [one for one in architecture.weights if one.role == "head"]
    head = sum(one.shard(layout.tp) * one.products for one in heads)
    whole = max(1.0, blocks + head)
    found = [(head / whole, float(one.shard(layout.tp) * one.copies)) for one in heads if one.copies]
    found += [((head + blocks * (n // 8 + 1) / layers) / whole, blocks / layers / 8) for n in range(layers * 8)]
    tables = [one for one in architecture.weights if not one.block and one.role != "head"]
    return [*found, *((1.0, float(one.shard(layout.tp) * one.copies)) for one in tables)]


def _zero12(setup: TrainingSetup) -> list[Transfer]:
    every = setup.accumulation
    tensor = setup.architecture.rank_parameters(setup.layout.tp) / setup.layout.pp * weight_bytes(setup)
    buckets = max(1, round(tensor / weight_bytes(setup) / _DEEPSPEED_BUCKET_ELEMENTS))
    # Stage 1 reduces after the backward pass (`reduce_gradients`), stage 2 between its operators.
    phase: Phase = "blocking" if setup.layout.strategy == "zero2" else "step"
    times = every if setup.layout.strategy == "zero2" else 1
    return [
        _transfer(setup, "gradients", "all_reduce", phase, tensor / buckets, buckets * times),
        _transfer(setup, "updated weights", "all_gather", "step", tensor / buckets, buckets),
    ]


def matrices_of(setup: TrainingSetup) -> int:
    """Return the matrices of this rank's blocks, which ZeRO-3 gathers one by one."""
    tall = (weight.copies for weight in setup.architecture.weights if weight.block and weight.role == "matrix")
    return max(1, sum(tall) // setup.layout.pp)


def _zero3(setup: TrainingSetup) -> list[Transfer]:
    """Return ZeRO-3's transfers. On CPUs: 45 calls were counted in a step of a model of 42 matrices."""
    width, every, matrices = weight_bytes(setup), setup.accumulation, matrices_of(setup)
    blocks, root = elements_of(setup)
    again = max(0.0, blocks - _DEEPSPEED_REUSE_ELEMENTS / 2)
    one = blocks * width / matrices
    found = [
        _transfer(setup, "weights", "all_gather", "forward", one, matrices * every),
        _transfer(setup, "weights of the root", "all_gather", "forward", root * width, every),
        _transfer(setup, "gradients", "reduce_scatter", "backward", (blocks + root) * width, every),
    ]
    if again:
        calls = max(1, round(again * width / one))
        found.append(_transfer(setup, "weights again", "all_gather", "backward", one, calls * every))
    return found


def _fully_sharded(setup: TrainingSetup) -> list[Transfer]:
    layout, every = setup.layout, setup.accumulation
    width, layers = weight_bytes(setup), max(1, setup.architecture.layers // layout.pp)
    blocks, root = elements_of(setup)
    shards, replicas = setup.shards, layout.dp // setup.shards
    reduced = 4 if setup.wide_reduction else width
    times = 1 if setup.deferred else every

    def parts(
        purpose: str, kind: TrafficCollective, phase: Phase, size: int, count: int, root_too: bool
    ) -> list[Transfer]:
        found = [Transfer(purpose, kind, blocks * size / layers, layers * count, shards, layout.tp, phase)]
        if root_too and root:
            found.append(Transfer(purpose, kind, root * size, count, shards, layout.tp, phase))
        return found

    found: list[Transfer] = []
    if shards > 1:
        found += parts("weights", "all_gather", "forward", width, every, root_too=True)
        if setup.reshard:
            again = layout.strategy == "zero3"  # FSDP2's root stays
            found += parts("weights again", "all_gather", "backward", width, every, root_too=again)
        found += parts("gradients", "reduce_scatter", "backward", reduced, times, root_too=True)
    if replicas > 1:
        size, stride = reduced / shards, layout.tp * shards
        found += [
            Transfer("shards of gradients", "all_reduce", blocks * size / layers, layers * times, replicas, stride,
                     "backward"),
            Transfer("shards of gradients", "all_reduce", root * size, times, replicas, stride, "backward"),
        ]  # fmt: skip
    return found


def step_network_bytes(setup: TrainingSetup) -> float | None:
    """Return the bytes that one node sends to other nodes in a step; None on one node."""
    machine, found, several = setup.machine, 0.0, False
    for transfer in traffic(setup):
        members = min(transfer.ranks, max(1, machine.joined_ranks // transfer.stride))
        if transfer.ranks <= members:
            continue
        several = True
        # A ring leaves a node (or a link domain of nodes) through one of its members; each group in it has a ring.
        rings = max(1, min(machine.joined_ranks, setup.layout.ranks) // members)
        found += rings * transfer.bytes * _sent(transfer.collective, transfer.ranks, on_gloo(setup))
    return found * machine.accelerators / machine.joined_ranks if several else None


def _sent(collective: TrafficCollective, ranks: int, gloo: bool) -> float:
    """Return the bytes that each rank of a ring sends for a message. gloo's reduce-scatter is an all-reduce of the
    whole.
    """
    if collective == "point_to_point":
        return 1.0
    twice = collective == "all_reduce" or (gloo and collective == "reduce_scatter")
    return (2 if twice else 1) * (ranks - 1) / ranks


def _tensor_parallel(setup: TrainingSetup) -> list[Transfer]:
    layout, architecture = setup.layout, setup.architecture
    if layout.tp == 1:
        return []
    message = setup.micro_batch * setup.sequence_length * architecture.hidden * activation_bytes(setup)
    # A block has two all-reduces of outputs, a cross-attention block three; the same number in the backward pass.
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
