"""Training cells: speed, MFU, time split of a step, memory, checkpoints and network.

    cells = trained_cells(study)                    # those that train and were measured, in the order of the plan
    speed_table(study, cells), split_table(cells), memory_table(study, cells)
    checkpoints_table(study, cells), network_table(study, cells)
    draw_step_split(figure, cells)                  # reports.plots.experiments.training

Utilization is FLOPs of a step / (seconds of a step x ranks x peak FLOP/s of a rank's device). MFU counts model FLOPs,
HFU what is executed (`engine.planner.flops` defines both); the plan holds the peak, as the planner took the machine.
Each table is None where no cell has anything to put into it: records of earlier versions lack the columns.
"""

from collections.abc import Sequence
from statistics import fmean, median

from configs.plans.plan import Plan
from configs.workloads.train import TRAINING_PARTS
from reports.numbers.statistics import Estimate, estimate
from reports.profiles.time_split import PARTS
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading
from reports.tables import first_rows, max_over_ranks
from reports.text import UNKNOWN, Table, count, escaped, estimate_cell, joined, mebibytes, number, percent, plural

FLOPS = {"MFU": "model_flops_per_step", "HFU": "hardware_flops_per_step"}
_ROUNDING = 1e-9
EXPOSED = PARTS["exposed_communication_seconds"]


def trained_cells(study: StudyResult) -> list[CellResult]:
    """Cells that train and have a completed repeat."""
    return [result for result in study.cells.values() if result.kind.trains and result.completed]


def split_cells(cells: Sequence[CellResult]) -> list[CellResult]:
    """Those whose steps were split as they ran."""
    return [result for result in cells if any(result.values(name) for name in TRAINING_PARTS)]


def step_parts(result: CellResult) -> dict[str, float]:
    """Seconds of a mean step by part (names of `time_split.PARTS`): means over ranks, steps and repeats."""
    found = {}
    for field, name in PARTS.items():
        values = result.values(field).values()
        if values:
            found[name] = fmean(values)
    least = _ROUNDING * sum(found.values())  # what is left when the parts are taken from the whole
    return {name: 0.0 if abs(seconds) < least else seconds for name, seconds in found.items()}


def exposed_share(result: CellResult) -> float | None:
    """Share of a mean step that stands still for communication, as the table of its parts has it; None where it was not
    timed. Elsewhere the figure is that of `exposed_shares`, a median over repeats as all others."""
    parts = step_parts(result)
    whole = sum(parts.values())
    return parts[EXPOSED] / whole if EXPOSED in parts and whole > 0 else None


def exposed_shares(result: CellResult) -> Estimate | None:
    """The same over the repeats, with its interval."""
    exposed, walls, steps = map(result.values, ("exposed_communication_seconds", "wall_seconds", "passes"))
    shares = (seconds * steps[repeat] / walls[repeat] for repeat, seconds in exposed.items() if walls[repeat] > 0)
    return estimate(shares, result.confidence)


def peak_flops(plan: Plan, result: CellResult) -> tuple[float, str] | None:
    """Dense FLOP/s of one rank's device in the cell's dtype, and where that comes from; None where it is unknown."""
    prediction = plan.predictions.get(result.key)
    if prediction is not None and prediction.peak_flops is not None:
        return prediction.peak_flops, prediction.peak_source or prediction.basis
    machine = plan.machines.get(result.cell.target)
    if machine is None:
        return None
    try:
        return machine.accelerator.flops(result.cell.dtype), machine.accelerator.source
    except ValueError:  # the format is not known of this device
        return None


def utilization_estimate(plan: Plan, result: CellResult, kind: str) -> Estimate | None:
    """MFU or HFU over the repeats; None where FLOPs or peak are unknown."""
    peak = peak_flops(plan, result)
    if peak is None:
        return None
    shares = []
    for measurement in result.completed.values():
        flops, rates = measurement.figure(FLOPS[kind]), measurement.rates
        if flops is not None and rates is not None and rates.wall_seconds > 0:
            shares.append(flops * rates.passes / (rates.wall_seconds * result.cell.layout.ranks * peak[0]))
    return estimate(shares, result.confidence)


def speed_table(study: StudyResult, cells: Sequence[CellResult]) -> Table | None:
    """Tokens/s, of all ranks and of one, time of a step, MFU and HFU: a row for each cell."""
    if not any(
        measurement.figure(name)
        for result in cells
        for measurement in result.completed.values()
        for name in FLOPS.values()
    ):
        return None
    rows = []
    for result in cells:
        rate, ranks = result.estimate("tokens_per_second"), result.cell.layout.ranks
        saved = max_over_ranks([*result.completed.values()], "checkpoint_bytes")
        slower = _rate_with_checkpoints(study, result) if saved else None
        rows.append(
            (
                escaped(result.model),
                escaped(result.name),
                estimate_cell(rate),
                estimate_cell(rate.scaled(1 / ranks) if rate is not None else None),
                estimate_cell(result.estimate("step_seconds"), 1000),
                estimate_cell(utilization_estimate(study.plan, result, "MFU"), 100),
                estimate_cell(utilization_estimate(study.plan, result, "HFU"), 100),
                estimate_cell(slower),
            )
        )
    columns = (
        "model",
        "cell",
        "tokens/s",
        "tokens/s a rank",
        "step, ms",
        "MFU, %",
        "HFU, %",
        "tokens/s, checkpoints included",
    )
    return first_rows(Table(columns, tuple(rows), text_columns=2).without_empty_columns())


def speed_lines(study: StudyResult, cells: Sequence[CellResult]) -> list[str]:
    """The peaks that utilization is held against, each with the cells that it is for."""
    peaks: dict[tuple[float, str, str], int] = {}
    unknown = 0
    for result in cells:
        peak = peak_flops(study.plan, result)
        if peak is None:
            unknown += 1
        else:
            place = (peak[0], result.cell.dtype, peak[1])
            peaks[place] = peaks.get(place, 0) + 1
    lines = [
        f"Peak of {plural(cells_of, 'cell')}: {number(flops / 1e9)} GFLOP/s a rank in {dtype}"
        + (f" ({source})." if source else ".")
        for (flops, dtype, source), cells_of in peaks.items()
    ]
    if unknown:
        lines.append(f"No MFU and HFU for {plural(unknown, 'cell')}: the peak FLOP/s of the device is not known.")
    return lines


def split_table(cells: Sequence[CellResult]) -> Table | None:
    """Milliseconds and share of each part of a mean step."""
    split = split_cells(cells)
    if not split:
        return None
    found = [step_parts(result) for result in split]
    names = [name for name in PARTS.values() if any(name in parts for parts in found)]
    rows = []
    for result, parts in zip(split, found, strict=True):
        whole = sum(parts.values())
        shares = (
            f"{number(parts[name] * 1000)} ({percent(parts[name] / whole, 2)})" if name in parts and whole else UNKNOWN
            for name in names
        )
        rows.append((escaped(result.model), escaped(result.name), number(whole * 1000), *shares))
    columns = ("model", "cell", "step, ms, mean", *(f"{name}, ms (share)" for name in names))
    return first_rows(Table(columns, tuple(rows), text_columns=2))


def split_sentence(cells: Sequence[CellResult]) -> str:
    """Where communication is exposed most and least."""
    text = "Parts are means over ranks, steps and repeats, and sum to the step; checkpoints are not in it."
    known = [(share, result) for result in split_cells(cells) if (share := exposed_share(result)) is not None]
    several = [pair for pair in known if pair[1].cell.layout.ranks > 1]
    if not several:
        return text
    (least, first), (most, last) = (choose(several, key=lambda pair: pair[0]) for choose in (min, max))
    told = f" Exposed communication is largest in {last.title}: {percent(most)} of a step"
    return text + told + (f"; smallest in {first.title}: {percent(least)}." if first is not last else ".")


def memory_table(study: StudyResult, cells: Sequence[CellResult]) -> Table | None:
    """Peak memory of each rank in the untimed pass, beside what was predicted of the fullest."""
    rows = []
    for result in cells:
        peaks = result.peak_by_rank()
        if not peaks:
            continue
        prediction = study.plan.predictions.get(result.key)
        said = prediction.peak_memory_bytes if prediction is not None else None
        rows.append(
            (
                escaped(result.model),
                escaped(result.name),
                mebibytes(max(peaks)),
                mebibytes(min(peaks)),
                mebibytes(said),
                UNKNOWN if said is None else signed_percent(said / max(peaks) - 1),
            )
        )
    columns = (
        "model",
        "cell",
        "measured, MiB, fullest rank",
        "emptiest rank",
        "predicted, fullest rank",
        "predicted over measured",
    )
    return first_rows(Table(columns, tuple(rows), text_columns=2).without_empty_columns()) if rows else None


def checkpoints_table(study: StudyResult, cells: Sequence[CellResult]) -> Table | None:
    """What checkpoints cost the steps, how large they are, and from where runs went on."""
    rows = []
    for result in cells:
        measurements = list(result.completed.values())
        if max_over_ranks(measurements, "checkpoint_bytes") is None and not _resumed(measurements):
            continue
        rows.append(
            (
                escaped(result.model),
                escaped(result.name),
                count(max_over_ranks(measurements, "checkpoints_written")),
                mebibytes(max_over_ranks(measurements, "checkpoint_bytes")),
                number(max_over_ranks(measurements, "checkpoint_seconds")),
                percent(_blocked_share(study, measurements)),
                number(max_over_ranks(measurements, "checkpoint_writing_seconds")),
                joined(f"{step:,.0f}" for step in _resumed(measurements)) or UNKNOWN,
                *(_unless_zero(max_over_ranks(measurements, f"checkpoint{name}")) for name in ("s_torn", "_failures")),
            )
        )
    columns = (
        "model",
        "cell",
        "checkpoints",
        "MiB",
        "steps stood still, s",
        "share of the time",
        "written behind steps, s",
        "went on from step",
        "torn",
        "failed to write",
    )
    return first_rows(Table(columns, tuple(rows), text_columns=2).without_empty_columns()) if rows else None


def network_table(study: StudyResult, cells: Sequence[CellResult]) -> Table | None:
    """What a step hands to collectives and sends over the network, beside what was predicted."""
    rows = []
    for result in cells:
        payload = max_over_ranks(list(result.completed.values()), "communication_bytes_per_step")
        sent = network_bytes_of(study, result)
        if result.cell.layout.ranks == 1 or (payload is None and sent is None):
            continue
        prediction = study.plan.predictions.get(result.key)
        said = prediction.network_bytes_per_step if prediction is not None else None
        rows.append(
            (
                escaped(result.model),
                escaped(result.name),
                _megabytes(payload),
                _megabytes(sent),
                _megabytes(said),
                UNKNOWN if not sent or said is None else signed_percent(said / sent - 1),
            )
        )
    columns = (
        "model",
        "cell",
        "handed to collectives, MB a rank",
        "sent by a node, MB",
        "predicted, MB a node",
        "predicted over measured",
    )
    return first_rows(Table(columns, tuple(rows), text_columns=2).without_empty_columns()) if rows else None


def network_bytes_of(study: StudyResult, result: CellResult) -> float | None:
    """That a node sends to others in a step: mean over nodes, median over repeats; None on one node."""
    if result.cell.nodes == 1:
        return None
    found = []
    for measurement in result.completed.values():
        sent, steps = measurement.numbers_by_rank("network_sent_bytes"), measured_steps(study, measurement)
        if sent and steps:
            found.append(fmean(sent) / steps)
    return median(found) if found else None


def measured_steps(study: StudyResult, measurement: Reading) -> int:
    """Steps that were timed, before what is not steady is left out."""
    return max((len(column) for column in study.samples(measurement, ("step_seconds",)).values()), default=0)


def signed_percent(change: float) -> str:
    """`+3.2 %`."""
    return f"{'+' if change >= 0 else ''}{percent(change, 2)}"


def _rate_with_checkpoints(study: StudyResult, result: CellResult) -> Estimate | None:
    """Tokens/s over the repeats, checkpoints included. Of the same step times as tokens/s without: a rank's own times,
    as its figure has them, are shorter than the slowest rank's by more than checkpoints may take.
    """
    rates = []
    for measurement in result.completed.values():
        share, plain = _blocked_share(study, [measurement]), measurement.rates
        if share is not None and plain is not None and plain.tokens_per_second is not None:
            rates.append(plain.tokens_per_second * (1 - share))
    return estimate(rates, result.confidence)


def _blocked_share(study: StudyResult, measurements: Sequence[Reading]) -> float | None:
    """Of the time of steps and the checkpoints between them: median over repeats. Steps are those that the rates are
    of: slow ones of a start-up would make a checkpoint's share smaller than it is.
    """
    shares = []
    for measurement in measurements:
        first = measurement.steady.first if measurement.steady else 0
        samples = study.samples(measurement, ("step_seconds", "checkpoint_seconds"))
        seconds = {name: float(column[first:].sum()) for name, column in samples.items()}  # both have a value a step
        blocked = [value for name, value in seconds.items() if name.endswith("/checkpoint_seconds")]
        steps = [value for name, value in seconds.items() if name.endswith("/step_seconds")]
        if blocked and steps and max(steps) > 0:
            shares.append(max(blocked) / (max(blocked) + max(steps)))
    return median(shares) if shares else None


def _resumed(measurements: Sequence[Reading]) -> list[float]:
    return sorted(
        {step for measurement in measurements if (step := measurement.figure("resumed_from_step")) is not None}
    )


def _unless_zero(value: float | None) -> str:
    return count(value) if value else UNKNOWN


def _megabytes(value: float | None) -> str:
    return number(None if value is None else value / 1e6)
