"""Does it fit, and if not, the smallest change that makes it fit.

    fits(setup, memory_bytes)                              # TrainingSetup or InferenceSetup
    change = smallest_change(setup, memory_bytes)          # None: it fits already, or nothing helps
    change.sentence                  # "full checkpointing brings 31.2 GB to 19.8 of 24.0"
    what_does_not_fit(setup, memory_bytes)                 # "31.2 GB are needed of 24.0: activations 20.1, ..."

A change is smaller the fewer things it changes; among as many, the one that costs least speed is taken. Training, from
cheap to dear: micro-batches that are accumulated (the same products, smaller ones), checkpointing (a quarter to a third
more products), sharding (more traffic), more ranks (more hardware), offload (the host's bandwidth). Inference: more
ranks of tensor parallelism, weights of 8 bits, both; only then a shorter context and a smaller batch. The work of a
step stays the same in training; for inference the sentence says what is given up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from configs.cell import Strategy
from engine.planner.memory.inference import inference_memory
from engine.planner.memory.training import training_memory
from engine.planner.results import Memory
from engine.planner.setup import InferenceSetup, TrainingSetup

_GB = 1e9
_MOST_RANKS = 4096
_KEEP_THE_WORK = 2  # of the steps of inference: they change neither prompts nor batch
Setup = TrainingSetup | InferenceSetup
S = TypeVar("S", bound=Setup)
# One way to save memory: what it is called, and setups from the least to the most that it can do.
Step = Callable[[S], Iterator[tuple[str, S]]]


@dataclass(frozen=True)
class Change:
    """A setup that fits, what it changes, and bytes of the device before and after."""

    setup: Setup
    words: tuple[str, ...]
    before_bytes: int
    after_bytes: int
    memory_bytes: float

    @property
    def named(self) -> str:
        """All that it changes, in words."""
        *first, last = self.words
        return f"{', '.join(first)} and {last}" if first else last

    @property
    def sentence(self) -> str:
        """One sentence for people."""
        before, after, limit = (size / _GB for size in (self.before_bytes, self.after_bytes, self.memory_bytes))
        verb = "brings" if len(self.words) == 1 else "bring"
        return f"{self.named} {verb} {before:.1f} GB to {after:.1f} of {limit:.1f}"


def memory_of(setup: Setup) -> Memory:
    """The peak of training or of inference."""
    return training_memory(setup) if isinstance(setup, TrainingSetup) else inference_memory(setup)


def fits(setup: Setup, memory_bytes: float) -> bool:
    """Whether the device, and what is known of host and storage, hold it."""
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


def what_does_not_fit(setup: Setup, memory_bytes: float) -> str | None:
    """The device's parts from the largest down, where they are too much together; None where it fits."""
    memory = memory_of(setup)
    if _holds(setup, memory, memory_bytes):
        return None
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "kv_cache", "communication", "framework")
    parts = sorted(((getattr(memory, name), name) for name in names), reverse=True)
    listed = ", ".join(f"{name.replace('_', ' ')} {size / _GB:.1f}" for size, name in parts if size >= 0.05 * _GB)
    if memory.total <= memory_bytes:
        return f"the machine's host memory or storage is too small for {memory.host_bytes / _GB:.1f} GB a rank"
    return f"{memory.total / _GB:.1f} GB are needed of {memory_bytes / _GB:.1f}: {listed}"


def smallest_change(setup: Setup, memory_bytes: float, max_ranks: int | None = None) -> Change | None:
    """The least that makes it fit; None where it fits, or where nothing that is known does.

    max_ranks: as many accelerators as there are; None: no change takes more ranks than the setup has.
    """
    memory = memory_of(setup)
    if _holds(setup, memory, memory_bytes):
        return None
    ranks = setup.layout.ranks if max_ranks is None else min(max_ranks, _MOST_RANKS)
    if isinstance(setup, TrainingSetup):
        return _least(setup, _training_steps(ranks), memory.total, memory_bytes)
    steps = _inference_steps(ranks)
    # Two changes that keep what was asked for come before one that does not.
    found = _least(setup, steps[:_KEEP_THE_WORK], memory.total, memory_bytes)
    return found or _least(setup, steps, memory.total, memory_bytes)


def _least(setup: S, steps: Sequence[Step[S]], before: int, memory_bytes: float) -> Change | None:
    """Fewest changes first; of as many, in the steps' order, each as little as does."""
    for count in range(1, len(steps) + 1):
        for chosen in combinations(steps, count):
            for words, changed in _applied(setup, chosen):
                if fits(changed, memory_bytes):
                    return Change(changed, words, before, memory_of(changed).total, memory_bytes)
    return None


def _applied(setup: S, steps: Sequence[Step[S]]) -> Iterator[tuple[tuple[str, ...], S]]:
    """Every extent of the first step, with every extent of the next one for each."""
    if not steps:
        yield (), setup
        return
    for words, changed in steps[0](setup):
        for more, both in _applied(changed, steps[1:]):
            yield (words, *more), both


def _training_steps(ranks: int) -> list[Step[TrainingSetup]]:
    return [_accumulated, _checkpointed, _sharded, lambda setup: _more_ranks(setup, ranks), _offloaded]


def _accumulated(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    for micro_batch in range(setup.micro_batch - 1, 0, -1):
        if setup.micro_batch % micro_batch == 0:
            count = setup.accumulation * (setup.micro_batch // micro_batch)
            changed = setup.but(micro_batch=micro_batch, accumulation=count)
            yield f"accumulating {count} micro-batches of {micro_batch}", changed


def _checkpointed(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    if setup.checkpointing == "none":
        yield "selective checkpointing", setup.but(checkpointing="selective")
    if setup.checkpointing != "full":
        yield "full checkpointing", setup.but(checkpointing="full")


def _sharded(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    if setup.layout.dp == 1:
        return
    # Those of one library: a script that runs DeepSpeed stays with it, and DDP goes to FSDP.
    stages: tuple[Strategy, ...] = ("zero1", "zero2", "zero3")
    current = setup.layout.strategy
    better = stages[stages.index(current) + 1 :] if current in stages else ("fsdp",) if current != "fsdp" else ()
    for strategy in better:
        name = "FSDP" if strategy == "fsdp" else f"ZeRO stage {strategy[-1]}"
        yield name, setup.but(layout=setup.layout.model_copy(update={"strategy": strategy}))


def _more_ranks(setup: TrainingSetup, most: int) -> Iterator[tuple[str, TrainingSetup]]:
    """Data-parallel ranks share out a step's sequences, and states that are sharded; tensor-parallel ones all."""
    layout, sequences = setup.layout, setup.micro_batch * setup.accumulation
    factor = 2
    while layout.ranks * factor <= most:
        if sequences % factor == 0:
            accumulation = max(1, setup.accumulation // factor)
            strategy = "ddp" if layout.strategy == "none" else layout.strategy
            changed = setup.but(
                layout=layout.model_copy(update={"dp": layout.dp * factor, "strategy": strategy}),
                accumulation=accumulation,
                micro_batch=sequences // factor // accumulation,
            )
            if changed.global_batch == setup.global_batch:
                yield f"{changed.layout.ranks} ranks in place of {layout.ranks}", changed
        factor *= 2
    tp = 2 * layout.tp
    most = min(most // (layout.dp * layout.pp), setup.machine.accelerators)
    while tp <= most and setup.architecture.heads % tp == 0:
        yield f"tensor parallelism over {tp} ranks", setup.but(layout=layout.model_copy(update={"tp": tp}))
        tp *= 2


def _offloaded(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    """By FSDP and DeepSpeed, where states are on a device yet; NVMe by DeepSpeed's stage 3 only."""
    if setup.offload != "none":
        return
    strategy = setup.layout.strategy
    if strategy in ("none", "ddp"):
        setup = setup.but(layout=setup.layout.model_copy(update={"strategy": "zero2"}))
        yield "ZeRO stage 2 with the optimizer on the CPU", setup.but(offload="cpu")
    else:
        yield "offload to the CPU", setup.but(offload="cpu")
    if strategy != "fsdp" and setup.machine.storage_bytes is not None:
        third = setup.layout.model_copy(update={"strategy": "zero3"})
        yield "ZeRO stage 3 with offload to NVMe", setup.but(layout=third, offload="nvme")


def _inference_steps(ranks: int) -> list[Step[InferenceSetup]]:
    return [lambda setup: _tensor_parallel(setup, ranks), _eight_bits, _shorter, _fewer]


def _tensor_parallel(setup: InferenceSetup, most: int) -> Iterator[tuple[str, InferenceSetup]]:
    tp = 2 * setup.layout.tp
    while setup.layout.ranks // setup.layout.tp * tp <= most and setup.architecture.heads % tp == 0:
        yield f"tensor parallelism over {tp} ranks", setup.but(layout=setup.layout.model_copy(update={"tp": tp}))
        tp *= 2


def _eight_bits(setup: InferenceSetup) -> Iterator[tuple[str, InferenceSetup]]:
    if setup.weights in ("float32", "bfloat16", "float16"):
        yield "weights in int8", setup.but(weights="int8")


def _shorter(setup: InferenceSetup) -> Iterator[tuple[str, InferenceSetup]]:
    for share in (2, 4, 8):
        prompt = setup.prompt_tokens // share
        if prompt:
            yield f"prompts of {prompt} tokens", setup.but(prompt_tokens=prompt)


def _fewer(setup: InferenceSetup) -> Iterator[tuple[str, InferenceSetup]]:
    batch = setup.batch // 2
    while batch:
        yield f"a batch of {batch}", setup.but(batch=batch)
        batch //= 2
