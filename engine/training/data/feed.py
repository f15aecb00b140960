"""Select the rows of a rank's step: a pure function of the seed, the step and the rank's replica.

    feed = Feed(examples, global_batch_size, accumulation, (replicas, mine), seed, device, ahead)
    batches = feed.step(history.steps)          # micro-batches of this rank, in their order

All epochs form one endless sequence of rows, reshuffled in each epoch. Step n takes the global batch from position n x
global_batch_size on, and each replica its part of it. So each row occurs once in an epoch, a step may span two epochs,
and the global batch is the same for any number of ranks. The sampler's state is the number of the next step.

On CUDA a thread prepares the next step's rows in pinned memory, and copies them while the device computes. On the CPU
they are prepared on demand, because a thread would compete for the computing core.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from engine.models.sharding import even_share
from engine.training.data.examples import Examples, Numbers
from engine.training.trainer import TrainingBatch


def shuffled(places: Numbers, count: int, seed: int) -> Numbers:
    """Return the row at each position of the concatenated epochs."""
    rows = np.empty_like(places)
    for epoch in np.unique(places // count):
        here = places // count == epoch
        rows[here] = np.random.default_rng([seed, int(epoch)]).permutation(count)[places[here] % count]
    return rows


class Feed:
    """Batches of one replica; see the module. replicas: their number, and this rank's index."""

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
        # A new thread's current device is the first, on which pinning would open a context of a few hundred MiB.
        own = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._thread = ThreadPoolExecutor(1, "feed", *own) if ahead else None
        self._ready: dict[int, Future[list[TrainingBatch]]] = {}

    def step(self, number: int) -> list[TrainingBatch]:
        """Return this rank's micro-batches of a step, on its device."""
        ready = self._ready.pop(number, None)
        batches = ready.result() if ready is not None else self._made(number)
        if self._thread is not None:
            for other in self._ready.values():
                other.cancel()
            self._ready = {number + 1: self._thread.submit(self._made, number + 1)}
        return [_moved(batch, self.device) for batch in batches]

    def _made(self, number: int) -> list[TrainingBatch]:
        """Build a batch on the CPU, in pinned memory for a GPU."""
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
            batches.append(TrainingBatch(inputs, share, len(part), len(part) * self.examples.positions))
        return batches

    def _shuffled(self, places: Numbers) -> Numbers:
        """As `shuffled`, with the current epoch's order cached, because drawing it is slow for many rows."""
        count = self.examples.count
        first, last = int(places[0]) // count, int(places[-1]) // count
        if first != last:
            return shuffled(places, count, self.seed)
        order = self._order  # once: the thread that works ahead may be in the next epoch
        if order is None or order[0] != first:
            order = self._order = first, np.random.default_rng([self.seed, first]).permutation(count)
        return order[1][places % count]

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the values that determine the batches from a step on, for a checkpoint, as JSON."""
        return {
            "step": step,
            "seed": self.seed,
            "global_batch_size": self.size,
            "rows": self.examples.count,
            "data": self.examples.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the coming steps equal those of the checkpoint's run, on any number of ranks.

        Raises ValueError naming the difference. Nothing is stored: `step` receives its number.
        """
        mine = self.state_dict(int(state["step"]))
        for name, field in _FIELDS.items():
            if state[name] != mine[name]:
                raise ValueError(
                    f"{field}: the checkpoint was trained on {name} {state[name]}, this run has {mine[name]}; "
                    "use the same, or start without the checkpoint"
                )

    def close(self) -> None:
        """Stop the thread, if there is one."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread, self._ready = None, {}


_FIELDS = {
    "data": "workload.data",
    "rows": "workload.data",
    "global_batch_size": "workload.global_batch_size",
    "seed": "measuring.seed",
}


def _moved(batch: TrainingBatch, device: torch.device) -> TrainingBatch:
    """Copy to the device; from pinned memory, so that the copy overlaps with compute."""
    if device.type == "cpu":
        return batch
    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.inputs.items()}
    return TrainingBatch(inputs, batch.share, batch.sequences, batch.tokens)
