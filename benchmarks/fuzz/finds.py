"""Found inputs, one file for each cause, made smaller where that is cheap.

finds = Finds(Path("fuzz-finds"), "study.file")
finds.add(target, data, fault)          # fuzz-finds/study.file-1f0e3dad.bin and .txt
"""

import hashlib
import time
from pathlib import Path

from benchmarks.fuzz.oracle import Target, cause, judge

_MINIMISING_SECONDS = 5.0


class Finds:
    """The faults of one target."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.causes: set[str] = set()

    def add(self, target: Target, data: bytes, fault: str) -> bool:
        """Keep an input. Returns False for a cause that is known already."""
        if cause(fault) in self.causes:
            return False
        self.causes.add(cause(fault))
        small = minimised(target, data, fault)
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self._name}-{hashlib.sha256(small).hexdigest()[:8]}"
        (self._folder / f"{stem}.bin").write_bytes(small)
        (self._folder / f"{stem}.txt").write_text(f"{fault}\n", encoding="utf-8", errors="backslashreplace")
        return True


def minimised(target: Target, data: bytes, fault: str, seconds: float = _MINIMISING_SECONDS) -> bytes:
    """Leave out pieces, ever smaller ones, as long as the same fault remains and the time lasts."""
    deadline = time.monotonic() + seconds
    size = len(data) // 2
    while size and time.monotonic() < deadline:
        start = 0
        while start < len(data) and time.monotonic() < deadline:
            shorter = data[:start] + data[start + size :]
            found = judge(target, shorter)
            if found is not None and cause(found) == cause(fault):
                data = shorter
            else:
                start += size
        size //= 2
    return data
