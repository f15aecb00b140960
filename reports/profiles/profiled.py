"""The profile pass: each cell's time split into compute, communication and idle, by rank.

    cells = profiled_cells(study)                   # those with a profile, in the order of the plan
    profiled_table(cells), profiled_sentence(cells), profiled_lines(cells)
    draw_profiled(figure, cells)                    # reports.plots.experiments.profiled

Every rank splits its own time (`engine.profiling.split`). How long a rank waited for late ones is found here, since
it takes all of them: of the ranks in one collective the last to come was in it for the shortest time, which is what
the transfer took; the others waited for as long as they were in it longer.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from configs.common.intervals import intersection, intervals, length
from configs.plans.passes import passes_of
from configs.records.rates import Column, by_rank
from configs.records.record import Status
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading
from reports.tables import first_rows
from reports.text import UNKNOWN, Table, count, escaped, number, percent, plural

SHARES = ("compute_share", "communication_share", "exposed_communication_share", "idle_share")
COLLECTIVE_COLUMNS = (
    "collective_operation",
    "collective_group",
    "collective_sequence",
    "collective_began_seconds",
    "collective_seconds",
)
_TRANSFER = {"send", "receive"}
"""Both ends of one transfer bear different names."""


@dataclass(frozen=True)
class Profiled:
    """A cell's profile: shares of the wall time of its recorded pass (0 to 1), by rank.

    `late` is what waiting for late ranks takes, part of the communication; empty where it is not known.
    `slowdown`: the recorded pass over the median timed one.
    """

    result: CellResult
    wall_seconds: float
    shares: Mapping[str, tuple[float, ...]]
    late: tuple[float, ...]
    collectives: int
    bytes_by_rank: tuple[float, ...]
    slowdown: float | None

    @property
    def ranks(self) -> int:
        """Ranks of the cell."""
        return self.result.cell.layout.ranks

    def mean(self, share: str) -> float:
        """Mean of a share over the ranks."""
        return fmean(self.shares[share])


def profiled_cells(study: StudyResult) -> list[Profiled]:
    """Cells whose profile pass is completed."""
    found = (profiled(study, result) for result in study.cells.values())
    return [cell for cell in found if cell is not None]


def profiled(study: StudyResult, result: CellResult) -> Profiled | None:
    """The profile of a cell; None where it has none that is completed."""
    measurement = result.profile
    if measurement is None or not measurement.completed:
        return None
    walls = measurement.numbers_by_rank("profile_wall_seconds")
    shares = {name: tuple(measurement.numbers_by_rank(name)) for name in SHARES}
    if not walls or any(len(values) != len(walls) for values in shares.values()):
        return None
    timed = _timed_seconds(result)
    return Profiled(
        result=result,
        wall_seconds=max(walls),
        shares=shares,
        late=tuple(late_shares(_samples(study, measurement), walls)) if len(walls) > 1 else (),
        collectives=int(max(measurement.numbers_by_rank("collectives"), default=0)),
        bytes_by_rank=tuple(measurement.numbers_by_rank("communication_bytes")),
        slowdown=max(walls) / timed if timed else None,
    )


def why_unprofiled(study: StudyResult, result: CellResult) -> str:
    """Why a cell has no profile: it has no figure at all, its pass left none, or the study asked for no pass."""
    if not result.completed:
        return f"not measured: {result.status.replace('_', ' ')}"
    if "profile" not in passes_of(study.plan, result.key):
        return "not measured: no profile pass (measuring.profile: true asks for one)"
    state = result.pass_status("profile")
    told = "without shares of every rank" if state == Status.COMPLETED.value else state.replace("_", " ")
    return f"not measured: profile pass {told}"


def late_shares(samples: Mapping[str, Column], walls: Sequence[float]) -> list[float]:
    """By rank, the share of its wall time in which it waited in a collective for a rank that came later.

    samples: `<rank>/<column>` of COLLECTIVE_COLUMNS. What not two ranks or more tell of alike is left out; a rank that
    gave
    no columns at all makes the whole unknown: the list is empty.
    """
    if any(f"{rank}/{name}" not in samples for rank in range(len(walls)) for name in COLLECTIVE_COLUMNS):
        return []
    operations, groups, sequences, begins, seconds = (by_rank(samples, name) for name in COLLECTIVE_COLUMNS)
    together: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for rank in range(len(walls)):
        for place, (group, sequence) in enumerate(zip(groups[rank].tolist(), sequences[rank].tolist(), strict=True)):
            if group:
                together[group, sequence].append((rank, place))
    waits: list[list[tuple[float, float]]] = [[] for _ in walls]
    for members in together.values():
        names = {str(operations[rank][place]) for rank, place in members}
        if len(members) < 2 or (len(names) > 1 and names != _TRANSFER):
            continue
        shortest = min(float(seconds[rank][place]) for rank, place in members)
        for rank, place in members:
            began = float(begins[rank][place])
            # In this order the last to come waited for exactly 0.
            waits[rank].append((began, began + (float(seconds[rank][place]) - shortest)))
    regions = [intervals([(0.0, wall)]) for wall in walls]
    return [
        length(intersection(intervals(waited), region)) / wall
        for waited, region, wall in zip(waits, regions, walls, strict=True)
    ]


def _samples(study: StudyResult, measurement: Reading) -> Mapping[str, Column]:
    return study.samples(measurement, COLLECTIVE_COLUMNS) if measurement.record.num_columns else {}


def _timed_seconds(result: CellResult) -> float | None:
    """Median wall time of a pass (or step) over the timed repeats."""
    passes = result.values("passes")
    seconds = [wall / passes[repeat] for repeat, wall in result.values("wall_seconds").items() if passes.get(repeat)]
    return median(seconds) if seconds else None


def profiled_table(cells: Sequence[Profiled]) -> Table:
    """One row for each cell: means over ranks, and in [brackets] the range over ranks."""
    columns = (
        "model", "cell", "ranks", "pass, ms", "over a timed pass", "compute", "communication",
        "exposed communication", "waiting for late ranks", "idle", "collectives a rank", "MB a rank",
    )  # fmt: skip
    return first_rows(Table(columns, tuple(_row(cell) for cell in cells), text_columns=2).without_empty_columns())


def _row(cell: Profiled) -> tuple[str, ...]:
    return (
        escaped(cell.result.model),
        escaped(cell.result.name),
        str(cell.ranks),
        number(cell.wall_seconds * 1000),
        UNKNOWN if cell.slowdown is None else f"{number(cell.slowdown)} times",
        _spread(cell.shares["compute_share"]),
        _spread(cell.shares["communication_share"]),
        _spread(cell.shares["exposed_communication_share"]),
        _spread(cell.late),
        _spread(cell.shares["idle_share"]),
        count(cell.collectives),
        number(fmean(cell.bytes_by_rank) / 1e6) if cell.bytes_by_rank else UNKNOWN,
    )


def _spread(shares: Sequence[float]) -> str:
    """`41.2 % [38.0 to 44.4]`: mean and range over ranks."""
    if not shares:
        return UNKNOWN
    mean = percent(fmean(shares))
    low, high = number(min(shares) * 100), number(max(shares) * 100)
    return mean if low == high else f"{mean} [{low} to {high}]"


def profiled_sentence(cells: Sequence[Profiled]) -> str:
    """What communication takes, in total and exposed, where it is exposed most, and where least."""
    several = [cell for cell in cells if cell.ranks > 1]
    if not several:
        return "Every profiled cell runs on one rank, so nothing is communicated."
    ordered = sorted(several, key=lambda cell: cell.mean("exposed_communication_share"))
    text = _told(ordered[-1])
    if len(ordered) > 1:
        text = f"Most exposed: {text} Least exposed: {_told(ordered[0])}"
    return text


def _told(cell: Profiled) -> str:
    total, exposed = cell.mean("communication_share"), cell.mean("exposed_communication_share")
    text = (
        f"{cell.result.title}: communication takes {percent(total)} of a pass (mean of {plural(cell.ranks, 'rank')}), "
        f"{percent(exposed)} of the pass is exposed, with nothing computed meanwhile"
    )
    if cell.late:
        text += f"; {percent(fmean(cell.late))} is waiting for late ranks"
    return f"{text}."


def profiled_lines(cells: Sequence[Profiled]) -> list[str]:
    """What the profiler itself costs, and where the traces lie."""
    slowdowns = [cell.slowdown for cell in cells if cell.slowdown is not None]
    lines = []
    if slowdowns:
        low, high = number(min(slowdowns)), number(max(slowdowns))
        spread = f" ({low} to {high})" if low != high else ""
        lines.append(
            f"Recording makes a pass {number(median(slowdowns))} times as long as a timed one{spread}; all other "
            "figures of this report are of passes that nobody recorded. What it adds counts mostly as compute or "
            "idle, so shares of communication are rather too small than too large."
        )
    lines.append(
        "Each rank's trace lies beside its record (trace_rank_<r>.json.gz, Chrome format; https://ui.perfetto.dev "
        "opens it)."
    )
    return lines
