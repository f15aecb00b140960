"""What a load took: bytes asked for, bytes from the device, seconds, and the page cache before it."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine.loading.page_cache import PageCache, cached_share, state_of
from engine.measure import storage_bytes


@dataclass
class LoadReport:
    """One rank's load. Filled by `read_pieces`; the sum of `device_bytes` over a node's ranks is what the node read.

    `asked_bytes` are those that this rank reads from the files, headers aside. `checkpoint_bytes` are those of all
    tensors in them. `device_bytes` is None where the kernel does not tell. `seconds` go from the first
    piece's reading to the end of what the consumer did with the last.
    """

    cached_share: float | None
    asked_bytes: int = 0
    checkpoint_bytes: int = 0
    device_bytes: int | None = None
    seconds: float = 0.0
    _began: float = field(default=0.0, repr=False)
    _read_before: int | None = field(default=None, repr=False)

    @classmethod
    def before(cls, files: Iterable[Path]) -> "LoadReport":
        """Call it on every rank before any of them reads (then a barrier): it looks at the page cache."""
        return cls(cached_share(files))

    @property
    def page_cache(self) -> PageCache | None:
        """State of the page cache before the load."""
        return state_of(self.cached_share)

    @property
    def gigabytes_per_second(self) -> float:
        """Of the bytes asked for, over all that was done with them."""
        return self.asked_bytes / self.seconds / 1e9

    def begin(self, checkpoint_bytes: int) -> None:
        """The load begins now."""
        self.checkpoint_bytes = checkpoint_bytes
        storage = storage_bytes()
        self._read_before = storage.read if storage else None
        self._began = time.perf_counter()

    def end(self) -> None:
        """The load is over."""
        self.seconds = time.perf_counter() - self._began
        storage = storage_bytes()
        if storage and self._read_before is not None:
            self.device_bytes = storage.read - self._read_before
