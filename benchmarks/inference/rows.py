"""The rows of `make bench-inference`: from records and samples to figures with intervals, held against their bars.

    rows = inference_rows(read_measured(run))

A figure of several repeats is the median of what each block gives (a ratio is taken within the block, where both sides
were measured minutes apart), with the 95 % interval of that median. Pure functions but for `read_measured`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from configs.plans.paths import RunPaths
from configs.records.rates import Column, by_rank
from configs.records.record import Record, Status
from configs.records.samples import read_samples
from configs.spec.cell import Cell
from configs.workloads.communication import Collective, CommunicationWorkload
from configs.workloads.generate import GenerateWorkload
from reports.numbers.statistics import Bounds, estimate, paired_ratio
from tasks.campaign.ledger import read_ledger

COLUMNS = (
    "gap_seconds",
    "ttft_seconds",
    "warmup_ttft_seconds",
    "pass_seconds",
    "weights_read_seconds",
    "operation",
    "size_bytes",
    "call_seconds",
    "answer_logits",
    "cached_logits",
    "answer_tokens",
)
SUM_BYTES = 16384
PREFILL_TOKENS = 512
MANY_SEQUENCES = 64

Work = Literal["decode", "prefill", "many", "answers", "sums"]
Word = Literal["met", "missed", "undecided", "not measured"]
ByBlock = dict[int, float]


@dataclass(frozen=True)
class Measured:
    """One record with its samples, keyed `<rank>/<column>`."""

    record: Record
    samples: Mapping[str, Column]

    @property
    def cell(self) -> Cell:
        """What was measured."""
        return self.record.cell


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure in its unit, its bar, and on which side of it to stay.

    `value` None: not measured, `note` says why. An exact figure has no interval and needs none.
    """

    what: str
    unit: str
    bar: float
    at_most: bool = False
    value: float | None = None
    interval: Bounds | None = None
    repeats: int = 0
    exact: bool = False
    note: str = ""

    @property
    def word(self) -> Word:
        """met and missed need the whole interval on one side of the bar."""
        if self.value is None:
            return "not measured"
        low, high = (self.value, self.value) if self.exact else self.interval or (None, None)
        if low is None or high is None:
            return "undecided"
        if self.at_most:
            return "met" if high <= self.bar else "missed" if low > self.bar else "undecided"
        return "met" if low >= self.bar else "missed" if high < self.bar else "undecided"


def read_measured(run: RunPaths) -> list[Measured]:
    """The deciding timed record of each cell and repeat of a run folder, failed ones without samples."""
    ledger = read_ledger(run)
    found = []
    for place in sorted(ledger.entries, key=str):
        entry = ledger.decisive(place)
        if entry is None or place[1] != "timed":
            continue
        whole = entry.status is Status.COMPLETED and entry.record.num_columns
        found.append(Measured(entry.record, read_samples(entry.path.with_suffix(".npz"), COLUMNS) if whole else {}))
    return found


def work_of(cell: Cell) -> Work | None:
    """Which of the study's workloads a cell has."""
    work = cell.workload
    if isinstance(work, CommunicationWorkload):
        return "sums"
    if not isinstance(work, GenerateWorkload):
        return None
    if work.answers:
        return "answers"
    if work.batch_size == MANY_SEQUENCES:
        return "many"
    return "prefill" if work.prompt_tokens == PREFILL_TOKENS else "decode"


class Results:
    """The records of the study, asked for by what they are of."""

    def __init__(self, measured: Iterable[Measured]) -> None:
        self._measured = list(measured)

    def of(self, work: Work | None, **fields: Any) -> list[Measured]:
        """Completed records of a workload (None: any that is timed) whose cell has these fields, defaults else."""
        return [found for found in self._all(work, fields) if found.record.status is Status.COMPLETED]

    def why(self, work: Work | None, **fields: Any) -> str:
        """Why there is no such record."""
        failures = {
            found.record.failure.message if found.record.failure else str(found.record.status)
            for found in self._all(work, fields)
            if found.record.status is not Status.COMPLETED
        }
        return "; ".join(sorted(failures)) or "no such cell was measured"

    def _all(self, work: Work | None, fields: dict[str, Any]) -> list[Measured]:
        wanted = {"engine": "rankwise", "engine_mode": "eager", "page_cache": "warm", "tp": 1, "pp": 1} | fields
        works = (work,) if work else ("decode", "prefill", "many")
        return [found for found in self._measured if work_of(found.cell) in works and _has(found.cell, wanted)]


def _has(cell: Cell, wanted: dict[str, Any]) -> bool:
    """Whether these fields of the cell, or of its layout, are such."""
    return all(getattr(cell.layout if hasattr(cell.layout, name) else cell, name) == wanted[name] for name in wanted)


def by_block(found: Iterable[Measured], value: Callable[[Measured], float | None]) -> ByBlock:
    """Repeat -> value, where it is known."""
    known = ((one.record.repeat, value(one)) for one in found)
    return {repeat: number for repeat, number in known if number is not None}


def token_seconds(found: Measured) -> float:
    """Median time between two tokens."""
    return float(np.median(np.concatenate(by_rank(found.samples, "gap_seconds"))))


def read_share(found: Measured) -> float:
    """A plain read of the weights, the slowest rank's, as a share of the time between two tokens."""
    read = np.max(np.stack(by_rank(found.samples, "weights_read_seconds")), axis=0)
    return float(np.median(read)) / token_seconds(found)


def first_token_seconds(found: Measured) -> float:
    """Median time to first token."""
    return float(np.median(np.concatenate(by_rank(found.samples, "ttft_seconds"))))


def pass_seconds(found: Measured) -> float:
    """Median time of a pass."""
    return float(np.median(np.max(np.stack(by_rank(found.samples, "pass_seconds")), axis=0)))


def sum_seconds(found: Measured) -> float:
    """Median time of an all-reduce of SUM_BYTES, the slowest rank's."""
    samples = found.samples
    chosen = (by_rank(samples, "operation")[0] == get_args(Collective).index("all_reduce")) & (
        by_rank(samples, "size_bytes")[0] == SUM_BYTES
    )
    return float(np.median(np.max(np.stack(by_rank(samples, "call_seconds")), axis=0)[chosen]))


def figure(name: str, over: Callable[[list[float]], float] = max) -> Callable[[Measured], float | None]:
    """A figure over the ranks that have it; None where none has."""

    def value(found: Measured) -> float | None:
        known = [number for number in _by_rank(found, name) if number is not None]
        return over(known) if known else None

    return value


def _by_rank(found: Measured, name: str) -> list[float | None]:
    # A record lists by rank only what differs between them.
    listed = found.record.rank_figures.get(name) or [found.record.figures.get(name)] * found.cell.layout.ranks
    return [float(number) if isinstance(number, int | float) else None for number in listed]


def to_first_token_seconds(found: Measured) -> float | None:
    """From the first read of the files to the first token of the first request: what a waiting user sees.

    Our first token comes before the weights are packed; a peer's is that of its warm-up.
    """
    load, first = figure("load_seconds")(found), figure("first_ttft_seconds")(found)
    if first is None and found.cell.engine != "rankwise" and any("warmup_ttft" in key for key in found.samples):
        first = max(float(stamps[0]) for stamps in by_rank(found.samples, "warmup_ttft_seconds"))
    return None if load is None or first is None else load + first


def cold_seconds(found: Measured) -> float | None:
    """The slowest rank's load with the hashing that went on meanwhile: reading ahead did not wait for it."""
    pairs = zip(_by_rank(found, "load_seconds"), _by_rank(found, "hash_seconds"), strict=True)
    known = [seconds + (hashing or 0.0) for seconds, hashing in pairs if seconds is not None]
    return max(known) if known else None


def inference_rows(measured: Iterable[Measured]) -> list[Row]:
    """All rows, in the order of the issue's table."""
    results = Results(measured)
    return [*_decode_rows(results), *_many_rows(results), *_load_rows(results), *_answer_rows(results)]


def _ratio(row: Row, first: ByBlock, second: ByBlock, why: str) -> Row:
    """The row with first / second within blocks."""
    found = paired_ratio(first, second)
    if found is None:
        return _with(row, note=why)
    return _with(row, value=found.value, interval=found.interval, repeats=found.count)


def _absolute(row: Row, values: ByBlock, why: str) -> Row:
    """The row with the median of the blocks' values."""
    found = estimate(values.values())
    if found is None:
        return _with(row, note=why)
    return _with(row, value=found.median, interval=found.interval, repeats=found.count)


def _with(row: Row, **changes: Any) -> Row:
    return Row(**{**vars(row), **changes})


def _decode_rows(results: Results) -> list[Row]:
    ours = by_block(results.of("decode"), token_seconds)
    two = by_block(results.of("decode", tp=2), token_seconds)
    rows = []
    for mode, bar in (("eager", 2.5), ("static", 1.0), ("compiled", 1.0)):
        fields = {"engine": "transformers", "engine_mode": mode}
        peer = by_block(results.of("decode", **fields), token_seconds)
        row = Row(f"decode, batch 1, one rank, against transformers {mode}", "times", bar)
        rows.append(_ratio(row, peer, ours, results.why("decode", **fields)))
    row = Row("the same, share of a plain read of the weights", "%", 0.70)
    rows.append(_absolute(row, by_block(results.of("decode"), read_share), results.why("decode")))
    row = Row("decode, batch 1, tp=2, share of what two cores read together", "%", 0.65)
    rows.append(_absolute(row, by_block(results.of("decode", tp=2), read_share), results.why("decode", tp=2)))
    for engine, title, bar in (("transformers", "transformers tp=2", 4.0), ("deepspeed", "DeepSpeed AutoTP tp=2", 1.8)):
        peer = by_block(results.of("decode", engine=engine, tp=2), token_seconds)
        row = Row(f"the same, against {title}", "times", bar)
        rows.append(_ratio(row, peer, two, results.why("decode", engine=engine, tp=2)))
    return rows


def _many_rows(results: Results) -> list[Row]:
    sums = results.of("sums", tp=2, page_cache=None)
    row = Row("sum of 16 KB over two ranks of one host", "us", 25e-6, at_most=True)
    rows = [_absolute(row, by_block(sums, sum_seconds), results.why("sums", tp=2, page_cache=None))]
    first, second = (by_block(results.of("prefill", tp=tp, page_cache=None), first_token_seconds) for tp in (1, 2))
    row = Row(f"prefill of {PREFILL_TOKENS} tokens, tp=2 against one rank", "times", 1.8)
    rows.append(_ratio(row, first, second, results.why("prefill", tp=2, page_cache=None)))
    (one_size, one), (two_size, two) = (_best(results.of("many", pp=pp)) for pp in (1, 2))
    row = Row(f"pp=2, {MANY_SEQUENCES} sequences, against one rank at its best micro-batch", "times", 1.5)
    row = _ratio(row, one, two, results.why("many", pp=2))
    rows.append(_with(row, note=row.note or f"micro-batches of {two_size} on two stages, of {one_size} on one rank"))
    return rows


def _best(found: list[Measured]) -> tuple[int | None, ByBlock]:
    """The micro-batch size with the smallest median pass, and its passes by block."""
    by_size: dict[int, ByBlock] = {}
    for one in found:
        assert isinstance(one.cell.workload, GenerateWorkload)
        size = one.cell.workload.in_micro_batches(one.cell.layout.pp)
        by_size.setdefault(size, {})[one.record.repeat] = pass_seconds(one)
    if not by_size:
        return None, {}
    best = min(by_size, key=lambda size: float(np.median(list(by_size[size].values()))))
    return best, by_size[best]


def _load_rows(results: Results) -> list[Row]:
    asked, device = figure("load_asked_bytes"), figure("load_device_bytes", sum)
    seconds, checkpoint, raw = figure("load_seconds"), figure("load_bytes"), figure("raw_read_seconds")
    warm, cold = results.of(None, tp=2), results.of(None, tp=2, page_cache="cold")
    ours = by_block(warm, seconds)
    row = Row("bytes asked for by a rank at tp=2, of the checkpoint", "times", 0.55, at_most=True)
    rows = [_ratio(row, by_block(warm, asked), by_block(warm, checkpoint), results.why(None, tp=2))]
    why = results.why(None, tp=2, page_cache="cold")
    row = Row("bytes from the device per node, cold, of the checkpoint", "times", 1.05, at_most=True)
    rows.append(_ratio(row, by_block(cold, device), by_block(cold, checkpoint), why))
    peers: tuple[tuple[str, dict[str, Any]], ...] = (
        ("transformers tp=2", {"engine": "transformers", "tp": 2}),
        ("transformers on one rank", {"engine": "transformers", "engine_mode": "static"}),
    )
    for title, fields in peers:
        peer = by_block(results.of(None, **fields), seconds)
        row = Row(f"load to ready at tp=2, warm, against {title}", "times", 2.0)
        rows.append(_ratio(row, peer, ours, results.why(None, **fields)))
    two = by_block(results.of("decode", tp=2), to_first_token_seconds)
    for title, fields in peers:
        peer = by_block(results.of("decode", **fields), to_first_token_seconds)
        row = Row(f"load to first token at tp=2, warm, 64 tokens of prompt, against {title}", "times", 1.0)
        rows.append(_ratio(row, peer, two, results.why("decode", **fields)))
    row = Row("load to ready at tp=2, cold, of a raw read of the files", "times", 1.1, at_most=True)
    rows.append(_ratio(row, by_block(cold, cold_seconds), by_block(cold, raw), why))
    return rows


def _answer_rows(results: Results) -> list[Row]:
    def kept(dtype: str, **layout: int) -> Measured | None:
        found = results.of("answers", page_cache=None, dtype=dtype, **layout)
        return found[0] if found else None

    row = Row("float32 logits, tp=2 against one rank, largest difference relative", "", 1e-5, at_most=True, exact=True)
    one, two = kept("float32"), kept("float32", tp=2)
    if one is None or two is None:
        rows = [_with(row, note=results.why("answers", page_cache=None, dtype="float32", tp=2))]
    else:
        rows = [_with(row, value=largest_difference(one, two), repeats=1)]
    for dtype in ("float32", "bfloat16"):
        row = Row(f"pp=2 against one rank, {dtype}: answers that differ in a bit", "", 0, at_most=True, exact=True)
        one, two = kept(dtype), kept(dtype, pp=2)
        if one is None or two is None:
            rows.append(_with(row, note=results.why("answers", page_cache=None, dtype=dtype, pp=2)))
        else:
            rows.append(_with(row, value=float(unequal(one, two)), repeats=1))
    return rows


def _kept(found: Measured, column: str) -> Column:
    """What the rank that speaks kept: the only one with logits, the last where all keep tokens."""
    return by_rank(found.samples, column)[-1]


def largest_difference(one: Measured, other: Measured) -> float:
    """Largest difference of two runs' kept logits, by prefill and through the cache, over the largest logit."""
    differences, sizes = [], []
    for column in ("answer_logits", "cached_logits"):
        first, second = (_kept(found, column).astype(np.float64) for found in (one, other))
        assert first.shape == second.shape, f"{column}: {first.shape} and {second.shape}"
        differences.append(float(np.abs(first - second).max()))
        sizes.append(float(np.abs(first).max()))
    return max(differences) / max(sizes)


def unequal(one: Measured, other: Measured) -> int:
    """How many kept logits and tokens differ at all."""
    pairs = (
        [_kept(found, column) for found in (one, other)]
        for column in ("answer_logits", "cached_logits", "answer_tokens")
    )
    return sum(int((first != second).sum()) for first, second in pairs)


def table_text(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| what | bar | measured | 95 % interval | repeats | |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        side = "at most" if row.at_most else "at least"
        value = "" if row.value is None else _shown(row.value, row.unit)
        interval = "" if row.interval is None else " to ".join(_shown(end, row.unit) for end in row.interval)
        note = f"{row.word}{': ' if row.value is None and row.note else '; ' if row.note else ''}{row.note}"
        bar = f"{side} {_shown(row.bar, row.unit)}"
        lines.append(f"| {row.what} | {bar} | {value} | {interval} | {row.repeats or ''} | {note} |")
    return "\n".join(lines)


def _shown(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1%}"
    if unit == "us":
        return f"{value * 1e6:.1f} us"
    return f"{value:.3g}"
