"""Which sequences of a batch an engine decodes together, where the cache does not hold all of them.

    schedule = admit(point)         # Schedule: phases of (steps, sequences, mean context), prompt tokens computed

TensorRT-LLM reserves a sequence's whole context before it starts it (`GUARANTEED_NO_EVICT`), so equal sequences run in
waves. vLLM starts what its prompts need; when the cache is full it preempts the latest sequence, frees its blocks and
computes it again later (`PreemptionMode.RECOMPUTE`). The cache has what the engine may use of the memory, less weights
and workspace; what a sequence takes of it with sliding windows is in `engine.planner.engines.kept`.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from engine.planner.engines.kept import kept_tokens
from engine.planner.engines.point import BatchPoint

MOST_PHASES = 6
_CHUNKS = 16  # of a sequence's new tokens, in which preemption is simulated
_MOST_TURNS = 4000
MOST_SEQUENCES = 100_000
"""Largest batch that is simulated: far above what an engine runs at once."""


@dataclass(frozen=True)
class _CacheRule:
    """device: share of memory an engine may use; free: share of what is left that becomes cache; workspace: bytes.

    reserves: the whole context is reserved before a sequence starts.
    """

    device: float
    free: float
    workspace: float
    reserves: bool


# vLLM: gpu_memory_utilization 0.9; TensorRT-LLM: kv_cache_free_gpu_memory_fraction 0.9 (both engines' documentation).
# Workspaces: of a prefill and of NCCL; from where published rows begin to queue, to half a GB.
WORKSPACE_SIGMA = 1.5e9
"""Of the workspace, in bytes: by how much that of a model which no row has differs from the rule."""
_RESERVES = _CacheRule(1.0, 0.9, 3.5e9, True)
_PREEMPTS = _CacheRule(0.9, 1.0, 2.5e9, False)
_RULES = {"tensorrt-llm": _RESERVES, "rankwise": _RESERVES, "transformers": _RESERVES, "llama.cpp": _RESERVES}


@dataclass(frozen=True)
class Schedule:
    """phases: (steps, sequences at once, mean context). prefilled: prompt tokens computed, those again included."""

    phases: tuple[tuple[float, float, float], ...]
    prefilled: float
    queues: bool
    pressure: float  # tokens of the batch over those that the cache holds


def cache_tokens(point: BatchPoint, more_workspace: float = 0.0) -> float:
    """Return how many tokens the cache of the fullest rank holds in all layers. Raises ValueError where the weights do
    not fit.

    more_workspace: bytes that an engine takes beyond its rule.
    """
    rule = _RULES.get(point.engine, _PREEMPTS)
    device = point.machine.accelerator
    left = rule.device * device.memory_bytes - point.weight_bytes - rule.workspace - more_workspace
    each = point.cache_bytes_per_token
    # A sequence must fit: rows that were measured prove that an engine found room, with a smaller workspace.
    least = rule.device * device.memory_bytes - point.weight_bytes
    if least <= 0:
        raise ValueError(
            f"num_gpus: {point.weight_bytes / 1e9:.1f} GB of weights a GPU do not fit in the "
            f"{device.memory_bytes / 1e9:.1f} GB of {device.name}; use more GPUs"
        )
    return max(left, 0.02 * least) * rule.free / each if each else float("inf")


def admit(point: BatchPoint, more_workspace: float = 0.0) -> Schedule:
    """Return the phases of a batch whose sequences all start together."""
    room = cache_tokens(point, more_workspace)
    pressure = kept_by_batch(point) / room
    if pressure <= 1:
        phase = (float(point.new_tokens), float(point.batch), point.prompt_tokens + point.new_tokens / 2)
        return Schedule((phase,), float(point.batch * point.prompt_tokens), False, pressure)
    if _RULES.get(point.engine, _PREEMPTS).reserves:
        return Schedule(tuple(_waves(point, room)), float(point.batch * point.prompt_tokens), True, pressure)
    phases, prefilled = _preempting(point, room)
    return Schedule(tuple(_merged(phases)), prefilled, True, pressure)


def kept_by_batch(point: BatchPoint) -> float:
    """Return the room of all sequences, complete, in the unit of `cache_tokens`."""
    return point.batch * kept_tokens(point, point.context)


def _waves(point: BatchPoint, room: float) -> list[tuple[float, float, float]]:
    """Return full waves and the rest."""
    at_once = max(1, int(room / kept_tokens(point, point.context)))
    full, rest = divmod(point.batch, at_once)
    context = point.prompt_tokens + point.new_tokens / 2
    waves = [(float(point.new_tokens * full), float(at_once), context)] if full else []
    return [*waves, (float(point.new_tokens), float(rest), context)] if rest else waves


def _preempting(point: BatchPoint, room: float) -> tuple[list[tuple[float, float, float]], float]:
    """Simulate admission and preemption in chunks of steps."""
    prompt, new = point.prompt_tokens, point.new_tokens
    if point.batch > MOST_SEQUENCES:
        raise ValueError(f"batch_size: {point.batch} sequences at once, expected at most {MOST_SEQUENCES:,}")
    waiting, running = [0] * point.batch, list[int]()
    phases, prefilled, chunk = [], 0.0, max(1, new // _CHUNKS)

    @cache
    def kept(made: int) -> float:
        return kept_tokens(point, prompt + made)

    for _ in range(_MOST_TURNS):
        used = sum(map(kept, running))
        while waiting and (used + kept(waiting[0]) <= room or not running):
            made = waiting.pop(0)
            running.append(made)
            prefilled += prompt + made
            used += kept(made)
        grown = sum(kept(made + chunk) for made in running)
        while len(running) > 1 and grown > room:
            made = running.pop()
            waiting.insert(0, made)
            grown -= kept(made + chunk)
        steps = min(chunk, *(new - made for made in running))
        phases.append((float(steps), float(len(running)), prompt + sum(running) / len(running) + steps / 2))
        running = [made + steps for made in running if made + steps < new]
        if not waiting and not running:
            return phases, prefilled
    raise ValueError(
        f"batch_size: {point.batch} sequences at once are too many to simulate on this much memory; use fewer"
    )


def _merged(phases: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Return at most `MOST_PHASES` phases with the same steps, sequences and contexts."""
    if len(phases) <= MOST_PHASES:
        return phases
    found = []
    for part in np.array_split(np.array(phases), MOST_PHASES):
        steps = float(part[:, 0].sum())
        sequences = float((part[:, 0] * part[:, 1]).sum())
        found.append((steps, sequences / steps, float((part[:, 0] * part[:, 1] * part[:, 2]).sum() / sequences)))
    return found
