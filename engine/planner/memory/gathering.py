"""Replay DeepSpeed stage 3's parameter fetching: the gathered weights over time.

    gathered = gather(weights, framework)           # Weights, in elements; Gathered, in elements
    gathered.start, gathered.forward[-1], gathered.head, gathered.backward[0]

Modules run in a known order. Each one's weights are gathered before it, and further ones ahead until the prefetch
bucket is full. Weights gathered together arrive in one buffer and are copied out when the first of them is used; the
buffer stays until the last has been used. A weight that is reused soon is not released. Source: DeepSpeed 0.19.8,
runtime/zero/partitioned_param_coordinator.py (`fetch_sub_module`, `release_sub_module`) and partition_parameters.py
(`AllGatherCoalescedHandle`).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from engine.planner.memory.framework import Framework


@dataclass(frozen=True)
class GatheredWeights:
    """Elements of a model's weights by module.

    matrices: of one block, in order of use. head: the weight that computes logits, used by the model itself and not by
    a submodule; tied: it is the embedding's too. tables: the (other) embeddings.
    """

    matrices: tuple[float, ...]
    layers: int
    tables: float
    head: float
    tied: bool
    recomputed: bool


@dataclass(frozen=True)
class GatheredPeak:
    """Peak of gathered elements; `arriving`: including the second buffer that gloo uses for gathered data."""

    held: float = 0.0
    arriving: float = 0.0

    def __or__(self, other: "GatheredPeak") -> "GatheredPeak":
        return GatheredPeak(max(self.held, other.held), max(self.arriving, other.arriving))


@dataclass(frozen=True)
class Gathered:
    """Gathered elements by moment of a micro-batch; `backward` in the order of the backward pass, last block first."""

    start: GatheredPeak
    forward: tuple[GatheredPeak, ...]
    head: GatheredPeak
    backward: tuple[GatheredPeak, ...]
    end: GatheredPeak


@dataclass(frozen=True)
class _Use:
    """One module's execution and the weights it needs; `block` -1: the model's own weights.

    `backward`: its backward pass.
    """

    weights: tuple[int, ...]
    block: int
    backward: bool


class _Batch:
    """Weights requested together."""

    def __init__(self, weights: list[int]) -> None:
        self.awaited = set(weights)
        self.weights = weights
        self.copied = False


class _Coordinator:
    """Weights that are gathered, in transfer, or queued for prefetching."""

    def __init__(self, uses: list[_Use], sizes: list[float], external: int, framework: Framework) -> None:
        self.uses, self.sizes, self.external, self.framework = uses, sizes, external, framework
        self.held = 0.0  # elements of weights and of buffers
        self.available = 0.0  # elements of weights that have been requested
        self.present: set[int] = set()
        self.on_way: dict[int, _Batch] = {}
        self.queue = deque((weight, step) for step, use in enumerate(uses) for weight in use.weights)
        self.fetched = dict.fromkeys(range(len(sizes)), -1)  # last use for which a weight was fetched or kept
        self.passed = list(accumulate((sum(sizes[one] for one in use.weights) for use in uses), initial=0.0))
        self.next_use = self._next_uses()

    def _next_uses(self) -> list[dict[int, int]]:
        following: list[dict[int, int]] = []
        seen: dict[int, int] = {}
        for step in reversed(range(len(self.uses))):
            following.append({weight: seen[weight] for weight in self.uses[step].weights if weight in seen})
            seen |= dict.fromkeys(self.uses[step].weights, step)
        return following[::-1]

    def fetch(self, step: int) -> GatheredPeak:
        """Fetch the module's weights, then prefetch further ones."""
        needed = self.uses[step].weights
        arriving = self._ask([weight for weight in needed if not self._there(weight)])
        for weight in needed:
            self._await(weight)
        new = sum(1 for weight in needed if self.fetched[weight] < step)
        for _ in range(min(new, len(self.queue))):
            weight, used = self.queue.popleft()
            self.fetched[weight] = used
        ahead = self._ask(self._ahead())
        return GatheredPeak(self.held, max(arriving, ahead))

    def _there(self, weight: int) -> bool:
        return weight in self.present or weight in self.on_way

    def _ahead(self) -> list[int]:
        limit = min(self.framework.max_live_parameters - self.available, self.framework.prefetch_bucket_size)
        found: dict[int, None] = {}
        size = 0.0
        while self.queue and size < limit:
            weight, used = self.queue.popleft()
            self.fetched[weight] = max(self.fetched[weight], used)
            if not self._there(weight) and weight not in found:
                found[weight] = None
                size += self.sizes[weight]
        return list(found)

    def _ask(self, weights: list[int]) -> float:
        """Request weights; return the elements held while they arrive."""
        size = sum(self.sizes[weight] for weight in weights)
        self.available += size
        self.held += size  # a single weight is not copied
        batch = _Batch(weights)
        batch.copied = len(weights) == 1
        self.on_way |= dict.fromkeys(weights, batch)
        return self.held + size

    def _await(self, weight: int) -> None:
        batch = self.on_way.pop(weight, None)
        if batch is None:
            return
        size = sum(self.sizes[one] for one in batch.weights)
        if not batch.copied:
            self.held += size
            batch.copied = True
        self.present.add(weight)
        batch.awaited.discard(weight)
        if not batch.awaited and len(batch.weights) > 1:
            self.held -= size

    def release(self, step: int) -> None:
        """Release the module's weights after it has run, except those kept for later."""
        for weight in self.uses[step].weights:
            later = self.next_use[step].get(weight)
            near = later is not None and self.passed[later] - self.passed[step + 1] < self.framework.max_reuse_distance
            if weight != self.external and weight in self.present and self.fetched[weight] <= step + 1 and not near:
                self.present.discard(weight)
                self.held -= self.sizes[weight]
                self.available -= self.sizes[weight]


def _uses(weights: GatheredWeights, sizes: list[float]) -> Iterator[_Use]:
    """Yield a micro-batch's modules in order; fills in the sizes of the weights by number. Number 0 is the head's."""
    sizes.append(weights.head)
    own = (0,) if weights.head else ()
    yield _Use(own, -1, False)
    table: tuple[int, ...] = (0,) if weights.tied else ()
    if weights.tables:
        sizes.append(weights.tables)
        table = (*table, 1)
    yield _Use(table, -1, False)
    blocks = []
    for _ in range(weights.layers):
        blocks.append(range(len(sizes), len(sizes) + len(weights.matrices)))
        sizes.extend(weights.matrices)
    for number, block in enumerate(blocks):
        for weight in block:
            yield _Use((weight,), number, False)
    yield _Use(own, -1, True)
    for number in reversed(range(weights.layers)):
        again = blocks[number] if weights.recomputed else ()
        for weight in (*again, *reversed(blocks[number])):
            yield _Use((weight,), number, True)
    yield _Use(table, -1, True)


@lru_cache(maxsize=1024)
def gather(weights: GatheredWeights, framework: Framework) -> Gathered:
    """Return elements of gathered weights at the moments of a micro-batch; small weights do not count."""
    threshold = framework.param_persistence_threshold
    sizes: list[float] = []
    uses = [
        _Use(tuple(one for one in use.weights if sizes[one] >= threshold), use.block, use.backward)
        for use in list(_uses(weights, sizes))
    ]
    coordinator = _Coordinator(uses, sizes, 0, framework)
    forward, backward = [GatheredPeak()] * weights.layers, [GatheredPeak()] * weights.layers
    head, start = GatheredPeak(), GatheredPeak()
    moment = GatheredPeak()
    for step, use in enumerate(uses):
        moment = coordinator.fetch(step)
        if step == len(uses) - 1:
            break
        if use.block >= 0:
            of_pass = backward if use.backward else forward
            of_pass[use.block] |= moment
        elif use.backward:
            head |= moment
        else:
            start |= moment
        coordinator.release(step)
    # The embedding's weights (the last module) stay: its input has no gradient that would release them.
    return Gathered(start, tuple(forward), head, tuple(reversed(backward)), moment)
