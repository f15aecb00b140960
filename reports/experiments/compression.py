"""Effect of each compression pass on size, speed, memory and answers, relative to the uncompressed model.

    result = compression(study, experiment)
    compression_sentence(result), compression_table(result), compression_lines(result)
    draw_compression(figure, result)                    # reports.plots.experiments.compression

Speed is the ratio over pairs of the same block. Answers are compared by the ladder of the correctness experiment, with
the uncompressed model in place of the reference: perplexity on the prompts, divergence of the next token, the first
greedy token that differs. What an encoder answers are vectors: there the cosine distance takes that place. Whether the
uncompressed model is right is for a correctness experiment to say.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from configs.plans.plan import PlannedExperiment, RefusedPoint
from reports.decisions.pareto import on_front
from reports.experiments.compression_answers import Quality, quality_of
from reports.numbers.statistics import Ratio, estimate, paired_ratio, ties
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading
from reports.tables import max_over_ranks
from reports.text import (
    UNKNOWN,
    Table,
    change,
    escaped,
    estimate_cell,
    joined,
    mebibytes,
    not_apart,
    number,
    percent,
    ratio_cell,
    ratio_text,
)

MOST_LOSS = 0.01
"""What a recommendation may lose: the relative change of perplexity, or the mean cosine distance of embeddings."""


@dataclass(frozen=True)
class Compressed:
    """One pass in one precision. Ratios are to the base; above 1 is more work a second, or less time a token.

    resolved: the passes that were run, where a level stands for several. size_bytes: of the weights, over all ranks.
    share: of the base's size. answers: the cell that kept them.
    """

    label: str
    result: CellResult
    base: bool
    resolved: str | None
    size_bytes: float | None
    share: float | None
    throughput: Ratio | None
    latency: Ratio | None
    peak: float | None
    quality: Quality | None
    answers: CellResult | None

    @property
    def measurements(self) -> list[Reading]:
        """Of both its cells: the first of a launch is the one that says what loading took."""
        cells = [self.result, *([self.answers] if self.answers else [])]
        return [measurement for cell in cells for measurement in cell.completed.values()]

    @property
    def loss(self) -> float | None:
        """What the answers lost, as a share; the base lost nothing. None: unknown, or `broken`."""
        return 0.0 if self.base else self.quality.loss if self.quality and self.quality.finite else None

    @property
    def broken(self) -> bool:
        """Whether its answers are no numbers, as those of weights or activations that overflow."""
        return self.quality is not None and not self.quality.finite

    @property
    def speed(self) -> float | None:
        """Throughput over the base's."""
        return 1.0 if self.base and self.result.completed else self.throughput.value if self.throughput else None


@dataclass(frozen=True)
class CompressionResult:
    """One experiment of one model: the base first, where it is of the same device. `refused`: what this version has
    not."""

    rows: tuple[Compressed, ...]
    refused: tuple[RefusedPoint, ...]

    @property
    def base(self) -> Compressed:
        return self.rows[0]

    @property
    def encodes(self) -> bool:
        return self.base.result.kind.answers == "vectors"

    @property
    def perplexity(self) -> float | None:
        """Of the base, on the prompts."""
        ladders = (row.quality.ladder for row in self.rows if row.quality and row.quality.ladder)
        return next((ladder.perplexity_reference for ladder in ladders), None)

    def placed(self, figure: str) -> list[Compressed]:
        """The rows that have a loss and the figure (`speed` or `share`), in the order of the table."""
        return [row for row in self.rows if row.loss is not None and getattr(row, figure) is not None]

    def front(self, figure: str) -> list[Compressed]:
        """Of those, what no other beats in both; more speed is better, and less share."""
        placed = self.placed(figure)
        sign = 1.0 if figure == "speed" else -1.0
        kept = on_front([(row.loss or 0.0, sign * getattr(row, figure)) for row in placed], more_x=False)
        return [row for row, best in zip(placed, kept, strict=True) if best]


def compression(study: StudyResult, experiment: PlannedExperiment) -> CompressionResult:
    """The rows in the order of the study file; what was not measured is among them. Of several devices the
    uncompressed model may have run on another one: then no row is the base, and nothing has a ratio."""
    assert experiment.points, f"experiment {experiment.name} has no points"
    groups: dict[tuple[str, str], dict[bool, CellResult]] = {}
    labels: dict[tuple[str, str], str] = {}
    for point in experiment.points:
        group = (point.values["compression"], point.values["dtype"])
        groups.setdefault(group, {})[point.values["answers"]] = study.cells[point.cell]
        if not point.values["answers"]:
            labels[group] = point.label
    named = next((point for point in experiment.points if point.baseline), None)  # none: it is of another device
    first = {} if named is None else groups[named.values["compression"], named.values["dtype"]]
    ordered = sorted(groups, key=lambda group: groups[group] is not first)
    rows = [_row(study, labels[group], groups[group], first, len(groups) - 1) for group in ordered]
    return CompressionResult(tuple(rows), experiment.refused)


def _row(
    study: StudyResult, label: str, own: Mapping[bool, CellResult], base: Mapping[bool, CellResult], others: int
) -> Compressed:
    result, first, is_base = own[False], base.get(False), own is base
    size, whole = weight_bytes(result), None if first is None else weight_bytes(first)
    throughput = latency = quality = None
    if first is not None and not is_base:
        compared = max(1, others)
        values = (result.values("throughput"), first.values("throughput"))
        throughput = paired_ratio(*values, comparisons=compared, confidence=first.confidence)
        seconds = (first.latency_values, result.latency_values)
        latency = paired_ratio(*seconds, comparisons=compared, confidence=first.confidence)
        quality = quality_of(study, base.get(True), own.get(True))
    return Compressed(
        label=label,
        result=result,
        base=is_base,
        resolved=_text(result, "compression_passes"),
        size_bytes=size,
        share=size / whole if size is not None and whole else None,
        throughput=throughput,
        latency=latency,
        peak=None if first is None else _memory_ratio(result, first),
        quality=quality,
        answers=own.get(True),
    )


def _memory_ratio(result: CellResult, base: CellResult) -> float | None:
    return result.peak_bytes / base.peak_bytes if result.peak_bytes is not None and base.peak_bytes else None


def weight_bytes(result: CellResult) -> float | None:
    """What the weights take over all ranks, tables included, median over repeats."""
    sums = [
        sum(values)
        for measurement in result.completed.values()
        if (values := measurement.numbers_by_rank("weights_bytes"))
    ]
    return median(sums) if sums else None


def _text(result: CellResult, figure: str) -> str | None:
    for measurement in result.completed.values():
        value = measurement.record.figures.get(figure)
        if isinstance(value, str):
            return value
    return None


def compression_table(result: CompressionResult) -> Table:
    """One row for each pass and precision."""
    latency = "ms" if result.base.result.latency is None else result.base.result.latency.unit
    columns = (
        "weights",
        "passes that were run",
        "repeats",
        "weights, MiB, all ranks",
        "of the base",
        f"{result.base.result.unit}, median (interval)",
        "times the base (interval)",
        f"{latency}, median (interval)",
        "times as fast (interval)",
        "peak memory, MiB, all ranks",
        "change of peak",
        "loading, s",
        "of it compressing, s",
        "not zero",
        "perplexity",
        "change of it",
        "KL mean, nats",
        "KL p99, nats",
        "same most likely token",
        "first divergence",
        "cosine distance, mean",
        "cosine distance, worst",
        "state",
    )
    rows = [_line(row, result.perplexity) for row in result.rows]
    empty = (UNKNOWN,) * (len(columns) - 2)
    rows += [(escaped(item.label), *empty, f"unsupported: {escaped(item.reason)}") for item in result.refused]
    return Table(columns, tuple(rows), text_columns=2).without_empty_columns()


def _line(row: Compressed, perplexity: float | None) -> tuple[str, ...]:
    result, measurements = row.result, row.measurements
    quality = row.quality.cells() if row.quality else (UNKNOWN,) * 8
    if row.base:
        quality = (number(perplexity, 4), *quality[1:])
    return (
        escaped(row.label) + (" (base)" if row.base else ""),
        escaped(row.resolved) if row.resolved else UNKNOWN,
        f"{len(result.completed)} of {result.planned}",
        mebibytes(row.size_bytes),
        percent(row.share),
        estimate_cell(result.estimate("throughput")),
        "1" if row.base and result.completed else ratio_cell(row.throughput),
        estimate_cell(estimate(result.latency_values.values(), result.confidence), 1000),
        "1" if row.base and result.completed else ratio_cell(row.latency),
        mebibytes(result.peak_bytes),
        UNKNOWN if row.base or row.peak is None else change(row.peak - 1),
        number(max_over_ranks(measurements, "load_seconds")),
        number(max_over_ranks(measurements, "compression_seconds")),
        percent(_nonzero_share(measurements)),
        *quality,
        result.status.replace("_", " "),
    )


def _nonzero_share(measurements: list[Reading]) -> float | None:
    """The least share of weights that are not zero, over ranks; None where nothing was pruned."""
    return min(
        (share for measurement in measurements for share in measurement.numbers_by_rank("nonzero_share")), default=None
    )


def compression_sentence(result: CompressionResult) -> str:
    """Which pass to use: the fastest of those that lose little, and the smallest of them if it is smaller yet."""
    base = result.base
    if not base.base:
        return "The uncompressed model was not measured on this device, so nothing is compared."
    if not base.result.completed:
        return f"The uncompressed model has no figure ({base.result.status.replace('_', ' ')}), so nothing is compared."
    kept = [row for row in result.rows if not row.base and row.loss is not None and row.loss <= MOST_LOSS]
    known = [row for row in kept if row.throughput is not None]
    limit = _limit(result)
    if not known:
        return _none_recommended(result, kept)
    fastest = max(known, key=lambda row: row.speed or 0.0)
    others = [row for row in known if row is not fastest]
    values = [row.result.values("throughput") for row in others]
    tied = ties(fastest.result.values("throughput"), values, fastest.result.confidence)
    assert fastest.throughput is not None and fastest.quality is not None
    if fastest.throughput.bounds[0] <= 1:
        text = f"No pass with {limit} is known to be faster than the uncompressed model"
        text += f": the best, {fastest.label}, gives {ratio_text(fastest.throughput, 'pair')} its throughput."
    else:
        size = "" if fastest.share is None else f" in {percent(fastest.share)} of the bytes"
        text = (
            f"{fastest.label} gives {ratio_text(fastest.throughput, 'pair')} the throughput of {base.label}{size}, "
            f"at {fastest.quality.text()}: the fastest with {limit}{not_apart([others[one].label for one in tied])}."
        )
    sized = [row for row in kept if row.share is not None]
    smallest = min(sized, key=lambda row: row.share or 0.0) if sized else None
    smaller = smallest is not None and (fastest.share is None or (smallest.share or 0.0) < fastest.share)
    if smallest is not None and smaller and smallest.quality is not None:
        speed = "" if smallest.throughput is None else f", {number(smallest.speed)} times as fast"
        text += f" The smallest of these is {smallest.label}: {percent(smallest.share)} of the bytes{speed}, "
        text += f"at {smallest.quality.text()}."
    return text


def _none_recommended(result: CompressionResult, kept: list[Compressed]) -> str:
    """Why no pass is recommended: what is not known of one speaks neither for it nor against it."""
    limit = _limit(result)
    if kept:
        verb = "has" if len(kept) == 1 else "have"
        told = f"{joined(row.label for row in kept)} {verb} {limit}"
        return f"{told}, but no speed in a block with the uncompressed model, so no pass is recommended."
    passes = [row for row in result.rows if not row.base and (row.result.completed or row.loss is not None)]
    if passes and all(row.loss is None and not row.broken for row in passes):
        return "What the answers of the measured passes lost is not known: keep the model as it is."
    which = "No judged pass" if any(row.loss is None and not row.broken for row in passes) else "No measured pass"
    return f"{which} has {limit}: keep the model as it is."


def _limit(result: CompressionResult) -> str:
    if result.encodes:
        return f"a cosine distance of at most {number(MOST_LOSS)}"
    return f"a rise in perplexity of at most {percent(MOST_LOSS, 1)}"


def compression_lines(result: CompressionResult) -> list[str]:
    """What loses more, what has no answers, and what this machine or version cannot do."""
    beyond = [row for row in result.rows if row.loss is not None and row.loss > MOST_LOSS and row.quality]
    lines = []
    if beyond:
        told = joined(f"{row.label} ({row.quality.text()})" for row in beyond if row.quality)
        lines.append(f"Not within {_limit(result)}: {told}.")
    levels = [row for row in result.rows if row.resolved and row.resolved != row.result.cell.compression[0]]
    levels = [row for row in levels if row.result.cell.compression[0] in ("balanced", "aggressive")]
    lines += [f"{row.label} became {row.resolved} on this hardware." for row in levels]
    broken = [row.label for row in result.rows if row.broken]
    if broken:
        lines.append(f"The answers of {joined(broken)} are not finite numbers.")
    silent = [row for row in result.rows if row.result.completed and row.loss is None and not row.broken]
    if silent:
        lines.append(f"What the answers of {joined(row.label for row in silent)} lost is not known.")
    lost = [row for row in result.rows if not row.result.completed]
    lines += [f"{row.label} has no figure: {why_lost(row.result)}." for row in lost]
    if result.refused:
        told = "; ".join(f"{item.label}: {item.reason}" for item in result.refused)
        lines.append(f"Not supported: {told}.")
    return lines


def why_lost(result: CellResult) -> str:
    """The state of a cell without a figure, with the message of its last record."""
    state = result.status.replace("_", " ")
    failure = result.measurements[max(result.measurements)].record.failure if result.measurements else None
    return f"{state} ({failure.message.rstrip('.')})" if failure else state
