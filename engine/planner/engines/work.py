"""The time of a generation by an engine: bytes, FLOPs and messages of many points at once, and their seconds.

    work = PhaseWork.of(points)              # arrays, one row a point
    seconds(work, constants)            # constants: name -> value, a scalar or one a point

A decode step takes: reading the weights or multiplying with them (the cube root of the sum of cubes, near the larger of
the two), reading the cache, the fixed time of kernels, scheduler and ranks, and the all-reduces of tensor parallelism.
Attention costs the bytes of keys and values once, and a share for each query head, since heads that share keys still
read them from the caches (Llama 2 and 3 on the same GPU). vLLM's own attention kernel of 2024, which it used on ROCm
and for sliding windows, divides a context among thread blocks only while sequences x heads <= 512
(vllm/attention/ops/paged_attn.py, `use_v1`). Of experts, those are read that some token of the batch is routed to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from configs.common.arrays import Floats
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.schedule import MOST_PHASES, admit
from engine.planner.flops import prompt_attention_flops
from engine.planner.memory.stored import BYTES

_BLEND = 3.0  # exponent of the smooth maximum of reading and multiplying
_UNDIVIDED_ABOVE = 512  # sequences x query heads
_ELEMENT_BYTES = 2  # of activations


@dataclass(frozen=True)
class PhaseWork:
    """Rows: points. Columns of the first four: phases of a schedule, 0 steps where there are fewer."""

    steps: Floats
    sequences: Floats
    cache_bytes: Floats  # of all sequences, read in each step
    undivided: Floats  # 1 where the attention kernel does not divide contexts
    query_ratio: Floats  # query heads over heads of the cache
    paged: Floats
    dense_bytes: Floats
    dense_flops: Floats  # a token
    expert_bytes: Floats
    expert_flops: Floats  # a token, of the experts it is routed to
    expert_share: Floats
    layers: Floats
    ranks: Floats
    message_bytes: Floats  # of one token
    prefilled: Floats  # prompt tokens computed
    attention_flops: Floats  # a prompt token
    bytes_per_second: Floats
    flops: Floats
    link_bytes_per_second: Floats
    queues: Floats
    pressure: Floats

    @classmethod
    def of(cls, points: Sequence[BatchPoint], more_workspace: float = 0.0) -> "PhaseWork":
        """Return the work of points. Raises ValueError for one that does not fit or has an unknown link.

        more_workspace: bytes that the engines take beyond their rules.
        """
        rows = [_row(point, more_workspace) for point in points]
        return cls(**{field.name: np.array([row[field.name] for row in rows]) for field in fields(cls)})

    def __getitem__(self, chosen: Floats) -> "PhaseWork":
        return PhaseWork(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


def _row(point: BatchPoint, more_workspace: float = 0.0) -> dict[str, float | list[float]]:
    """Return a point's figures by the names of `PhaseWork`."""
    architecture, tp, device = point.architecture, point.tp, point.machine.accelerator
    schedule = admit(point, more_workspace)
    phases = [*schedule.phases, *[(0.0, 1.0, 1.0)] * (MOST_PHASES - len(schedule.phases))]
    matrices = [weight for weight in architecture.weights if weight.products and weight.stream == "main"]
    dense = sum(weight.shard(tp) * weight.products for weight in matrices if weight.share >= 1)
    routed = [weight for weight in matrices if weight.share < 1]
    experts = sum(weight.shard(tp) * weight.products for weight in routed)
    share = routed[0].share if routed else 1.0
    element = BYTES[point.weights]
    heads = -(-architecture.heads // tp)
    latent = architecture.kv_elements_per_token is not None
    paged = point.engine == "vllm" and (device.kind == "rocm" or bool(architecture.windows))
    link = point.machine.neighbour
    if tp > 1 and link is None:
        raise ValueError(f"num_gpus: no link between {tp} x {device.name} is known; give machine.inside")
    cached = [architecture.cache_elements(max(1, round(context)), tp) for _, _, context in phases]
    products = "float8" if point.weights == "float8" else "bfloat16"
    return {
        "steps": [steps for steps, _, _ in phases],
        "sequences": [sequences for _, sequences, _ in phases],
        "cache_bytes": [
            sequences * elements * BYTES[point.cache]
            for (_, sequences, _), elements in zip(phases, cached, strict=True)
        ],
        "undivided": [float(paged and sequences * heads > _UNDIVIDED_ABOVE) for _, sequences, _ in phases],
        "query_ratio": 1.0 if latent else heads / -(-architecture.kv_heads // tp),
        "paged": float(paged),
        "dense_bytes": dense * element,
        "dense_flops": 2.0 * dense,
        "expert_bytes": experts * element,
        "expert_flops": 2.0 * experts * share,
        "expert_share": share,
        "layers": float(architecture.layers),
        "ranks": float(tp),
        "message_bytes": float(architecture.hidden * _ELEMENT_BYTES),
        "prefilled": schedule.prefilled,
        "attention_flops": heads * prompt_attention_flops(architecture, point.prompt_tokens),
        "bytes_per_second": device.bytes_per_second,
        "flops": device.flops(products),
        "link_bytes_per_second": link.bytes_per_second if link else 1e11,
        "queues": float(schedule.queues),
        "pressure": schedule.pressure,
    }


def seconds(work: PhaseWork, constants: Mapping[str, Floats | float]) -> Floats:
    """Return the latency of each point's batch, from its start to its last token."""
    bandwidth = work.bytes_per_second * constants["memory"]
    rate = work.flops * constants["matmul"]
    column = _Columns(constants)
    sequences, n = work.sequences, np.newaxis
    step = _blend(work.dense_bytes[:, n] / bandwidth[:, n], sequences * (work.dense_flops / rate)[:, n])
    share = work.expert_share[:, n]
    touched = np.where(share < 1, 1 - (1 - np.minimum(share, 1 - 1e-9)) ** np.maximum(1.0, sequences), 0.0)
    step = step + _blend(
        touched * (work.expert_bytes / bandwidth * constants["expert_times"])[:, n],
        sequences * (work.expert_flops / rate)[:, n],
    )
    reads = constants["cache_reads"] + constants["query_reads"] * work.query_ratio
    reads = reads * np.where(work.paged > 0, constants["paged_times"], 1.0)
    attention = work.cache_bytes * (reads / work.bytes_per_second)[:, n]
    step = step + attention * np.where(work.undivided > 0, column["undivided_times"], 1.0)
    several = work.ranks > 1
    fixed = constants["step_seconds"] + work.layers * constants["layer_seconds"]
    step = step + np.asarray(fixed + several * constants["rank_seconds"] * np.log2(work.ranks))[:, n]
    step = step + column["sequence_seconds"] * sequences
    message = work.message_bytes / (work.link_bytes_per_second * constants["link"])
    calls = several * (2 * work.layers + 1)
    step = step + (calls * constants["all_reduce_seconds"])[:, n] + (calls * 2 * message)[:, n] * sequences
    prompt = (work.dense_flops + work.expert_flops + work.attention_flops) / rate
    prompt = prompt + several * 2 * work.layers * 2 * (work.ranks - 1) / work.ranks * message
    total: Floats = (work.steps * step).sum(axis=1) + work.prefilled * prompt
    return total


class _Columns:
    """Constants as columns, for arrays with phases."""

    def __init__(self, constants: Mapping[str, Floats | float]) -> None:
        self._constants = constants

    def __getitem__(self, name: str) -> Floats:
        value = np.asarray(self._constants[name], dtype=np.float64)
        return value[:, np.newaxis] if value.ndim else value


def _blend(reading: Floats, multiplying: Floats) -> Floats:
    found: Floats = (reading**_BLEND + multiplying**_BLEND) ** (1 / _BLEND)
    return found
