"""Check whether a setup fits, and find the smallest change that makes it fit.

    fits(setup, memory_bytes)                              # TrainingSetup or InferenceSetup
    change = smallest_change(setup, memory_bytes)          # None: it fits already, or nothing helps
    change.sentence                  # "full checkpointing brings 31.2 GB to 19.8 of 24.0"

Changes with fewer steps come first; among equals, the one that costs least speed. Training, from cheap to expensive:
micro-batches that are accumulated (the same products, smaller ones), checkpointing (a quarter to a third more
products), sharding (more traffic), more ranks (more hardware), offload (the host's bandwidth). Inference: more ranks of
tensor parallelism in a node, or of a pipeline where those do not suffice, weights of 8 bits, both; only then a shorter
context and a smaller batch. In training the work of a step is unchanged; for inference the sentence names the
reductions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from configs.common.execution import Strategy
from engine.planner.memory.inference import inference_memory
from engine.planner.memory.training import training_memory
from engine.planner.results import Memory
from engine.planner.setup import InferenceSetup, TrainingSetup, precision_for

_GB = 1e9
_MOST_RANKS = 4096
_KEEP_THE_WORK = 2  # inference steps that change neither prompts nor batch
Setup = TrainingSetup | InferenceSetup
S = TypeVar("S", bound=Setup)
# One way to save memory: its name, and setups from its smallest to its largest extent.
SetupSteps = Callable[[S], Iterator[tuple[str, S]]]


@dataclass(frozen=True)
class SetupChange:
    """A setup that fits, its changes, and the device's bytes before and after."""

    setup: Setup
    words: tuple[str, ...]
    before_bytes: int
    after_bytes: int
    memory_bytes: float

    @property
    def named(self) -> str:
        """All changes, in words."""
        *first, last = self.words
        return f"{', '.join(first)} and {last}" if first else last

    @property
    def sentence(self) -> str:
        """One sentence for the user."""
        before, after, limit = (size / _GB for size in (self.before_bytes, self.after_bytes, self.memory_bytes))
        verb = "brings" if len(self.words) == 1 else "bring"
        return f"{self.named} {verb} {before:,.1f} GB to {after:,.1f} of {limit:,.1f}"


def memory_of(setup: Setup) -> Memory:
    """Return the peak of training or of inference."""
    return training_memory(setup) if isinstance(setup, TrainingSetup) else inference_memory(setup)


def fits(setup: Setup, memory_bytes: float) -> bool:
    """Return whether the device, and host and storage if known, hold it."""
    return _holds(setup, memory_of(setup), memory_bytes)


def _holds(setup: Setup, memory: Memory, memory_bytes: float) -> bool:
    machine = setup.machine
    here = min(machine.accelerators, setup.layout.ranks)
    host, storage = machine.host_memory_bytes, machine.storage_bytes
    return (
        memory.total <= memory_bytes
        and (host is None or memory.host_bytes * here <= host)
        and (storage is None or memory.storage_bytes * here <= storage)
    )


def smallest_change(setup: Setup, memory_bytes: float, max_ranks: int | None = None) -> SetupChange | None:
    """Return the smallest change that makes it fit; None if it fits, or if no known change suffices.

    max_ranks: number of available accelerators; None: no change uses more ranks than the setup has.
    """
    memory = memory_of(setup)
    if _holds(setup, memory, memory_bytes):
        return None
    ranks = setup.layout.ranks if max_ranks is None else min(max_ranks, _MOST_RANKS)
    if isinstance(setup, TrainingSetup):
        return _min(setup, _training_steps(ranks), memory.total, memory_bytes)
    steps = _inference_steps(ranks)
    # Two changes that keep the requested work come before one that does not.
    found = _min(setup, steps[:_KEEP_THE_WORK], memory.total, memory_bytes)
    return found or _min(setup, steps, memory.total, memory_bytes)


def _min(setup: S, steps: Sequence[SetupSteps[S]], before: int, memory_bytes: float) -> SetupChange | None:
    """Return the change with the fewest steps; among equals, in the steps' order, each at its smallest extent."""
    for count in range(1, len(steps) + 1):
        for chosen in combinations(steps, count):
            for words, changed in _applied(setup, chosen):
                if fits(changed, memory_bytes):
                    return SetupChange(changed, words, before, memory_of(changed).total, memory_bytes)
    return None


def _applied(setup: S, steps: Sequence[SetupSteps[S]]) -> Iterator[tuple[tuple[str, ...], S]]:
    """Yield every extent of the first step, combined with every extent of the next ones."""
    if not steps:
        yield (), setup
        return
    for words, changed in steps[0](setup):
        for more, both in _applied(changed, steps[1:]):
            yield (words, *more), both


def _training_steps(ranks: int) -> list[SetupSteps[TrainingSetup]]:
    return [_accumulated, _checkpointed, _sharded, lambda setup: _more_ranks(setup, ranks), _offloaded]


def _accumulated(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    for micro_batch in range(setup.micro_batch - 1, 0, -1):
        if setup.micro_batch % micro_batch == 0:
            count = setup.accumulation * (setup.micro_batch // micro_batch)
            changed = setup.replace(micro_batch=micro_batch, accumulation=count)
            yield f"accumulating {count} micro-batches of {micro_batch}", changed


def _checkpointed(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    if setup.checkpointing == "none":
        yield "selective checkpointing", setup.replace(checkpointing="selective")
    if setup.checkpointing != "full":
        yield "full checkpointing", setup.replace(checkpointing="full")


def _sharded(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    if setup.layout.dp == 1:
        return
    # Strategies of one library: a DeepSpeed script stays with DeepSpeed, and DDP goes to FSDP.
    stages: tuple[Strategy, ...] = ("zero1", "zero2", "zero3")
    better: tuple[Strategy, ...]
    current = setup.layout.strategy
    if current in stages:
        # Gradients of a pipeline's micro-batches are not reduced one by one.
        better = () if setup.layout.pp > 1 else stages[stages.index(current) + 1 :]
    else:
        better = ("fsdp",) if current != "fsdp" else ()
    for strategy in better:
        name = "FSDP" if strategy == "fsdp" else f"ZeRO stage {strategy[-1]}"
        yield name, _with_strategy(setup, strategy)


def _with_strategy(setup: TrainingSetup, strategy: Strategy) -> TrainingSetup:
    """Return the setup with a strategy that shards, and with the precision that it has there."""
    layout = setup.layout.model_copy(update={"strategy": strategy})
    return setup.replace(layout=layout, precision=precision_for(strategy, setup.precision))


def _more_ranks(setup: TrainingSetup, most: int) -> Iterator[tuple[str, TrainingSetup]]:
    """Add ranks: data-parallel ranks split a step's sequences and sharded states; tensor-parallel ranks split all."""
    layout, sequences = setup.layout, setup.micro_batch * setup.accumulation
    factor = 2
    while layout.ranks * factor <= most:
        if sequences % factor == 0:
            accumulation = max(1, setup.accumulation // factor)
            strategy = "ddp" if layout.strategy == "none" else layout.strategy
            changed = setup.replace(
                layout=layout.model_copy(update={"dp": layout.dp * factor, "strategy": strategy}),
                accumulation=accumulation,
                micro_batch=sequences // factor // accumulation,
            )
            if changed.global_batch == setup.global_batch:
                yield f"{changed.layout.ranks} ranks in place of {layout.ranks}", changed
        factor *= 2
    tp = 2 * layout.tp
    most = min(most // (layout.dp * layout.pp), setup.machine.accelerators)
    while tp <= most:
        if setup.architecture.splits(tp):
            changed = setup.replace(layout=layout.model_copy(update={"tp": tp}))
            yield f"tensor parallelism over {_ranks(tp, changed)}", changed
        tp *= 2


def _offloaded(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    """Offload states still on a device, for FSDP and DeepSpeed; NVMe for DeepSpeed's stage 3 only.

    A CPU has everything in the host's memory already.
    """
    if setup.offload != "none" or setup.machine.accelerator.kind == "cpu":
        return
    strategy = setup.layout.strategy
    if strategy in ("none", "ddp"):
        stage: Strategy = "zero2" if setup.layout.pp == 1 else "zero1"
        name = f"ZeRO stage {stage[-1]} with the optimizer on the CPU"
        yield name, _with_strategy(setup, stage).replace(offload="cpu")
    else:
        yield "offload to the CPU", setup.replace(offload="cpu")
    if strategy != "fsdp" and setup.layout.pp == 1 and setup.machine.storage_bytes is not None:
        yield "ZeRO stage 3 with offload to NVMe", _with_strategy(setup, "zero3").replace(offload="nvme")


def _inference_steps(ranks: int) -> list[SetupSteps[InferenceSetup]]:
    return [lambda setup: _split_further(setup, ranks), _eight_bits, _shorter, _fewer]


def _split_further(setup: InferenceSetup, most: int) -> Iterator[tuple[str, InferenceSetup]]:
    """Split over more tensor-parallel ranks of a node, then over more stages, the fewest ranks first: heads that no
    number divides split in layers. Tensor parallelism over several nodes comes last, as in the search of layouts.
    """
    layout, joined = setup.layout, setup.machine.joined_ranks
    others = layout.ranks // (layout.tp * layout.pp)
    degrees = [tp for tp in _doubled(layout.tp, most // others) if setup.architecture.splits(tp)]
    near = [tp for tp in degrees if tp <= joined]
    deeper = [
        (tp, pp)
        for tp in (layout.tp, *near)
        for pp in range(layout.pp + 1, min(setup.architecture.most_stages, most // (others * tp)) + 1)
    ]
    deeper.sort(key=lambda split: (split[0] * split[1], -split[0]))
    for tp, pp in [*((tp, layout.pp) for tp in near), *deeper, *((tp, layout.pp) for tp in degrees if tp > joined)]:
        if others * tp * pp > most:
            continue
        changed = setup.replace(layout=layout.model_copy(update={"tp": tp, "pp": pp}))
        if pp == layout.pp:
            yield f"tensor parallelism over {_ranks(tp, changed)}", changed
        elif tp == layout.tp:
            yield f"pipeline parallelism over {_ranks(pp, changed)}", changed
        else:
            yield f"tensor and pipeline parallelism over {tp} x {pp} ranks", changed


def _doubled(degree: int, most: int) -> Iterator[int]:
    """Yield twice a degree, four times and so on, up to a limit."""
    while 2 * degree <= most:
        degree *= 2
        yield degree


def _ranks(degree: int, setup: Setup) -> str:
    """Say how many ranks there are in all, where it is more than this degree."""
    ranks = setup.layout.ranks
    return f"{degree} ranks" if ranks == degree else f"{degree} ranks ({ranks} in all)"


def _eight_bits(setup: InferenceSetup) -> Iterator[tuple[str, InferenceSetup]]:
    if setup.weights in ("float32", "bfloat16", "float16"):
        yield "weights in int8", setup.replace(weights="int8")


def _shorter(setup: InferenceSetup) -> Iterator[tuple[str, InferenceSetup]]:
    for share in (2, 4, 8):
        prompt = setup.prompt_tokens // share
        if prompt:
            yield f"prompts of {prompt} tokens", setup.replace(prompt_tokens=prompt)


def _fewer(setup: InferenceSetup) -> Iterator[tuple[str, InferenceSetup]]:
    batch = setup.batch // 2
    while batch:
        yield f"a batch of {batch}", setup.replace(batch=batch)
        batch //= 2
