"""Load report: bytes requested, bytes from the device, seconds, and the page cache before the load."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine.loading.page_cache import PageCacheState, cached_share, state_of
from engine.rank.host_usage import storage_bytes


@dataclass
class LoadReport:
    """One rank's load. Filled by `read_pieces`; the sum of `device_bytes` over a node's ranks is the node's total.

    `asked_bytes` are those that this rank reads from the files, headers aside. `checkpoint_bytes` are those of all
    tensors in them. `device_bytes` is None if the kernel does not report it. `seconds`: from the first read to the end
    of the consumer's work on the last piece.
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
        """Create a report on every rank before any of them reads (then a barrier): it inspects the page cache."""
        return cls(cached_share(files))

    @property
    def page_cache(self) -> PageCacheState | None:
        """State of the page cache before the load."""
        return state_of(self.cached_share)

    def begin(self, checkpoint_bytes: int) -> None:
        """Mark the start of the load."""
        self.checkpoint_bytes = checkpoint_bytes
        storage = storage_bytes()
        self._read_before = storage.read if storage else None
        self._began = time.perf_counter()

    def end(self) -> None:
        """Mark the end of the load."""
        self.seconds = time.perf_counter() - self._began
        storage = storage_bytes()
        if storage and self._read_before is not None:
            self.device_bytes = storage.read - self._read_before
