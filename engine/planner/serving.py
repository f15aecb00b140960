"""How large a server can be on this machine: cores of a rank, tokens of a step, blocks of the key-value cache.

sizes = server_sizes(AskedSizes(layout=Layout(tp=2)), architecture, "my-llama", cache)
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from configs.common.execution import Compression, Dtype, Layout
from configs.common.system.cores import usable_cores
from configs.common.system.memory import host_memory_available
from configs.hardware.hardware import Accelerator, Machine
from configs.serving.settings import BLOCK_POSITIONS
from configs.targets.target import LocalTarget
from engine.planner.accelerators import LocalAccelerator, free_memory_bytes
from engine.planner.architecture import Architecture
from engine.planner.local import local_devices, local_machine, machine_of_devices
from engine.planner.memory.inference import inference_memory
from engine.planner.memory.stored import BYTES, OWN_INT4_GROUP, stage_layers_of, stored_as
from engine.planner.setup import InferenceSetup

_MEMORY_SHARE = 0.9
"""Of the free memory: the rest is for what the prediction misses."""
_GPU_STEP_TOKENS, _CPU_STEP_TOKENS = 2048, 128
_DEFAULT_LENGTH = 8192
_GIB = 1 << 30
MORE_ROOM = "lower --max-length, use more ranks (--tp, --pp) or raise --kv-cache-gib"
"""What helps where the cache is too small for one sequence, by the options of `rankwise serve`."""


@dataclass(frozen=True)
class AskedSizes:
    """What a user asks for, by the options of `rankwise serve`; None: chosen here."""

    layout: Layout = field(default_factory=Layout)
    dtype: Dtype = "bfloat16"
    compression: tuple[Compression, ...] = ()
    device: str | None = None
    cores_per_rank: int | None = None
    max_length: int | None = None
    max_sequences: int = 32
    max_step_tokens: int | None = None
    kv_cache_gib: float | None = None


@dataclass(frozen=True)
class ServerSizes:
    """Fields of `configs.serving.settings.ServingSettings`."""

    cores_per_rank: int
    max_length: int
    max_step_tokens: int
    blocks: int


def server_sizes(asked: AskedSizes, architecture: Architecture, name: str, cache: Path) -> ServerSizes:
    """Choose what was not asked for. Raises ValueError, naming the option, for what cannot be served."""
    devices = local_devices(LocalTarget(device="cpu" if asked.device == "cpu" else None))
    ranks = asked.layout.ranks
    cores = asked.cores_per_rank or _cores_per_rank(ranks, devices)
    limit = architecture.position_limit
    length = asked.max_length or min(architecture.max_positions or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    if limit is not None and length > limit:
        raise ValueError(f"--max-length {length}: {name} has {limit} positions")
    step = asked.max_step_tokens or max(asked.max_sequences, _GPU_STEP_TOKENS if devices else _CPU_STEP_TOKENS)
    if step < asked.max_sequences:
        raise ValueError(f"--max-step-tokens {step}: less than the {asked.max_sequences} of --max-sequences")
    return ServerSizes(cores, length, step, _blocks(asked, architecture, devices, (ranks, step, length), cache))


def block_bytes(architecture: Architecture, layout: Layout, dtype: Dtype) -> int:
    """Return the bytes of one block of the cache on the fullest rank: tables leave stages between them more layers.

    Raises ValueError for more stages than layers.
    """
    stages = stage_layers_of(architecture, layout)
    elements = architecture.cache_elements(1, layout.tp) / architecture.layers * max(map(len, stages))
    return ceil(BLOCK_POSITIONS * elements * BYTES[dtype])


def cache_room(
    architecture: Architecture,
    machine: Machine,
    layout: Layout,
    dtype: Dtype,
    step_tokens: int,
    free: float,
    compression: Sequence[Compression] = (),
) -> float:
    """Return the bytes of a rank's free memory that weights and a step of so many tokens leave for its cache."""
    return _MEMORY_SHARE * free - cacheless_bytes(architecture, machine, layout, dtype, step_tokens, compression)


def cacheless_bytes(
    architecture: Architecture,
    machine: Machine,
    layout: Layout,
    dtype: Dtype,
    step_tokens: int,
    compression: Sequence[Compression] = (),
) -> float:
    """Return the bytes that a rank's weights and a step of so many tokens take, without its cache."""
    setup = InferenceSetup(
        architecture=architecture,
        machine=machine,
        layout=layout.model_copy(update={"dp": 1}),
        prompt_tokens=step_tokens,
        new_tokens=0,
        compute=dtype,
        weights=stored_as(compression, dtype),
        quantised_head=True,
        int4_group=OWN_INT4_GROUP,
        int4_zero_points=machine.accelerator.kind != "cpu",
    )
    own = inference_memory(setup)
    return own.total - own.kv_cache


def _blocks(
    asked: AskedSizes,
    architecture: Architecture,
    devices: tuple[LocalAccelerator, ...],
    sizes: tuple[int, int, int],
    cache: Path,
) -> int:
    """Return the blocks of each replica's cache: what fits, and no more than all sequences at their longest need.

    sizes: ranks of all replicas, tokens of a step, tokens of the longest sequence.
    """
    ranks, step, length = sizes
    one = block_bytes(architecture, asked.layout, asked.dtype)
    longest = ceil(length / BLOCK_POSITIONS)
    wanted = longest * asked.max_sequences
    if asked.kv_cache_gib is not None:
        free = _free_of(devices[:ranks], sys.maxsize) if devices else host_memory_available() // ranks
        if asked.kv_cache_gib * _GIB > free:
            raise ValueError(f"--kv-cache-gib {asked.kv_cache_gib:g}: {free / _GIB:.1f} GiB are free for each rank")
        found = int(asked.kv_cache_gib * _GIB / one)
    else:
        machine = _machine_of(devices, ranks) if devices else local_machine(cache).estimate
        if devices:
            free = _free_of(devices[:ranks], int(machine.accelerator.memory_bytes))
        else:
            free = host_memory_available() // ranks
        room = cache_room(architecture, machine, asked.layout, asked.dtype, step, free, asked.compression)
        found = int(room / one)
    if found < longest:
        positions = max(0, found) * BLOCK_POSITIONS
        raise ValueError(
            f"the key-value cache has room for {positions} tokens, but one sequence has up to {length}; {MORE_ROOM}"
        )
    return found if asked.kv_cache_gib is not None else min(found, wanted)


def _machine_of(devices: Sequence[LocalAccelerator], ranks: int) -> Machine:
    """Return a machine of these devices, of which kind and memory count: the catalog need not have them.

    Raises ValueError for a device that neither its driver nor the catalog tells the memory of.
    """
    first = devices[0]
    if first.memory_bytes is None:
        return machine_of_devices(devices, ranks, None)
    device = Accelerator(
        name=first.name, kind=first.kind, memory_bytes=first.memory_bytes, bytes_per_second=1.0,
        peak_flops={"float32": 1.0}, source="its driver; only kind and memory are used",
    )  # fmt: skip
    return Machine(name="this machine", accelerator=device, accelerators=len(devices))


def _free_of(devices: Sequence[LocalAccelerator], unknown: int) -> int:
    """Return the memory that is free on each device of the ranks; `unknown` where no driver tells."""
    free = free_memory_bytes(devices)
    total = min((device.memory_bytes for device in devices if device.memory_bytes is not None), default=unknown)
    return total if free is None else min(free, total)


def _cores_per_rank(ranks: int, devices: tuple[LocalAccelerator, ...]) -> int:
    if len(devices) not in (0, *range(ranks, 1 + len(devices))):
        there = f"{len(devices)} GPU{'' if len(devices) == 1 else 's'}"
        raise ValueError(f"{ranks} ranks, but {there}; use fewer ranks, or --device cpu")
    return max(1, usable_cores() // ranks)
