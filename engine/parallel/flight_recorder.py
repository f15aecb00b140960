"""Flight recorder: the ranks' last operations, for diagnosis when one of them is lost.

    turn_on()                   # before any process group is made
    dump(path)                  # after a failure: JSON

torch records operations of gloo and NCCL; those through shared memory are recorded here, in memory only. An operation
without an end was in progress on this rank.
"""

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

_TORCH_ENTRIES = 200
_OWN_ENTRIES = 200
_ENTRY_KEYS = ("operation", "ranks", "sequence", "bytes", "began", "ended")

FlightEntry = list[Any]
_entries: deque[FlightEntry] = deque(maxlen=_OWN_ENTRIES)


def turn_on() -> None:
    """Enable torch's recording for every process group created from now on."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_TORCH_ENTRIES))


def record_start(operation: str, ranks: tuple[int, ...], sequence: int, size_bytes: int, began: float) -> FlightEntry:
    """Record the start of an operation; the caller writes its end into the last element of the result."""
    entry: FlightEntry = [operation, ranks, sequence, size_bytes, began, None]
    _entries.append(entry)
    return entry


def dump(path: Path) -> None:
    """Write everything recorded: `operations` (times in seconds of time.perf_counter) and torch's own `torch`."""
    operations = [dict(zip(_ENTRY_KEYS, entry, strict=True)) for entry in list(_entries)]
    path.write_text(json.dumps({"operations": operations, "torch": _torch_entries()}))


def _torch_entries() -> Any:
    """Return torch's records; those of NCCL, which has a recorder of its own, as `nccl` beside the others.

    None if this build has no recorder.
    """
    from torch._C import _distributed_c10d as torch_c10d

    general = getattr(torch_c10d, "_dump_fr_trace_json", None)
    of_nccl = getattr(torch_c10d, "_dump_nccl_trace_json", None)  # builds with NCCL alone have it
    found = None if general is None else json.loads(general())
    return found if of_nccl is None else {**(found or {}), "nccl": json.loads(of_nccl())}
