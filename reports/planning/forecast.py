"""Forecasts of strong and weak scaling beyond the measured world sizes, and their text.

    found = study_forecast(study, scaling)          # a Forecast, or the sentence that says why there is none
    forecast_table(found), forecast_sentence(found), forecast_lines(found)

The arithmetic is `engine.planner.forecasting.forecast`; here stands where its figures come from. It is the mechanistic
view beside the laws of `reports.laws`, which join measured points and are not drawn beyond them.
"""

from dataclasses import dataclass

from configs.hardware.hardware import Link, Machine
from configs.spec.cell import Cell
from engine.planner.forecasting.forecast import HALF, LEAST_FOR_A_CHECK, Forecast, ForecastPoint, WorldSize, forecast
from engine.planner.forecasting.traffic import ddp_traffic
from reports.experiments.scaling import Scaling, ScalingPoint
from reports.numbers.statistics import Estimate, estimate
from reports.reading.load import StudyResult
from reports.tables import max_over_ranks
from reports.text import UNKNOWN, Table, estimate_cell, joined, number, percent, plural

MIN_SILENT_SIZES = 3
"""World sizes that a forecast needs where ranks exchange nothing: two points fit any law of waiting."""


@dataclass(frozen=True)
class StudyForecast:
    """A forecast and what a report says of it. `seconds`: measured, by ranks; `stated`: the study named `machine`."""

    found: Forecast
    unit: str
    seconds: dict[int, Estimate]
    machine: Machine | None
    stated: bool
    sends: bool
    limited: str | None = None

    @property
    def measured_to(self) -> int:
        """Most ranks that were measured."""
        return self.found.measured[-1].ranks

    @property
    def last(self) -> ForecastPoint:
        """The point of the most ranks."""
        return self.found.points[-1]


def study_forecast(study: StudyResult, result: Scaling) -> StudyForecast | str | None:
    """The forecast; a sentence that says why there is none; None for work that is no model's."""
    cell, known = result.baseline.result.cell, result.baseline.result.kind
    if not known.needs_model:
        return None
    measured = [point for point in result.points if point.throughput is not None and not point.changed]
    if len(measured) < 2:
        return None  # the section above says that there is no speed-up either
    most, limited = rank_limit(cell, result.kind)
    to = min(study.plan.forecast.to, most)
    largest = max(point.ranks for point in measured)
    if to <= largest:
        why = limited if most <= largest else f"forecast.to is {to}, and {largest} ranks were measured"
        return f"No forecast: {why}."
    layouts = {(point.result.cell.layout.tp, point.result.cell.layout.pp) for point in measured}
    if len(layouts) > 1 or (known.trains and layouts != {(1, 1)}):
        return "No forecast: only data parallelism is forecast; `rankwise plan` predicts other layouts."
    sends = known.trains
    if not sends and len(measured) < MIN_SILENT_SIZES:
        return (
            "No forecast: the ranks do not communicate within a pass, and two world sizes are too few to extrapolate "
            "how long they wait for one another."
        )
    if all(point.result.cell.nodes == 1 for point in measured) and study.plan.forecast.machine is None:
        return (
            "No forecast: every point ran on one machine, whose cores are not nodes; name the machine "
            "to forecast for, with its links, in `forecast.machine`."
        )
    parameters = max_over_ranks(list(measured[0].result.completed.values()), "model_parameters")
    strategies = {point.result.cell.layout.strategy for point in measured} - {"none", "ddp"}
    if sends and (parameters is None or strategies):
        what = f"what {joined(sorted(strategies))} sends" if strategies else "how many parameters the ranks exchange"
        return f"No forecast: {what} is not known."
    here, stated = study.plan.machines.get(cell.target), study.plan.forecast.machine
    if sends and here is None:
        return "No forecast: the ranks exchange gradients, and the speed of the link between them is not known."
    traffic = ddp_traffic(parameters or 0.0 if sends else 0.0)
    try:
        found = forecast([_world(point) for point in measured], result.kind, traffic, here, stated, to)
    except ValueError as error:
        return f"No forecast: {error}."
    seconds = {point.ranks: _seconds(point) for point in measured}
    timed = {ranks: value for ranks, value in seconds.items() if value is not None}
    reached = f"{limited}, so the forecast ends there" if most < study.plan.forecast.to else None
    return StudyForecast(found, known.pass_name, timed, stated or here, stated is not None, sends, reached)


def rank_limit(cell: Cell, kind: str) -> tuple[int, str]:
    """The most ranks that have work of the size that was measured, and why no more; weak scaling has no end."""
    unlimited = (1 << 30, "")
    return unlimited if kind == "weak" else cell.workload.most_replicas() or unlimited


def _world(point: ScalingPoint) -> WorldSize:
    waiting = point.result.estimate("waiting_seconds")
    return WorldSize(point.ranks, tuple(_by_measurement(point)), None if waiting is None else max(0.0, waiting.median))


def _by_measurement(point: ScalingPoint) -> list[float]:
    """Seconds of a mean pass or step, of each measurement."""
    rates = [measurement.rates for measurement in point.result.completed.values()]
    return [rate.wall_seconds / rate.passes for rate in rates if rate is not None and rate.passes and rate.wall_seconds]


def _seconds(point: ScalingPoint) -> Estimate | None:
    return estimate(_by_measurement(point), point.result.confidence)


def forecast_sentence(result: StudyForecast) -> str:
    """The last point, and where efficiency falls under a half."""
    last = result.last
    text = (
        f"At {plural(last.ranks, 'rank')} a {result.unit} is forecast to take {_seconds_text(last)} and efficiency to "
        f"be {_efficiency(last.efficiency)} ({_range(last.efficiency_interval, 100)})"
    )
    return f"{text}. {half_text(result)}"


def half_text(result: StudyForecast) -> str:
    """The world size that no longer pays."""
    half, most = result.found.half, f"{result.last.ranks:,}"
    share = percent(HALF, 2)
    if half.low is None:
        return f"Efficiency does not fall under {share} up to {most} ranks, nor in its interval."
    low = f"{half.low:,.0f}"
    if half.ranks is None:
        return f"Efficiency does not fall under {share} up to {most} ranks, but may from {low} on."
    high = f"beyond {most}" if half.high is None else f"{half.high:,.0f}"
    if half.high is None and half.low < 2 * result.measured_to:
        # From the next doubling to beyond the end: a number in between would be no finding.
        where = f"anywhere from {low} ranks to {high}"
        return f"What was measured does not tell where efficiency falls under {share}: {where}."
    where = f"{half.ranks:,.0f} ranks ({low} to {high})"
    if half.ranks <= result.measured_to and not result.stated:
        return f"Efficiency falls under {share} at {where}, which was measured."
    return f"Efficiency falls under {share} at about {where}."


def forecast_lines(result: StudyForecast) -> list[str]:
    """Over what, on what grounds, and how far to trust it."""
    lines = [_interconnect(result), _check(result), _terms(result)]
    if result.limited:
        lines.append(f"{result.limited[:1].upper()}{result.limited[1:]}.")
    return lines


def _interconnect(result: StudyForecast) -> str:
    machine = result.machine
    if not result.sends:
        return (
            "Replicas that answer prompts send each other nothing inside a pass, so the interconnect plays no part; "
            "what grows is the wait for the slowest of them."
        )
    assert machine is not None, "a forecast with communication has links"
    if result.stated:
        inside = f"{plural(machine.accelerators, 'rank')} a node"
        inside += f" over {_link(machine.neighbour)}" if machine.accelerators > 1 else ""
        return (
            f"Over the interconnect of {machine.name}, as the study states: {inside}, nodes over "
            f"{_link(machine.between)}. What a rank computes is taken as measured here."
        )
    if machine.between is not None:
        inside = f"{_link(machine.neighbour)} inside a node, " if machine.accelerators > 1 else ""
        return f"Over more nodes like the measured ones: {inside}{_link(machine.between)} between nodes."
    return (
        f"As if all ranks were joined like those of this machine: {_link(machine.neighbour)}. No cluster is; "
        "forecast.machine in the study (provider/instance) names another interconnect."
    )


def _link(link: Link | None) -> str:
    if link is None:
        return "no known link"
    return f"{link.name} ({number(link.latency_seconds * 1e6)} µs, {number(link.bytes_per_second / 1e9)} GB/s)"


def _check(result: StudyForecast) -> str:
    check = result.found.check
    if check is None:
        count = len(result.found.measured)
        return (
            f"Not checked: to fit the smaller world sizes and predict the largest takes {LEAST_FOR_A_CHECK}, "
            f"{count} {'was' if count == 1 else 'were'} measured."
        )
    inside = "inside" if check.inside else "outside"
    return (
        f"Checked: fitted without {plural(check.ranks, 'rank')} it predicts {number(check.predicted_seconds * 1000)} "
        f"ms there ({_range(check.interval, 1000)}); measured {number(check.measured_seconds * 1000)} ms, an error of "
        f"{100 * check.error:+.1f} %, {inside} the interval."
    )


NAMES = {
    "fixed": ("the part that more ranks do not shorten", "of the compute of {base}"),
    "neighbours": ("slower with all neighbours in the node at work by", ""),
    "scatter": ("a rank's time scatters by", ""),
    "latency": ("latency paid", "times that of the links"),
    "transfer": ("transfer paid", "times that of the links"),
}
"""Term of `engine.planner.forecasting.forecast` -> what it is, and of what."""


def _terms(result: StudyForecast) -> str:
    base = plural(result.found.measured[0].ranks, "rank")
    compute, interval = result.found.terms["compute"]
    parts = [f"compute of {base} {number(compute * 1000)} ms ({_range(interval, 1000)})"]
    for name, (value, bounds) in result.found.terms.items():
        if name in NAMES:
            what, of = NAMES[name]
            share = of.startswith("times")
            size = number(value, 2) if share else percent(value, 2)
            parts.append(f"{what} {size} ({_range(bounds, 1 if share else 100)}) {of.format(base=base)}".rstrip())
    return f"Fitted: {'; '.join(parts)}."


def forecast_table(result: StudyForecast) -> Table:
    """One row for each world size, the measured ones beside what the fit says of them."""
    over = f"forecast over {result.machine.name}" if result.stated and result.machine else "fitted or forecast"
    columns = (
        "ranks",
        "",
        f"{result.unit}, ms, measured",
        f"{result.unit}, ms, {over} (95 % interval)",
        "efficiency (95 % interval)",
        "communication",
    )
    rows = tuple(_row(result, point) for point in result.found.points)
    return Table(columns, rows, text_columns=2).without_empty_columns()


def _row(result: StudyForecast, point: ForecastPoint) -> tuple[str, ...]:
    first = point.ranks == result.found.measured[0].ranks
    state = "measured" if point.ranks in result.seconds else "forecast"
    if state == "forecast" and point.ranks < result.measured_to:
        state = "not measured"
    if state == "measured" and result.stated:
        state = "measured here"
    return (
        f"{point.ranks:,}",
        state,
        estimate_cell(result.seconds.get(point.ranks), 1000),
        f"{number(point.seconds * 1000)} ({_range(point.seconds_interval, 1000)})",
        "100 %" if first else f"{_efficiency(point.efficiency)} ({_range(point.efficiency_interval, 100)})",
        percent(point.communication_share, 2) if result.sends else UNKNOWN,
    )


def _efficiency(share: float) -> str:
    """Two digits, and a third or fourth where two would hide on which side of a half it lies."""
    digits = next((digits for digits in (2, 3) if percent(share, digits) != percent(HALF, digits)), 4)
    return percent(share, digits if share != HALF else 2)


def _seconds_text(point: ForecastPoint) -> str:
    scale, unit = (1.0, "s") if point.seconds >= 1 else (1000.0, "ms")
    return f"{number(point.seconds * scale)} {unit} ({_range(point.seconds_interval, scale)})"


def _range(interval: tuple[float, float], scale: float) -> str:
    return f"{number(interval[0] * scale, 2)} to {number(interval[1] * scale, 2)}"
