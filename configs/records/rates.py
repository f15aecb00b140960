"""From the raw samples of one measurement to its rates. Pure arithmetic.

    rates = rates_of(MeasurementSamples(record.cell, samples), record.figures)     # samples: {"0/pass_seconds": array,
    ...} rates = rates_of(MeasurementSamples(record.cell, samples).without_first(12), record.figures)

A pass (or a training step) is over when the slowest rank is done, so its wall time is the largest over
ranks. A measurement's rate is all its work over the sum of those times. The measurement is the sampling unit of all
statistics (`reports.numbers.statistics`).

The wall time of a pass is split, as the mean over ranks, into what each rank did and how long it then had
to wait for the slowest: prefill + decode + other + waiting for `generate` and `seq2seq`, busy + waiting for the others
and for micro-batches, which overlap. Of `encode` tokens are those of the prompts.
A step of training is data + forward + backward + exposed communication + optimizer + other + waiting, where the
engine can see what waits for communication, else busy + waiting. Elsewhere communication inside a step is part of the
busy time: the engine does not time it, so it is unknown. What a checkpoint holds up is no part of a step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats
from configs.records.record import Figure
from configs.spec.cell import Cell
from configs.workloads import DESCRIPTORS, descriptor_of
from configs.workloads.prompted import PromptedWorkload
from configs.workloads.train import TRAINING_PARTS

Column = NDArray[np.generic]

SORTED_AT_ONCE = 2048
"""Up to so many values sorting takes less time than finding a few order statistics does."""

LATENCY_COLUMNS = {name: column for known in DESCRIPTORS.values() for name, column in known.latencies.items()}
"""What takes time -> its column. A step or pass takes its wall time, the others what their own rank saw."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one measurement amounts to; None where the workload has no such figure.

    `latency_seconds` is the median of what one waits for: a request, a step, or a pass. `prefill_seconds`
    to `waiting_seconds` are the parts of a mean pass (or step) and sum to its wall time.
    """

    wall_seconds: float
    passes: int
    tokens_per_second: float | None = None
    prompts_per_second: float | None = None
    embeddings_per_second: float | None = None
    items_per_second: float | None = None
    ttft_seconds: float | None = None
    time_per_output_token_seconds: float | None = None
    step_seconds: float | None = None
    latency_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    data_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    exposed_communication_seconds: float | None = None
    optimizer_seconds: float | None = None
    busy_seconds: float | None = None
    other_seconds: float | None = None
    waiting_seconds: float | None = None

    @property
    def throughput(self) -> float | None:
        """The rate that the workload is judged by: embeddings a second where it encodes, items of noop, else tokens."""
        if self.embeddings_per_second is not None:
            return self.embeddings_per_second
        return self.items_per_second if self.tokens_per_second is None else self.tokens_per_second


def by_rank(samples: Mapping[str, Column], column: str) -> list[Column]:
    """The arrays `<rank>/<column>`, in order of rank. Raises ValueError where no rank has the column."""
    found: dict[int, Column] = {}
    for key, array in samples.items():
        rank, _, name = key.partition("/")
        if name == column:
            found[int(rank)] = array
    if not found:
        raise ValueError(f"samples: no rank has a column {column}; available: {', '.join(sorted(samples)) or 'none'}")
    return [found[rank] for rank in sorted(found)]


def wall_seconds(ranks: list[Column], column: str) -> Floats:
    """Wall time of each pass: the largest over ranks. Raises ValueError where ranks count different passes."""
    lengths = [len(array) for array in ranks]
    if len(set(lengths)) > 1:
        raise ValueError(f"samples: {column} has {lengths} entries by rank; each rank must count the same passes")
    if len(ranks) == 1:
        return _floats(ranks[0])
    slowest: Floats = np.max(np.stack([_floats(array) for array in ranks]), axis=0)
    return slowest


class MeasurementSamples:
    """The samples of one measurement by column, and what is asked of them more than once.

    Raises ValueError where a column is missing or does not fit the others, when it is asked for.
    """

    def __init__(self, cell: Cell, samples: Mapping[str, Column]) -> None:
        found: dict[str, dict[int, Column]] = {}
        for key, array in samples.items():
            rank, _, name = key.partition("/")
            found.setdefault(name, {})[int(rank)] = array
        self.cell = cell
        self.columns = {name: [ranks[rank] for rank in sorted(ranks)] for name, ranks in found.items()}
        self.series = descriptor_of(cell.workload).series
        if descriptor_of(cell.workload).own_program and self.series in self.columns:
            # A program that was stopped: its ranks may have ended different numbers of steps.
            fewest = min(len(array) for array in self.columns[self.series])
            self.columns = {name: [array[:fewest] for array in ranks] for name, ranks in self.columns.items()}

    def ranks(self, column: str) -> list[Column]:
        """The column of each rank, in order of rank."""
        if column not in self.columns:
            there = ", ".join(sorted(self.columns)) or "none"
            raise ValueError(f"samples: no rank has a column {column}; available: {there}")
        return self.columns[column]

    @cached_property
    def walls(self) -> Floats:
        """Wall time of each pass, or step."""
        return wall_seconds(self.ranks(self.series), self.series)

    def without_first(self, first: int) -> "MeasurementSamples":
        """Without the samples of the first so many passes (or steps).

        Each pass does the same work, so each has the same share of a column; what is given for one pass only
        (`batch_sequences`) stays.
        """
        if first == 0:
            return self
        rest = MeasurementSamples(self.cell, {})
        passes = len(self.walls)
        requests = [len(array) for array in self.columns.get("request_seconds", [])]
        for name, ranks in self.columns.items():
            if name == "batch_sequences" and [len(array) for array in ranks] != requests:
                rest.columns[name] = ranks
                continue
            for array in ranks:
                if len(array) % passes:
                    raise ValueError(f"samples: {len(array)} {name} are not divisible by {passes} passes")
            rest.columns[name] = [array[first * (len(array) // passes) :] for array in ranks]
        return rest

    def latencies(self) -> dict[str, Floats]:
        """Every single latency by kind (LATENCY_COLUMNS), in seconds, over all ranks. What it has not is left out.

        Of a kind without latencies of its own, as of a server's runs, the pass is no latency of anybody.
        """
        found: dict[str, Floats] = {}
        if not descriptor_of(self.cell.workload).latencies:
            return found
        for kind, column in LATENCY_COLUMNS.items():
            if column in self.columns:
                values = self.walls if column == self.series else _joined(self.columns[column])
                if len(values):
                    found[kind] = values
        return found


def time_per_output_token(request_seconds: Column, ttft_seconds: Column, new_tokens: int) -> Floats | None:
    """(end-to-end - time to first token) / (new_tokens - 1), by batch; None where there is one token only."""
    if new_tokens < 2:
        return None
    return (_floats(request_seconds) - _floats(ttft_seconds)) / (new_tokens - 1)


def rates_of(measurement: MeasurementSamples, figures: Mapping[str, Figure]) -> Rates:
    """Rates of the passes that are left in a measurement. Raises ValueError naming a missing column or figure."""
    work, known = measurement.cell.workload, descriptor_of(measurement.cell.workload)
    if known.decodes:
        return _decode(measurement)
    walls, ranks = measurement.walls, measurement.ranks(measurement.series)
    total, count = float(walls.sum()), len(walls)
    busy = sum(float(_floats(rank).sum()) for rank in ranks) / len(ranks)
    parts = {"busy_seconds": _rate(busy, count), "waiting_seconds": _rate(total - busy, count)}
    if known.takes_prompts:
        return _encode(measurement, figures, parts)
    if known.trains:
        return _train(measurement, figures, busy, parts)
    if known.own_program:
        return _script(measurement, parts)
    units, waited = work.units_per_pass(measurement.cell.layout.dp), walls
    rates = {} if units is None else {known.throughput: _rate(units * count, total)}
    column = known.series if known.latency is None else known.latencies[known.latency.waited_for]
    if column != known.series:
        waited = _joined(measurement.ranks(column))
    latency = _median(waited) if known.latencies else None
    return Rates(total, count, latency_seconds=latency, **rates, **parts)


def _train(
    measurement: MeasurementSamples, figures: Mapping[str, Figure], busy: float, parts: dict[str, float | None]
) -> Rates:
    """Tokens a second; `busy`: seconds of all steps, the mean over ranks."""
    walls = measurement.walls
    total, count, median = float(walls.sum()), len(walls), _median(walls)
    tokens = figures.get("tokens_per_step")
    if isinstance(tokens, bool) or not isinstance(tokens, int | float):
        raise ValueError(f"figures.tokens_per_step: got {tokens!r}, expected the tokens of one step over all ranks")
    rate = _rate(tokens * count, total)
    parts = _training_parts(measurement, busy, count) or parts
    parts["waiting_seconds"] = _rate(total - busy, count)
    return Rates(total, count, tokens_per_second=rate, step_seconds=median, latency_seconds=median, **parts)


def _script(measurement: MeasurementSamples, parts: dict[str, float | None]) -> Rates:
    """Tokens or items a second: those that the study states for a step, else those that the script told of each."""
    walls, work = measurement.walls, measurement.cell.workload
    total, count, median = float(walls.sum()), len(walls), _median(walls)
    stated = work.work_of_step(measurement.cell.layout)
    amount = float(count)
    if stated is not None and stated[1] is not None:
        amount = float(stated[1] * count)
    elif "step_units" in measurement.columns and not work.counts_calls:
        ranks = [_floats(column) for column in measurement.columns["step_units"]]
        if any(len(rank) != count for rank in ranks):
            raise ValueError(f"samples: {[len(rank) for rank in ranks]} step_units but {count} steps")
        stack = np.stack(ranks)
        per_step = {"sum": stack.sum(axis=0), "max": stack.max(axis=0), "rank_0": stack[0]}[work.combined]
        amount = float(per_step.sum())
    rate = {descriptor_of(work).throughput: _rate(amount, total)}
    return Rates(total, count, step_seconds=median, latency_seconds=median, **rate, **parts)


def _training_parts(measurement: MeasurementSamples, busy: float, count: int) -> dict[str, float | None]:
    """Parts of a mean step, means over ranks; {} for records without. On GPUs communication is part of the others."""
    present = [name for name in TRAINING_PARTS if name in measurement.columns]
    if count == 0 or not {*TRAINING_PARTS} - {"exposed_communication_seconds"} <= {*present}:
        return {}
    parts: dict[str, float | None] = {}
    known = 0.0
    for name in present:
        ranks = measurement.ranks(name)
        seconds = sum(float(_floats(rank).sum()) for rank in ranks) / len(ranks)
        parts[name] = seconds / count
        known += seconds
    parts["other_seconds"] = (busy - known) / count
    return parts


def _encode(measurement: MeasurementSamples, figures: Mapping[str, Figure], parts: dict[str, float | None]) -> Rates:
    """Embeddings a second, and the tokens that went into them; these are unknown where a figure is missing."""
    walls, requests = measurement.walls, measurement.ranks("request_seconds")
    total, count = float(walls.sum()), len(walls)
    sequences = _sequences(measurement.ranks("batch_sequences"), requests, count)
    prompts, tokens = figures.get("num_prompts"), figures.get("prompt_tokens")
    known = isinstance(prompts, int) and isinstance(tokens, int) and prompts > 0
    return Rates(
        total,
        count,
        tokens_per_second=_rate(sequences * tokens / prompts, total) if known else None,  # type: ignore[operator]
        prompts_per_second=_rate(sequences, total),
        embeddings_per_second=_rate(sequences, total),
        latency_seconds=_median(_joined(requests)),
        **parts,
    )


def whole_figures(
    cell: Cell, figures: Mapping[str, Figure], rank_figures: Mapping[str, Sequence[Figure]]
) -> dict[str, Figure]:
    """A record's figures, with prompts and their tokens counted over all replicas; ranks of one count the same."""
    whole = dict(figures)
    if descriptor_of(cell.workload).takes_prompts:
        copies = cell.layout.tp * cell.layout.pp
        for name in ("num_prompts", "prompt_tokens"):
            # What all ranks counted alike stands once, and is that of one replica.
            equal = [figures.get(name)] * cell.layout.ranks
            values = [value for value in rank_figures.get(name, equal) if isinstance(value, int)]
            if len(values) == cell.layout.ranks:
                whole[name] = sum(values) // copies
    return whole


def _decode(measurement: MeasurementSamples) -> Rates:
    """Tokens a second, and what a user waits for the first and for each further token."""
    work = measurement.cell.workload
    assert isinstance(work, PromptedWorkload)
    walls, ranks, requests = measurement.walls, measurement.ranks("pass_seconds"), measurement.ranks("request_seconds")
    total, count = float(walls.sum()), len(walls)
    ttft, request = _joined(measurement.ranks("ttft_seconds")), _joined(requests)
    if len(ttft) != len(request):
        raise ValueError(
            f"samples: {len(ttft)} ttft_seconds but {len(request)} request_seconds; expected one per batch"
        )
    sequences = _sequences(measurement.ranks("batch_sequences"), requests, count)
    token_seconds = time_per_output_token(request, ttft, work.decoded_tokens)
    shares = count * len(ranks)
    prefill, asked = float(ttft.sum()), float(request.sum())
    own = sum(float(_floats(rank).sum()) for rank in ranks)
    parts = {
        "prefill_seconds": _rate(prefill, shares),
        "decode_seconds": _rate(asked - prefill, shares),
        "other_seconds": _rate(own - asked, shares),
    }
    if work.in_micro_batches(measurement.cell.layout.pp) < work.batch_size:
        # Micro-batches are under way at the same time: their times are no parts of the pass.
        parts = {"busy_seconds": _rate(own, shares)}
    return Rates(
        total,
        count,
        tokens_per_second=_rate(sequences * work.decoded_tokens, total),
        prompts_per_second=_rate(sequences, total),
        ttft_seconds=_median(ttft),
        time_per_output_token_seconds=None if token_seconds is None else _median(token_seconds),
        latency_seconds=_median(request),
        **parts,
        waiting_seconds=_rate(total * len(ranks) - own, shares),
    )


def _sequences(sizes: list[Column], requests: list[Column], passes: int) -> float:
    """Sequences answered in all passes. Sizes are given for each batch of each pass, or of one pass."""
    total = 0.0
    for rank, (size, request) in enumerate(zip(sizes, requests, strict=True)):
        if len(size) not in (len(request), len(request) / passes):
            raise ValueError(f"samples: rank {rank} has {len(request)} request_seconds but {len(size)} batch_sequences")
        total += float(size.sum()) * (len(request) / len(size) if len(size) else 0)
    return total


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _median(values: Column) -> float | None:
    """As np.median, at a tenth of its price for the short columns that there are so many of."""
    count = len(values)
    if count == 0:
        return None
    middle = count // 2
    floats = _floats(values)
    if count <= SORTED_AT_ONCE:
        placed = np.sort(floats)  # what is no number comes last
    else:
        placed = np.partition(floats, (max(middle - 1, 0), middle, count - 1))
    median = float(placed[middle] if count % 2 else (placed[middle - 1] + placed[middle]) / 2)
    return median if math.isfinite(median) and math.isfinite(placed[-1]) else None


def _joined(ranks: list[Column]) -> Floats:
    return _floats(ranks[0] if len(ranks) == 1 else np.concatenate(ranks))


def _floats(values: Column) -> Floats:
    return np.asarray(values, dtype=np.float64)
