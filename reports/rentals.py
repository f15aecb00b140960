"""The section on rented nodes: every request in order, what it cost, and what could not be given back."""

from dataclasses import dataclass

from configs.common.files.reading import read_model
from configs.plans.paths import RunPaths
from configs.plans.rentals import RentalAttempt, Rentals, StudyRental
from reports.text import UNKNOWN, Table, escaped, number, plural

_MOST_PROBLEM_CHARACTERS = 160


@dataclass(frozen=True)
class RentalSection:
    """The nodes of one target, as the report shows them."""

    title: str
    left: tuple[str, ...]
    attempts: Table


def rental_sections(run: RunPaths) -> list[RentalSection]:
    """One for each rented target; none where nothing was rented, or by a version that wrote it otherwise."""
    return [_section(rental) for rental in _rented(run)]


def rental_overview(run: RunPaths) -> Table | None:
    """All rented targets side by side, with the sum; None for fewer than two."""
    rented = _rented(run)
    if len(rented) < 2:
        return None
    costs = [rental.usd for rental in rented]
    total = UNKNOWN if None in costs else number(sum(cost for cost in costs if cost is not None))
    columns = ("target", "nodes", "place", "market", "requests", "USD an hour, a node", "minutes up", "USD")
    rows = [_overview_row(rental) for rental in rented]
    requests = str(sum(len(rental.attempts) for rental in rented))
    minutes = number(sum(attempt.seconds for rental in rented for attempt in rental.attempts) / 60)
    return Table(columns, (*rows, ("all", "", "", "", requests, "", minutes, total)), text_columns=4)


def _rented(run: RunPaths) -> list[StudyRental]:
    try:
        found = read_model(run.rentals, Rentals)
    except (FileNotFoundError, ValueError):
        return []
    return [rental for rental in found.rentals if rental.attempts]


def _overview_row(rental: StudyRental) -> tuple[str, ...]:
    """Place, market and price are those of the last request that gave nodes."""
    had = [attempt for attempt in rental.attempts if attempt.seconds and attempt.problem is None]
    last = had[-1] if had else None
    price = None if last is None else last.usd_per_hour
    return (
        escaped(rental.target),
        escaped(f"{rental.nodes} x {rental.provider}/{rental.instance}"),
        "none" if last is None else escaped(last.zone or last.region),
        UNKNOWN if last is None else last.market.replace("_", " "),
        str(len(rental.attempts)),
        UNKNOWN if price is None else number(price),
        number(sum(attempt.seconds for attempt in rental.attempts) / 60),
        UNKNOWN if rental.usd is None else number(rental.usd),
    )


def _section(rental: StudyRental) -> RentalSection:
    node = f"{rental.nodes} x {rental.provider}/{rental.instance}"
    cost = "cost unknown, because a price is" if rental.usd is None else f"{number(rental.usd)} USD"
    hours = sum(attempt.seconds for attempt in rental.attempts) / 3600
    title = (
        f"{escaped(rental.target)}: {escaped(node)}, {plural(len(rental.attempts), 'request')}, up for "
        f"{number(hours)} h: {cost}."
    )
    unused = sum(attempt.unused_seconds for attempt in rental.attempts) / 60
    if unused:
        usd = "" if rental.unused_usd is None else f" ({number(rental.unused_usd)} USD)"
        title += f" No run used them for {number(unused)} min of that{usd}."
    if rental.kept_until is not None:
        title += f" They stay up until {escaped(rental.kept_until.replace('+00:00', ' UTC').replace('T', ' '))}."
    rows = tuple(_row(attempt, rental.nodes) for attempt in rental.attempts)
    columns = ("asked at, UTC", "place", "market", "outcome", "USD an hour, a node", "minutes up", "USD")
    return RentalSection(title, tuple(escaped(words) for words in rental.left), Table(columns, rows, text_columns=4))


def _row(attempt: RentalAttempt, nodes: int) -> tuple[str, ...]:
    usd = attempt.usd(nodes)
    problem = attempt.problem or ("rented" if attempt.seconds else "no answer: the run was killed")
    return (
        attempt.at[:19].replace("T", " "),
        escaped(attempt.zone or f"{attempt.region}, any zone"),
        attempt.market.replace("_", " "),
        escaped(problem if len(problem) <= _MOST_PROBLEM_CHARACTERS else problem[: _MOST_PROBLEM_CHARACTERS - 1] + "…"),
        UNKNOWN if attempt.usd_per_hour is None else number(attempt.usd_per_hour),
        number(attempt.seconds / 60),
        UNKNOWN if usd is None else number(usd),
    )
