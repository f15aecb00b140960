"""From the raw samples of one visit to its rates. Pure arithmetic.

    rates = visit_rates(record.cell, record.figures, samples)     # samples: {"0/pass_seconds": array, ...}

A pass (or a training step) is over when the slowest rank is done, so its wall time is the largest over
ranks. A visit's rate is all its work over the sum of those times. The visit is the sampling unit of all
statistics (`reports.statistics`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.cell import Cell, GenerateWorkload, NoopWorkload
from configs.record import Figure

Column = NDArray[np.generic]
Floats = NDArray[np.float64]

RATE_COLUMNS: dict[str, tuple[str, ...]] = {
    "generate": ("pass_seconds", "ttft_seconds", "request_seconds", "batch_sequences"),
    "train": ("step_seconds",),
    "noop": ("pass_seconds",),
}
"""Workload kind -> the columns that `visit_rates` reads."""


@dataclass(frozen=True)
class Rates:
    """What one visit amounts to; None where the workload has no such figure."""

    wall_seconds: float
    passes: int
    tokens_per_second: float | None = None
    prompts_per_second: float | None = None
    items_per_second: float | None = None
    ttft_seconds: float | None = None
    time_per_output_token_seconds: float | None = None
    step_seconds: float | None = None

    @property
    def throughput(self) -> float | None:
        """The rate that the workload is judged by: tokens a second, or items for noop."""
        return self.tokens_per_second if self.tokens_per_second is not None else self.items_per_second


def by_rank(samples: Mapping[str, Column], column: str) -> list[Column]:
    """The arrays `<rank>/<column>`, in order of rank. Raises ValueError where no rank has the column."""
    found: dict[int, Column] = {}
    for key, array in samples.items():
        rank, _, name = key.partition("/")
        if name == column:
            found[int(rank)] = array
    if not found:
        raise ValueError(f"samples: no rank has a column {column}; there are: {', '.join(sorted(samples)) or 'none'}")
    return [found[rank] for rank in sorted(found)]


def wall_seconds(ranks: list[Column], column: str) -> Floats:
    """Wall time of each pass: the largest over ranks. Raises ValueError where ranks count different passes."""
    lengths = [len(array) for array in ranks]
    if len(set(lengths)) > 1:
        raise ValueError(f"samples: {column} has {lengths} entries by rank; each rank must count the same passes")
    slowest: Floats = np.max(np.stack([_floats(array) for array in ranks]), axis=0)
    return slowest


def time_per_output_token(request_seconds: Column, ttft_seconds: Column, new_tokens: int) -> Floats | None:
    """(end-to-end - time to first token) / (new_tokens - 1), by batch; None where there is one token only."""
    if new_tokens < 2:
        return None
    return (_floats(request_seconds) - _floats(ttft_seconds)) / (new_tokens - 1)


def visit_rates(cell: Cell, figures: Mapping[str, Figure], samples: Mapping[str, Column]) -> Rates:
    """Rates of one completed, timed visit. Raises ValueError naming the column or figure that is missing."""
    if isinstance(cell.workload, GenerateWorkload):
        return _generate(cell.workload, samples)
    if isinstance(cell.workload, NoopWorkload):
        walls = wall_seconds(by_rank(samples, "pass_seconds"), "pass_seconds")
        total = float(walls.sum())
        return Rates(total, len(walls), items_per_second=_rate(cell.workload.items * len(walls), total))
    walls = wall_seconds(by_rank(samples, "step_seconds"), "step_seconds")
    total = float(walls.sum())
    tokens = figures.get("tokens_per_step")
    if isinstance(tokens, bool) or not isinstance(tokens, int | float):
        raise ValueError(f"figures.tokens_per_step: {tokens!r}; expected the tokens of one step over all ranks")
    return Rates(total, len(walls), tokens_per_second=_rate(tokens * len(walls), total), step_seconds=_median(walls))


def _generate(work: GenerateWorkload, samples: Mapping[str, Column]) -> Rates:
    walls = wall_seconds(by_rank(samples, "pass_seconds"), "pass_seconds")
    total = float(walls.sum())
    ttft = np.concatenate(by_rank(samples, "ttft_seconds"))
    request = np.concatenate(by_rank(samples, "request_seconds"))
    if len(ttft) != len(request):
        raise ValueError(f"samples: {len(ttft)} ttft_seconds but {len(request)} request_seconds; expected one a batch")
    sequences = _sequences(by_rank(samples, "batch_sequences"), by_rank(samples, "request_seconds"), len(walls))
    token_seconds = time_per_output_token(request, ttft, work.new_tokens)
    return Rates(
        total,
        len(walls),
        tokens_per_second=_rate(sequences * work.new_tokens, total),
        prompts_per_second=_rate(sequences, total),
        ttft_seconds=_median(ttft),
        time_per_output_token_seconds=None if token_seconds is None else _median(token_seconds),
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
    if len(values) == 0:
        return None
    median = float(np.median(_floats(values)))
    return median if math.isfinite(median) else None


def _floats(values: Column) -> Floats:
    return np.asarray(values, dtype=np.float64)
