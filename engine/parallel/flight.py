"""The flight recorder: what the ranks did last, kept for when one of them is lost.

    turn_on()                   # before any process group is made
    dump(path)                  # after a failure: JSON

torch records what goes through gloo and NCCL; what goes through shared memory is recorded here, in memory only.
An operation without an end is the one that this rank was in.
"""

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

_TORCH_ENTRIES = 200
_OWN_ENTRIES = 200
_ENTRY_KEYS = ("operation", "ranks", "sequence", "bytes", "began", "ended")

Entry = list[Any]
_entries: deque[Entry] = deque(maxlen=_OWN_ENTRIES)


def turn_on() -> None:
    """Have torch record the last operations of every process group that is made from here on."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_TORCH_ENTRIES))


def begin(operation: str, ranks: tuple[int, ...], sequence: int, size_bytes: int, began: float) -> Entry:
    """Note the begin of an operation; its end goes into the last place of what is returned."""
    entry: Entry = [operation, ranks, sequence, size_bytes, began, None]
    _entries.append(entry)
    return entry


def dump(path: Path) -> None:
    """Write everything recorded: `operations` (times in seconds of time.perf_counter) and torch's own `torch`."""
    operations = [dict(zip(_ENTRY_KEYS, entry, strict=True)) for entry in list(_entries)]
    path.write_text(json.dumps({"operations": operations, "torch": _torch_entries()}))


def _torch_entries() -> Any:
    """What torch recorded; None where this build of it has no recorder."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]
    except ImportError:
        return None
    return json.loads(_dump_fr_trace_json())
