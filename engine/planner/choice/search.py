"""Enumerate every valid distribution of a model over the available ranks, fastest first.

    base = TrainingSetup(find_model("llama-2-7b"), instance("aws/p5.48xlarge"), sequence_length=4096)
    for candidate in ranked(base, ranks=16, global_batch=128)[:5]:
        print(candidate.setup.layout, candidate.tokens_per_second, candidate.usd_per_million_tokens)

`base` gives model, machine, precision and lengths; layout, strategy, micro-batch, accumulation, checkpointing and
offload are searched, at a constant number of sequences per step. Setups that fit are ranked by predicted time. They are
followed, for each layout without one, by the setup with the lowest memory and the reason why it does not fit, closest
first.

Valid: dp x tp x pp = ranks; tp divides attention heads and the feed-forward's width, and either divides the key-value
heads or is a multiple of them; tp stays within a node unless nothing else fits; pp is at most the layers; dp divides
the batch. ZeRO-2, ZeRO-3 and their like do not go with pp (gradients would be reduced at every micro-batch), FSDP does.

Not tried: offload or checkpointing beyond what the same layout and micro-batch need to fit. Both cost time and give
memory only, so what is left out is slower than something that is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from configs.common.execution import Layout, Strategy
from configs.common.printable import plural
from configs.hardware.hardware import Machine
from configs.workloads.descriptor import Axis
from configs.workloads.train import Offload
from engine.planner.memory.inference import inference_memory
from engine.planner.memory.training import training_memory
from engine.planner.results import GenerationTime, Memory, StepTime
from engine.planner.setup import Checkpointing, InferenceSetup, TrainingSetup, precision_for
from engine.planner.timing.inference import generation_time
from engine.planner.timing.training import step_time

STRATEGIES: tuple[Strategy, ...] = ("none", "ddp", "fsdp", "zero1", "zero2", "zero3")
CHECKPOINTINGS: tuple[Checkpointing, ...] = ("none", "selective", "full")
OFFLOADS: tuple[Offload, ...] = ("none", "cpu", "nvme")
# Ordered by time cost. FSDP2 has no offload to NVMe; DDP has none at all.
_OFFLOADS_OF: dict[Strategy, tuple[Offload, ...]] = {
    "none": ("none",),
    "ddp": ("none",),
    "fsdp": ("none", "cpu"),
    "zero1": ("none", "cpu"),
    "zero2": ("none", "cpu"),
    "zero3": ("none", "cpu", "nvme"),
}
_NOT_IN_PIPELINES = ("zero2", "zero3")


@dataclass(frozen=True)
class EvaluatedSetup:
    """One setup with its predictions. Without `fits`, `why_not` gives the reason and there is no time."""

    setup: TrainingSetup | InferenceSetup
    memory: Memory
    time: StepTime | GenerationTime | None
    usd_per_million_tokens: float | None
    fits: bool
    why_not: str | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds of one optimizer step, or of one generated batch."""
        return None if self.time is None else self.time.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Over all ranks: trained, newly generated, or read by an encoder."""
        return None if self.time is None else _throughput(self.time)


@dataclass(frozen=True)
class SearchLimits:
    """Limits of the search. max_memory_bytes: usable bytes of each device, if less than all."""

    axes: tuple[Axis, ...] = ("dp", "tp", "pp")
    strategies: tuple[Strategy, ...] = STRATEGIES
    checkpointing: tuple[Checkpointing, ...] = CHECKPOINTINGS
    offloads: tuple[Offload, ...] = OFFLOADS
    max_memory_bytes: int | None = None


LAUNCHABLE = SearchLimits(axes=("dp",), checkpointing=("none", "full"))
"""What launcher files of DDP, FSDP and DeepSpeed can express; other axes need code in the training script."""


def with_memory_limit(limits: SearchLimits | None, max_memory_bytes: int | None) -> SearchLimits:
    """Return the same limits (default: none) with a memory limit."""
    return replace(limits or SearchLimits(), max_memory_bytes=max_memory_bytes)


def ranked(
    base: TrainingSetup | InferenceSetup,
    ranks: int,
    global_batch: int,
    limits: SearchLimits = SearchLimits(),
) -> list[EvaluatedSetup]:
    """Return all candidates: those that fit by predicted time, then those that do not fit by memory.

    global_batch: sequences of a step, or generated at once, over all ranks.
    Raises ValueError if no layout is valid, naming valid ones, or if a link is not known that all those that fit need.
    """
    if ranks < 1 or global_batch < 1:
        raise ValueError(f"ranks {ranks}, batch {global_batch}: use at least 1 of each")
    unjoined: list[ValueError] = []

    def evaluated(layout: Layout) -> list[EvaluatedSetup]:
        try:
            return list(_candidates(base, layout, global_batch, limits))
        except ValueError as error:  # no link is known that this layout needs; replicas of others may need none
            unjoined.append(error)
            return []

    inside = list(layouts(base, ranks, global_batch, limits))
    found = [each for layout in inside for each in evaluated(layout)]
    if not any(candidate.fits for candidate in found):
        wider = [layout for layout in layouts(base, ranks, global_batch, limits, across_nodes=True)]
        new = [layout for layout in wider if layout not in inside]
        found += [each for layout in new for each in evaluated(layout)]
    if unjoined and not any(candidate.fits for candidate in found):
        raise unjoined[0]
    if not found:
        raise ValueError(
            f"no layout of {plural(ranks, 'rank')} is valid for {base.architecture.name} with a batch of "
            f"{global_batch} over all ranks; use a batch that is a multiple of {ranks}, "
            f"or {plural(_fewer_ranks(base, ranks, global_batch, limits), 'rank')}"
        )
    return sorted(found, key=_order)


def _fewer_ranks(base: TrainingSetup | InferenceSetup, ranks: int, global_batch: int, limits: SearchLimits) -> int:
    """Return the largest number below `ranks` that has a valid layout; 1 where none has.

    Products of valid degrees are tried: every number would take seconds of tens of thousands of ranks, for each of the
    machines and numbers of GPUs that a plan compares.
    """
    replicas = divisors(global_batch) if "dp" in limits.axes else [1]
    groups = divisors(base.architecture.heads) if "tp" in limits.axes else [1]
    stages = base.architecture.most_stages if "pp" in limits.axes else 1
    parts = {dp * tp for dp in replicas for tp in groups if dp * tp < ranks}
    found = {part * pp for part in parts for pp in (1, min(stages, (ranks - 1) // part))}
    valid = (n for n in sorted(found, reverse=True) if any(layouts(base, n, global_batch, limits, across_nodes=True)))
    return next(valid, 1)


def _order(candidate: EvaluatedSetup) -> tuple[bool, float, str]:
    size = candidate.time.seconds if candidate.time else float(candidate.memory.total)
    return not candidate.fits, size, candidate.setup.layout.strategy


def layouts(
    base: TrainingSetup | InferenceSetup,
    ranks: int,
    global_batch: int,
    limits: SearchLimits = SearchLimits(),
    across_nodes: bool = False,
) -> Iterator[Layout]:
    """Yield every valid layout; with `across_nodes` also those whose tensor parallelism spans nodes."""
    training = isinstance(base, TrainingSetup)
    for tp in divisors(ranks) if "tp" in limits.axes else (1,):
        if not base.architecture.splits(tp) or not (across_nodes or _in_node(base.machine, ranks, tp)):
            continue
        for pp in divisors(ranks // tp) if "pp" in limits.axes else (1,):
            dp = ranks // (tp * pp)
            if pp > base.architecture.most_stages or global_batch % dp or (dp > 1 and "dp" not in limits.axes):
                continue
            for strategy in _strategies(limits, dp, pp) if training else ("none",):
                yield Layout(dp=dp, tp=tp, pp=pp, strategy=strategy)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number above 0, smallest first."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def usd_per_million_tokens(machine: Machine, ranks: int, tokens_per_second: float) -> float | None:
    """Return the cost of whole nodes per million tokens; None if their price is not known."""
    if machine.usd_per_hour is None:
        return None
    nodes = -(-ranks // machine.accelerators)
    return nodes * machine.usd_per_hour / 3600 / tokens_per_second * 1e6


def _in_node(machine: Machine, ranks: int, tp: int) -> bool:
    if machine.accelerators % tp == 0 or tp <= ranks <= machine.accelerators:
        return True
    return tp % machine.accelerators == 0 and tp <= machine.joined_ranks  # whole nodes of one link domain


def _strategies(limits: SearchLimits, dp: int, pp: int) -> Iterator[Strategy]:
    for strategy in limits.strategies:
        if dp > 1:
            valid = strategy != "none"
        else:  # sharding has no effect on one rank; FSDP and ZeRO serve only to offload
            valid = bool(_offloads(limits, strategy, dp))
        if valid and not (pp > 1 and strategy in _NOT_IN_PIPELINES):
            yield strategy


def _offloads(limits: SearchLimits, strategy: Strategy, dp: int) -> tuple[Offload, ...]:
    possible = tuple(offload for offload in _OFFLOADS_OF[strategy] if offload in limits.offloads)
    if dp == 1 and strategy != "none":
        return tuple(offload for offload in possible if offload != "none")
    return possible


def _candidates(
    base: TrainingSetup | InferenceSetup,
    layout: Layout,
    global_batch: int,
    limits: SearchLimits,
) -> Iterator[EvaluatedSetup]:
    """Yield the setups of a layout that fit; if none does, the one with the lowest memory."""
    if isinstance(base, InferenceSetup):
        yield evaluate_setup(base.replace(layout=layout, batch=global_batch // layout.dp), limits.max_memory_bytes)
        return
    leanest: tuple[TrainingSetup, Memory, str] | None = None
    any_fits = False
    for setup, memory, why_not in _training_setups(base, layout, global_batch, limits):
        if why_not is None:
            any_fits = True
            yield _candidate(setup, memory, None)
        elif leanest is None or memory.total < leanest[1].total:
            leanest = (setup, memory, why_not)
    if not any_fits and leanest is not None:
        yield _candidate(*leanest)


def _training_setups(
    base: TrainingSetup, layout: Layout, global_batch: int, limits: SearchLimits
) -> Iterator[tuple[TrainingSetup, Memory, str | None]]:
    """Yield, for each micro-batch and offload, the least checkpointing that fits, and the setups tried before it."""
    in_replica = global_batch // layout.dp
    precision = precision_for(layout.strategy, base.precision)
    all_ways: dict[Offload, tuple[Checkpointing, ...]] = dict.fromkeys(
        _offloads(limits, layout.strategy, layout.dp), limits.checkpointing
    )
    hopeful = dict(all_ways)
    for micro_batch in divisors(in_replica):
        if micro_batch == in_replica:
            hopeful = dict(all_ways)  # without accumulation, which needs memory for gradients
        for offload, checkpointings in list(hopeful.items()):
            for number, checkpointing in enumerate(checkpointings):
                setup = TrainingSetup(
                    base.architecture, base.machine, layout, micro_batch, base.sequence_length,
                    in_replica // micro_batch, precision, checkpointing, base.attention, base.optimizer, offload,
                    base.compiled, base.fused_optimizer, base.reshard,
                )  # fmt: skip
                memory = training_memory(setup)
                why_not = misfit(setup, memory, limits.max_memory_bytes)
                yield setup, memory, why_not
                # A setup that does not fit at one micro-batch does not fit at a larger one, except at the last.
                if why_not is None:
                    hopeful[offload] = checkpointings[number:]
                    break
            else:
                del hopeful[offload]
                continue
            if checkpointing == limits.checkpointing[0]:
                break  # no checkpointing needed: more offload cannot be faster


def evaluate_setup(setup: TrainingSetup | InferenceSetup, max_memory_bytes: int | None = None) -> EvaluatedSetup:
    """Predict one setup."""
    memory = training_memory(setup) if isinstance(setup, TrainingSetup) else inference_memory(setup)
    return _candidate(setup, memory, misfit(setup, memory, max_memory_bytes))


def _candidate(setup: TrainingSetup | InferenceSetup, memory: Memory, why_not: str | None) -> EvaluatedSetup:
    if why_not is not None:
        return EvaluatedSetup(setup, memory, None, None, False, why_not)
    time: StepTime | GenerationTime
    if isinstance(setup, TrainingSetup):
        # FSDP2 sums gradients in float32 in our engine, in the file for torch that a plan writes (`torch_settings`) and
        # in the predicted memory.
        wide = setup.wide_reduction or setup.layout.strategy == "fsdp"
        time = step_time(setup.replace(wide_reduction=wide))
    else:
        time = generation_time(setup)
    if setup.machine.accelerator.learned_times != 1:
        time = time.scaled(setup.machine.accelerator.learned_times)
    usd = usd_per_million_tokens(setup.machine, setup.layout.ranks, _throughput(time))
    return EvaluatedSetup(setup, memory, time, usd, True)


def _throughput(time: StepTime | GenerationTime) -> float:
    if isinstance(time, GenerationTime) and time.new_tokens == 0:
        return time.prompt_tokens_per_second
    return time.tokens_per_second


def memory_limit(machine: Machine, max_memory_bytes: int | None = None) -> int:
    """Return the usable bytes of each device."""
    there = machine.accelerator.memory_bytes
    return there if max_memory_bytes is None else min(there, max_memory_bytes)


def misfit(setup: TrainingSetup | InferenceSetup, memory: Memory, max_memory_bytes: int | None = None) -> str | None:
    """Return why a setup does not fit: device memory, host memory or the node's NVMe. None if it fits.

    An unknown host memory is not checked; an unknown NVMe counts as none.
    """
    machine = setup.machine
    if machine.accelerator.kind == "cpu" and (memory.host_bytes or memory.storage_bytes):
        return "offloads to the host's memory, which is where a CPU has everything already"
    limit = memory_limit(machine, max_memory_bytes)
    if memory.total > limit:
        most = _largest_part(memory)
        return f"needs {memory.total / 1e9:,.1f} GB a device of {limit / 1e9:,.1f}; most is {most}"
    on_node = min(setup.layout.ranks, machine.accelerators)
    if machine.host_memory_bytes is not None and memory.host_bytes * on_node > machine.host_memory_bytes:
        need, there = memory.host_bytes * on_node / 1e9, machine.host_memory_bytes / 1e9
        return f"offloads {need:,.0f} GB to a node's memory of {there:,.0f}"
    if machine.storage_bytes is None and memory.storage_bytes:
        return f"offloads {memory.storage_bytes * on_node / 1e9:,.0f} GB to NVMe, and no NVMe is known of this machine"
    if machine.storage_bytes is not None and memory.storage_bytes * on_node > machine.storage_bytes:
        need, there = memory.storage_bytes * on_node / 1e9, machine.storage_bytes / 1e9
        return f"offloads {need:,.0f} GB to a node's NVMe of {there:,.0f}"
    return None


def _largest_part(memory: Memory) -> str:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer states": memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
        "the KV cache": memory.kv_cache,
        "communication buffers": memory.communication,
        "the framework": memory.framework,
    }
    name = max(parts, key=lambda part: parts[part])
    return f"{name} ({parts[name] / 1e9:,.1f} GB)"
