"""From what a user asks for to a server's settings: model, layout, and how much cache fits.

settings = make_settings(ServerRequest(model="./my-llama", layout=Layout(tp=2)), folder, cache, base)
"""

import os
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from configs.common.execution import Compression, Dtype, Layout
from configs.common.memory import host_memory_available
from configs.plans.serving import BLOCK_POSITIONS, ServingLimits, ServingSettings
from configs.spec.target import LocalTarget
from engine.planner.accelerators import LocalAccelerator
from engine.planner.architecture import Architecture
from engine.planner.local import local_devices, local_machine, machine_of_devices
from engine.planner.memory.inference import inference_memory
from engine.planner.memory.stored import BYTES
from engine.planner.setup import InferenceSetup
from tasks.checks.layouts import check_layout
from tasks.models.sources import load_manifest
from tasks.planning.inputs import model_spec, planned_model

_MEMORY_SHARE = 0.9
"""Of the free memory: the rest is for what the prediction misses."""
_GPU_STEP_TOKENS, _CPU_STEP_TOKENS = 2048, 128
_DEFAULT_LENGTH = 8192
_GIB = 1 << 30


@dataclass(frozen=True)
class ServerRequest:
    """What a user asks for; None: chosen here. max_length: tokens of a sequence, prompt and answer."""

    model: str
    layout: Layout = field(default_factory=Layout)
    dtype: Dtype = "bfloat16"
    compression: tuple[Compression, ...] = ()
    device: str | None = None
    cores_per_rank: int | None = None
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    max_length: int | None = None
    max_sequences: int = 32
    max_step_tokens: int | None = None
    kv_cache_gib: float | None = None
    prefix_caching: bool = True
    batch_invariant: bool = False
    max_queue: int = ServingLimits().max_queue


def make_settings(asked: ServerRequest, folder: Path, cache: Path, base: Path) -> ServingSettings:
    """Find the model, check the layout and size the cache. folder: for sockets and logs; base: of relative paths.

    Raises ValueError for what cannot be served, naming what could be; TransientFetchError as `resolve_model`.
    """
    spec = model_spec(asked.model, base)
    try:
        model = planned_model(spec, 0, cache, base)
    except ValueError as error:
        raise ValueError(str(error).replace("models[0].id: ", "", 1)) from error
    manifest = load_manifest(Path(model.manifest))
    architecture = check_layout(asked.layout, manifest, model.name)
    if architecture.kind != "decoder":
        raise ValueError(f"{model.name}: {architecture.kind.replace('_', '-')}s are not served; use a decoder")
    target = LocalTarget(device="cpu" if asked.device == "cpu" else None)
    devices = local_devices(target)
    ranks = asked.layout.dp * asked.layout.tp * asked.layout.pp
    cores = asked.cores_per_rank or _cores_per_rank(ranks, devices)
    limit = architecture.max_positions
    length = asked.max_length or min(limit or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    if limit is not None and length > limit:
        raise ValueError(f"--max-length {length}: {model.name} has {limit} positions")
    step = asked.max_step_tokens or max(asked.max_sequences, _GPU_STEP_TOKENS if devices else _CPU_STEP_TOKENS)
    if step < asked.max_sequences:
        raise ValueError(f"--max-step-tokens {step}: less than the {asked.max_sequences} of --max-sequences")
    return ServingSettings(
        name=asked.name or model.name,
        manifest=model.manifest,
        folder=str(folder),
        host=asked.host,
        port=asked.port,
        layout=asked.layout,
        dtype=asked.dtype,
        compression=asked.compression,
        device=asked.device,
        cores_per_rank=cores,
        max_length=length,
        max_sequences=asked.max_sequences,
        max_step_tokens=step,
        blocks=_blocks(asked, architecture, devices, (ranks, step, length), cache),
        prefix_caching=asked.prefix_caching,
        batch_invariant=asked.batch_invariant,
        limits=ServingLimits(max_queue=asked.max_queue),
    )


def block_bytes(architecture: Architecture, layout: Layout, dtype: Dtype) -> int:
    """Return the bytes of one block of the cache on the fullest rank."""
    elements = architecture.cache_elements(1, layout.tp) / architecture.layers * ceil(architecture.layers / layout.pp)
    return ceil(BLOCK_POSITIONS * elements * BYTES[dtype])


def _blocks(
    asked: ServerRequest,
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
        found = int(asked.kv_cache_gib * _GIB / one)
    else:
        setup = InferenceSetup(
            architecture=architecture,
            machine=machine_of_devices(devices, ranks, None) if devices else local_machine(cache).estimate,
            layout=asked.layout.model_copy(update={"dp": 1}),
            prompt_tokens=step,
            new_tokens=0,
            compute=asked.dtype,
            weights=asked.dtype,
        )
        own = inference_memory(setup)
        if devices:
            free = int(setup.machine.accelerator.memory_bytes)
        else:
            free = host_memory_available() // ranks
        found = int((_MEMORY_SHARE * free - (own.total - own.kv_cache)) / one)
    if found < longest:
        room = max(0, found) * BLOCK_POSITIONS
        raise ValueError(
            f"the key-value cache has room for {room} tokens, but one sequence has up to {length}; "
            "lower --max-length, use more ranks (--tp, --pp) or raise --kv-cache-gib"
        )
    return found if asked.kv_cache_gib is not None else min(found, wanted)


def _cores_per_rank(ranks: int, devices: tuple[LocalAccelerator, ...]) -> int:
    if len(devices) not in (0, *range(ranks, 1 + len(devices))):
        raise ValueError(f"{ranks} ranks, but {len(devices)} GPUs; use fewer ranks, or --device cpu")
    return max(1, len(os.sched_getaffinity(0)) // ranks)
