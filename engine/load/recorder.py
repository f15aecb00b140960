"""Raw samples of a run: a row for each request, kept in arrays and written once at the end."""

import io
from array import array
from math import nan
from pathlib import Path

import numpy as np

from configs.common.base import write_atomically
from configs.load.samples import (
    CHUNK_COLUMN,
    FACTS_FILE,
    LAG_COLUMN,
    REQUEST_COLUMNS,
    SAMPLES_FILE,
    LoadFacts,
    RequestOutcome,
)
from engine.load.contents import RequestContent
from engine.load.replies import Reply

_MAX_MESSAGES = 20


class RequestRecorder:
    """Samples of the requests in the order in which they ended. Times are given on the clock that began at `origin`."""

    def __init__(self, origin: float) -> None:
        self.origin = origin
        self.errors: dict[str, int] = {}
        self._columns = {name: array("d") for name in REQUEST_COLUMNS}
        self._chunks = array("d")
        self._lags = array("d")

    def __len__(self) -> int:
        return len(self._columns["outcome"])

    @property
    def num_samples(self) -> int:
        """Numbers that are kept so far."""
        return len(self) * len(self._columns) + len(self._chunks) + len(self._lags)

    def add(
        self, turn: RequestContent, place: tuple[int, int], due: float, started: float, sent: float | None,
        ended: float, reply: Reply,
    ) -> None:  # fmt: skip
        """Add a request. place: (conversation, turn); `due` counts from the run's start, the others on the clock."""
        assert reply.outcome is not None
        chunks = reply.chunk_seconds
        values = (
            due,
            started - self.origin,
            nan if sent is None else sent - self.origin,
            chunks[0] - self.origin if chunks else nan,
            chunks[-1] - self.origin if chunks else nan,
            ended - self.origin,
            _or_nan(turn.prompt_tokens),
            _or_nan(reply.prompt_tokens),
            turn.new_tokens,
            _or_nan(reply.new_tokens),
            len(chunks),
            *place,
            reply.outcome,
            _or_nan(reply.http_status),
            reply.finish,
        )
        for name, value in zip(REQUEST_COLUMNS, values, strict=True):
            self._columns[name].append(value)
        self._chunks.extend(chunk - self.origin for chunk in chunks)
        if reply.outcome is not RequestOutcome.COMPLETED:
            known = reply.message in self.errors or len(self.errors) < _MAX_MESSAGES
            message = reply.message if known else "other errors"
            self.errors[message] = self.errors.get(message, 0) + 1

    def add_lag(self, seconds: float) -> None:
        """Add how late the timer was."""
        self._lags.append(seconds)

    def write(self, folder: Path, facts: LoadFacts) -> None:
        """Write samples, then facts, so that facts that exist have their samples. Raises OSError."""
        named = {**self._columns, CHUNK_COLUMN: self._chunks, LAG_COLUMN: self._lags}
        archive = io.BytesIO()
        np.savez(archive, allow_pickle=False, **{f"0/{name}": np.asarray(column) for name, column in named.items()})
        write_atomically(folder / SAMPLES_FILE, archive.getvalue())
        write_atomically(folder / FACTS_FILE, facts.model_dump_json(indent=1))


def _or_nan(value: int | None) -> float:
    return nan if value is None else value
