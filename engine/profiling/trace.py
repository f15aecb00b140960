"""Write a compressed Chrome trace of one rank: torch's profiler events, with a track of our communicators.

    write_trace(profiler, path, reported, region_began_nanoseconds)     # open it in https://ui.perfetto.dev

The format is described in "Trace Event Format" (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU);
times are microseconds since `baseTimeNanoseconds` of the file's head.
"""

import gzip
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.profiler import profile

from engine.profiling.collectives import RecordedCollective

_TRACK = 1 << 22
"""Thread number of our track: pid_max on 64 bits, so no thread has it (proc(5))."""

_BEGIN = re.compile(r'"traceEvents":\s*\[')
_BASE = re.compile(r'"baseTimeNanoseconds":\s*(\d+)')
_HEAD_CHARACTERS = 1 << 20
_LEVEL = 3  # half the time of level 6 for a tenth more bytes


def write_trace(
    profiler: profile, path: Path, reported: Sequence[RecordedCollective], region_began_nanoseconds: int
) -> None:
    """Write `<...>.json.gz`. region_began_nanoseconds: start of the times in `reported`, since the epoch."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        with plain.open() as source, gzip.open(path, "wt", compresslevel=_LEVEL) as target:
            head = source.read(_HEAD_CHARACTERS)
            begin, base = _BEGIN.search(head), _BASE.search(head)
            assert begin is not None and base is not None, "torch writes both at the beginning"
            offset = (region_began_nanoseconds - int(base.group(1))) / 1000
            target.write(head[: begin.end()])
            target.writelines(json.dumps(event) + ",\n" for event in _track(reported, offset))
            target.write(head[begin.end() :])
            shutil.copyfileobj(source, target)


def _track(reported: Sequence[RecordedCollective], offset_microseconds: float) -> Iterator[dict[str, object]]:
    """Yield a named track, and a complete event for each collective."""
    place = {"pid": os.getpid(), "tid": _TRACK}
    if reported:
        yield {"ph": "M", "name": "thread_name", **place, "ts": offset_microseconds, "args": {"name": "communicators"}}
    for item in reported:
        yield {
            "ph": "X",
            "cat": "communicator",
            "name": item.operation,
            **place,
            "ts": offset_microseconds + item.began * 1e6,
            "dur": (item.ended - item.began) * 1e6,
            "args": {"group": item.group, "sequence": item.sequence, "bytes": item.size_bytes},
        }
