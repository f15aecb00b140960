"""Which weights DeepSpeed's stage 3 has gathered, moment by moment: its fetching of parameters, replayed.

    gathered = gather(weights, framework)           # Weights, in elements; Gathered, in elements
    gathered.start, gathered.forward[-1], gathered.head, gathered.backward[0]

Modules run in a known order. Each one's weights are gathered before it, and further ones ahead until the prefetch
bucket is full. What is gathered together arrives in one buffer and is copied out of it when the first of them is used;
the buffer stays until the last of them has been. A weight that is used again soon is not let go. Source: DeepSpeed
0.19.8, runtime/zero/partitioned_param_coordinator.py (`fetch_sub_module`, `release_sub_module`) and
partition_parameters.py (`AllGatherCoalescedHandle`).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from engine.planner.memory.framework import Framework


@dataclass(frozen=True)
class Weights:
    """Elements of a model's weights as its modules have them.

    matrices: of one block, in order of use. head: the weight that makes logits, which the model itself uses and not a
    module of its own; tied: it is the embedding's, too. tables: the (other) embeddings.
    """

    matrices: tuple[float, ...]
    layers: int
    tables: float
    head: float
    tied: bool
    recomputed: bool


@dataclass(frozen=True)
class Moment:
    """Elements that are gathered, at most; `arriving`: with the second buffer that gloo has for what it gathers."""

    held: float = 0.0
    arriving: float = 0.0

    def __or__(self, other: "Moment") -> "Moment":
        return Moment(max(self.held, other.held), max(self.arriving, other.arriving))


@dataclass(frozen=True)
class Gathered:
    """By moment of a micro-batch; `backward` in the order in which blocks are passed, the last one first."""

    start: Moment
    forward: tuple[Moment, ...]
    head: Moment
    backward: tuple[Moment, ...]
    end: Moment


@dataclass(frozen=True)
class _Use:
    """A module runs: the weights it needs; `block` -1 for the model's own. `backward`: it is its backward pass."""

    weights: tuple[int, ...]
    block: int
    backward: bool


class _Batch:
    """Weights that were asked for together."""

    def __init__(self, weights: list[int]) -> None:
        self.awaited = set(weights)
        self.weights = weights
        self.copied = False


class _Coordinator:
    """What is gathered, on its way, or queued to be fetched ahead."""

    def __init__(self, uses: list[_Use], sizes: list[float], external: int, framework: Framework) -> None:
        self.uses, self.sizes, self.external, self.framework = uses, sizes, external, framework
        self.held = 0.0  # elements of weights and of buffers
        self.available = 0.0  # elements of weights that have been asked for
        self.present: set[int] = set()
        self.on_way: dict[int, _Batch] = {}
        self.queue = deque((weight, step) for step, use in enumerate(uses) for weight in use.weights)
        self.fetched = dict.fromkeys(range(len(sizes)), -1)  # the use for which a weight was last fetched, or kept
        self.passed = list(accumulate((sum(sizes[one] for one in use.weights) for use in uses), initial=0.0))
        self.next_use = self._next_uses()

    def _next_uses(self) -> list[dict[int, int]]:
        following: list[dict[int, int]] = []
        seen: dict[int, int] = {}
        for step in reversed(range(len(self.uses))):
            following.append({weight: seen[weight] for weight in self.uses[step].weights if weight in seen})
            seen |= dict.fromkeys(self.uses[step].weights, step)
        return following[::-1]

    def fetch(self, step: int) -> Moment:
        """The module's weights, then those ahead."""
        needed = self.uses[step].weights
        arriving = self._ask([weight for weight in needed if not self._there(weight)])
        for weight in needed:
            self._await(weight)
        new = sum(1 for weight in needed if self.fetched[weight] < step)
        for _ in range(min(new, len(self.queue))):
            weight, used = self.queue.popleft()
            self.fetched[weight] = used
        ahead = self._ask(self._ahead())
        return Moment(self.held, max(arriving, ahead))

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
        """Returns what is held while they arrive, which is all where there are none."""
        size = sum(self.sizes[weight] for weight in weights)
        self.available += size
        self.held += size  # one alone arrives where it stays
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
        """The module has run: what is not kept for later goes."""
        for weight in self.uses[step].weights:
            later = self.next_use[step].get(weight)
            near = later is not None and self.passed[later] - self.passed[step + 1] < self.framework.max_reuse_distance
            if weight != self.external and weight in self.present and self.fetched[weight] <= step + 1 and not near:
                self.present.discard(weight)
                self.held -= self.sizes[weight]
                self.available -= self.sizes[weight]


def _uses(weights: Weights, sizes: list[float]) -> Iterator[_Use]:
    """A micro-batch's modules in order; fills in the sizes of the weights by number. Number 0 is the head's."""
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
def gather(weights: Weights, framework: Framework) -> Gathered:
    """Elements of gathered weights at the moments of a micro-batch; small weights are always there and do not count."""
    threshold = framework.param_persistence_threshold
    sizes: list[float] = []
    uses = [
        _Use(tuple(one for one in use.weights if sizes[one] >= threshold), use.block, use.backward)
        for use in list(_uses(weights, sizes))
    ]
    coordinator = _Coordinator(uses, sizes, 0, framework)
    forward, backward = [Moment()] * weights.layers, [Moment()] * weights.layers
    head, start = Moment(), Moment()
    moment = Moment()
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
    # The embedding's weights, the last module's, stay: its input has no gradient whose coming would release them.
    return Gathered(start, tuple(forward), head, tuple(reversed(backward)), moment)
