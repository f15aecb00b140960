"""Which rows a rank computes in a step: a pure function of the seed, the step and the rank's replica.

    feed = make_feed(workload, options, context, task)
    batches = feed.step(history.steps)          # micro-batches of this rank, in their order

The rows of all epochs stand in one endless row, shuffled anew in each epoch; step n takes the next global batch from
place n x global_batch_size on, and each replica its part of these. So nothing is seen twice in an epoch and nothing is
left out, the last places of an epoch share a step with the first of the next, and the global batch is the same for any
number of ranks. The whole state of such a sampler is the number of the next step.

On CUDA the next step's rows are made ready in a thread, in pinned memory, and copied while the device computes. On the
CPU they are made when they are asked for: a thread there would take the core that computes, and the step would wait for
the same work under another name.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from configs.training import TrainWorkload
from engine.context import Context
from engine.inference.sharding import even_share
from engine.training.data.examples import Examples, Numbers
from engine.training.task_types import load_examples
from engine.training.trainer import Batch, Options, Task


def make_feed(
    workload: TrainWorkload, options: Options, context: Context, task: Task, ahead: bool | None = None
) -> "Feed":
    """The feed of this rank, after `make_task`. ahead: make the next step's rows in a thread; None: on CUDA."""
    train, _ = load_examples(workload, context)
    return Feed(
        train,
        global_batch_size=workload.global_batch_size,
        accumulation=options.accumulation,
        replicas=(options.dp, context.grid.dp_rank),
        seed=context.job.measuring.seed,
        device=context.device,
        ahead=context.device.type == "cuda" if ahead is None else ahead,
    )


def shuffled(places: Numbers, count: int, seed: int) -> Numbers:
    """The row that stands at each place of the endless row of epochs."""
    rows = np.empty_like(places)
    for epoch in np.unique(places // count):
        here = places // count == epoch
        rows[here] = np.random.default_rng([seed, int(epoch)]).permutation(count)[places[here] % count]
    return rows


class Feed:
    """See the module. replicas: how many there are, and which one this rank belongs to."""

    def __init__(
        self,
        examples: Examples,
        global_batch_size: int,
        accumulation: int,
        replicas: tuple[int, int],
        seed: int,
        device: torch.device,
        ahead: bool,
    ) -> None:
        self.examples, self.size, self.accumulation = examples, global_batch_size, accumulation
        self.dp, self.dp_rank = replicas
        self.seed, self.device = seed, device
        self._order: tuple[int, Numbers] | None = None
        self.ahead = ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed") if ahead else None
        self._ready: dict[int, Future[list[Batch]]] = {}

    def step(self, number: int) -> list[Batch]:
        """This rank's micro-batches of a step, on its device."""
        ready = self._ready.pop(number, None)
        batches = ready.result() if ready is not None else self._made(number)
        if self._thread is not None:
            for other in self._ready.values():
                other.cancel()
            self._ready = {number + 1: self._thread.submit(self._made, number + 1)}
        return [_moved(batch, self.device) for batch in batches]

    def _made(self, number: int) -> list[Batch]:
        """On the CPU, in pinned memory where they are for a GPU."""
        places = np.arange(number * self.size, (number + 1) * self.size)
        rows = self._shuffled(places)
        targets = self.examples.targets(rows)
        mine = even_share(self.size, self.dp, self.dp_rank)
        batches = []
        for part in np.split(np.arange(mine.start, mine.stop), self.accumulation):
            inputs = self.examples.collate(rows[part], places[part])
            if self.device.type == "cuda":
                inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
            share = float(targets[part].sum() / targets.sum())
            batches.append(Batch(inputs, share, len(part), len(part) * self.examples.positions))
        return batches

    def _shuffled(self, places: Numbers) -> Numbers:
        """As `shuffled`, with the order of the present epoch kept: to draw it takes long where rows are many."""
        count = self.examples.count
        first, last = int(places[0]) // count, int(places[-1]) // count
        if first != last:
            return shuffled(places, count, self.seed)
        if self._order is None or self._order[0] != first:
            self._order = first, np.random.default_rng([self.seed, first]).permutation(count)
        return self._order[1][places % count]

    def state_dict(self, step: int) -> dict[str, Any]:
        """What fixes the batches from a step on; it goes into a checkpoint and into JSON."""
        return {
            "step": step,
            "seed": self.seed,
            "global_batch_size": self.size,
            "rows": self.examples.count,
            "data": self.examples.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the steps to come are those that the checkpoint's run would have made, on any number of ranks.

        Raises ValueError, naming what differs, where they are not. Nothing else is taken up: `step` is told its number.
        """
        mine = self.state_dict(int(state["step"]))
        for name, field in _FIELDS.items():
            if state[name] != mine[name]:
                raise ValueError(
                    f"{field}: the checkpoint was trained on {name} {state[name]}, this run has {mine[name]}; "
                    "use the same, or start without the checkpoint"
                )

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread, self._ready = None, {}


_FIELDS = {
    "data": "workload.data",
    "rows": "workload.data",
    "global_batch_size": "workload.global_batch_size",
    "seed": "measuring.seed",
}


def _moved(batch: Batch, device: torch.device) -> Batch:
    """On the device; from pinned memory, so that the copy runs beside what is computed."""
    if device.type == "cpu":
        return batch
    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.inputs.items()}
    return Batch(inputs, batch.share, batch.sequences, batch.tokens)
