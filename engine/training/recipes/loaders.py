"""Split a user's data loader over processes, with resume in mid-epoch.

    shared = share_out(loader, world_size, rank, seed=0)
    shared.begin(epoch=2, examples=640)       # 640 examples of this epoch are done, by all processes together
    for inputs, targets in shared: ...

Order is a function of (seed, epoch) alone. The examples of the first n steps of a global batch are the same for any
number of processes, so a run resumed with fewer of them neither repeats nor skips examples.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from configs.common.printable import plural

_KEPT = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
         "prefetch_factor", "persistent_workers", "pin_memory_device")  # fmt: skip


class PartSampler(DistributedSampler[Any]):
    """torch's DistributedSampler with a start in mid-epoch."""

    skipped = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.skipped, None)

    def __len__(self) -> int:
        return super().__len__() - self.skipped


class SharedLoader:
    """A loader whose sampler returns this process's part. remade: whether the sampler was replaced."""

    def __init__(self, loader: "DataLoader[Any]", sampler: "DistributedSampler[Any]", remade: bool) -> None:
        self.loader, self.sampler, self.remade = loader, sampler, remade
        assert loader.batch_size is not None
        self.batch_size: int = loader.batch_size
        self._batches_skipped = 0

    def begin(self, epoch: int, examples: int = 0) -> None:
        """Start the next iteration in this epoch, after this many examples of all processes together."""
        self.sampler.set_epoch(epoch)
        own = examples // self.sampler.num_replicas
        if isinstance(self.sampler, PartSampler):
            self.sampler.skipped, self._batches_skipped = own, 0
        else:
            self._batches_skipped = own // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self._batches_skipped, None)

    @property
    def batches(self) -> int:
        """Batches of this process in a whole epoch; the same number in each process with an equal loader."""
        own = self.sampler.num_samples
        return own // self.batch_size if self.loader.drop_last else -(-own // self.batch_size)

    @property
    def order(self) -> str:
        """What fixes the order of an epoch's examples: `400 examples, shuffled with seed 0`."""
        data: Any = self.loader.dataset
        shuffled = f"shuffled with seed {self.sampler.seed}" if self.sampler.shuffle else "in order"
        return f"{plural(len(data), 'example')}, {shuffled}"

    def is_filling(self, position: int) -> bool:
        """Return whether the example at this position is a duplicate that makes all parts equal."""
        data: Any = self.loader.dataset
        return position * self.sampler.num_replicas + self.sampler.rank >= len(data)


def share_out(
    loader: "DataLoader[Any]", world_size: int, rank: int, seed: int, name: str = "train_data"
) -> SharedLoader:
    """Return the loader itself if its sampler is distributed, else a copy with a distributed sampler.

    name: of the argument, for messages. Raises ValueError for a loader with a custom order, which only the user can
    split: a sampler of another class, or a RandomSampler that draws another number of examples, or some twice.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(f"{name}: a loader of an IterableDataset cannot be shared out; use a Dataset with a length")
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ValueError(f"{name}: a loader without batches cannot be shared out; give it a batch_size")
    if loader.batch_size is not None and isinstance(loader.sampler, DistributedSampler):
        if (loader.sampler.num_replicas, loader.sampler.rank) != (world_size, rank):
            raise ValueError(
                f"{name}: its DistributedSampler is rank {loader.sampler.rank} of {loader.sampler.num_replicas}, "
                f"this process is {rank} of {world_size}; make it after the recipe, or leave the sampler out"
            )
        return SharedLoader(loader, loader.sampler, remade=False)
    refused = _refused(loader)
    if refused is not None:
        raise ValueError(
            f"{name}: its {refused} cannot be shared out; give it a torch.utils.data.distributed.DistributedSampler, "
            "or batch_size and shuffle"
        )
    shuffled = isinstance(loader.sampler, RandomSampler)
    sampler = PartSampler(loader.dataset, world_size, rank, shuffle=shuffled, seed=seed, drop_last=loader.drop_last)
    settings = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    remade: DataLoader[Any] = DataLoader(
        loader.dataset, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last, **settings
    )
    return SharedLoader(remade, sampler, remade=True)


def _refused(loader: "DataLoader[Any]") -> str | None:
    """Return what of a loader has an order of its own, which a distributed sampler would lose; None: nothing."""
    if loader.batch_size is None:
        return type(loader.batch_sampler).__name__
    sampler: Any = loader.sampler
    kind, count = type(sampler).__name__, len(loader.dataset)  # type: ignore[arg-type]  # it has a length
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return kind
    if getattr(sampler, "replacement", False):
        return f"{kind} with replacement"
    return None if len(sampler) == count else f"{kind} of {len(sampler)} examples out of {count}"
