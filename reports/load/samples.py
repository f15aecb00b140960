"""Raw samples of a load run, read and put into the order in which the requests were due.

    run = read_load_run(Path("load/samples"))
    run.ttft_seconds, run.tpot_seconds, run.gap_seconds      # NaN where a request has none

Latencies count from when a request should have been sent, not from when it was: a generator or a server that holds
requests back would hide its queue otherwise (coordinated omission: G. Tene, "How NOT to measure latency", 2013).
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats, Ints
from configs.common.files.reading import read_model
from configs.load.samples import (
    CHUNK_COLUMN,
    FACTS_FILE,
    LAG_COLUMN,
    REQUEST_COLUMNS,
    SAMPLE_COLUMNS,
    SAMPLES_FILE,
    FinishCode,
    LoadFacts,
    RequestOutcome,
)
from configs.records.samples import DamagedSamplesError, read_samples

_TOKEN_SECONDS, _SHARE_OF_TTFT = 4e-5, 0.05
"""An answer whose tokens came within both came at one moment. Of a token: no server makes 25,000 tokens/s for one user,
but a network and the generator carry them. Of the time to first token: without a model, as of a stand-in, every answer
is that fast, and its first token too."""


@dataclass(frozen=True)
class LoadRun:
    """A run. columns: by name, one value per request, ascending by `scheduled_seconds`.

    gap_seconds, gap_request: time between two consecutive chunks, and the request that they belong to.
    lag_seconds: how late the generator's timer was.
    """

    facts: LoadFacts
    columns: dict[str, Floats]
    chunk_seconds: Floats
    chunk_request: Ints
    lag_seconds: Floats

    def __len__(self) -> int:
        return len(self.columns["outcome"])

    @cached_property
    def completed(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.columns["outcome"] == RequestOutcome.COMPLETED
        return found

    @cached_property
    def late_seconds(self) -> Floats:
        """How late the generator turned to each request."""
        return self.columns["started_seconds"] - self.columns["scheduled_seconds"]

    @cached_property
    def ttft_seconds(self) -> Floats:
        """Time to first token. A completed answer without any text counts as whole."""
        first = np.where(np.isnan(self.columns["first_seconds"]), self.columns["ended_seconds"], self._of("first"))
        return self._completed_only(first - self.columns["scheduled_seconds"])

    @cached_property
    def e2e_seconds(self) -> Floats:
        """From when a request was due to the end of its response."""
        return self._completed_only(self._of("ended") - self.columns["scheduled_seconds"])

    @cached_property
    def tokens(self) -> Floats:
        """Tokens of each answer by the server's usage; counted chunks where it gave none, or fewer than there are."""
        return np.fmax(self.columns["new_tokens"], self.columns["chunks"])  # fmax: of NaN and a count the count

    @cached_property
    def _answered(self) -> Floats:
        """As `tokens`; where chunks are no count, an answer that ended at its limit has as many as were asked for."""
        limited = np.isnan(self.columns["new_tokens"]) & (self.columns["finish"] == FinishCode.LENGTH)
        return np.where(limited, np.maximum(self.tokens, self.columns["asked_new_tokens"]), self.tokens)

    @cached_property
    def at_once(self) -> NDArray[np.bool_]:
        """Completed answers of several tokens whose text came at one moment, as behind a proxy that buffers.

        A long answer is read in several pieces, microseconds apart.
        """
        carried = _TOKEN_SECONDS * (self._answered - 1)
        waited = _SHARE_OF_TTFT * (self._of("first") - self.columns["scheduled_seconds"])
        apart = self._of("last") - self._of("first") > np.minimum(carried, waited)  # False of an answer without text
        found: NDArray[np.bool_] = self.completed & (self._answered > 1) & ~apart
        return found

    @cached_property
    def tpot_seconds(self) -> Floats:
        """Mean time per token after the first, (last - first) / (tokens - 1).

        NaN of answers of one token, and of those whose tokens came at one moment: how long each took is unknown.
        """
        mean = (self._of("last") - self._of("first")) / _or_nan(self.tokens - 1)
        return self._completed_only(np.where(self.at_once, np.nan, mean))

    @cached_property
    def judged_tpot_seconds(self) -> Floats:
        """What an objective bounds: TPOT; where it is unknown, end to end over all tokens, which counts waiting too."""
        return np.where(self.at_once, self.e2e_seconds / _or_nan(self._answered), self.tpot_seconds)

    @cached_property
    def tpot_with_first_seconds(self) -> Floats:
        """The other definition in use: end to end over all tokens, the first included."""
        return self.e2e_seconds / _or_nan(self.tokens)

    @cached_property
    def _gaps(self) -> tuple[Floats, Ints]:
        same = np.diff(self.chunk_request) == 0
        return np.diff(self.chunk_seconds)[same], self.chunk_request[1:][same]

    @property
    def gap_seconds(self) -> Floats:
        return self._gaps[0]

    @property
    def gap_request(self) -> Ints:
        return self._gaps[1]

    def _of(self, moment: str) -> Floats:
        return self.columns[f"{moment}_seconds"]

    def _completed_only(self, values: Floats) -> Floats:
        return np.where(self.completed, values, np.nan)


def _or_nan(counts: Floats) -> Floats:
    return np.where(counts > 0, counts, np.nan)


def read_load_run(folder: Path) -> LoadRun:
    """Read a run's folder. Raises OSError, and ValueError naming the file that is damaged."""
    facts = read_model(folder / FACTS_FILE, LoadFacts)
    path = folder / SAMPLES_FILE
    read = read_samples(path, SAMPLE_COLUMNS)
    missing = next((name for name in SAMPLE_COLUMNS if f"0/{name}" not in read), None)
    if missing is not None:
        raise DamagedSamplesError(f"{path}: no column {missing}")
    columns = {name: np.asarray(read[f"0/{name}"], dtype=np.float64) for name in SAMPLE_COLUMNS}
    chunks, lags = columns.pop(CHUNK_COLUMN), columns.pop(LAG_COLUMN)
    return in_order(facts, columns, chunks, lags, str(path))


def in_order(facts: LoadFacts, columns: dict[str, Floats], chunks: Floats, lags: Floats, where: str) -> LoadRun:
    """A run from its columns. Raises DamagedSamplesError, naming `where`, for columns that do not fit each other."""
    sizes = {len(columns[name]) for name in REQUEST_COLUMNS}
    counts = columns["chunks"]
    if len(sizes) != 1 or not (np.isfinite(counts) & (counts >= 0)).all() or counts.sum() != len(chunks):
        raise DamagedSamplesError(f"{where}: columns of different lengths")
    if not all(np.isfinite(columns[name]).all() for name in ("scheduled_seconds", "started_seconds", "ended_seconds")):
        raise DamagedSamplesError(f"{where}: a request without its times")
    order = np.argsort(columns["scheduled_seconds"], kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    owners = np.repeat(place, counts.astype(np.int64))
    by_request = np.argsort(owners, kind="stable")
    ordered = {name: column[order] for name, column in columns.items()}
    return LoadRun(facts, ordered, chunks[by_request], owners[by_request], lags)
