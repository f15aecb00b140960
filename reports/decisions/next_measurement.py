"""What to measure next: what more repeats, a larger size or a price would settle of a decision, with time and cost.

lines = next_lines(decisions, study.cells.values())
count = repeats_to_decide(decisions)            # of every cell; None: more repeats would settle nothing
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from statistics import median

from reports.decisions.decision import Decision, shown_decisions
from reports.decisions.spending import HOUR_SECONDS
from reports.numbers.statistics import ROUNDING, Ratio, min_repeats
from reports.reading.load import CellResult
from reports.text import joined, number, plural

_COMPARED = 2


def next_lines(decisions: Sequence[Decision], cells: Collection[CellResult]) -> list[str]:
    """A line for each thing that a further measurement would settle; none where all is settled.

    cells: all of the study, which further repeats measure too.
    """
    shown = [one for one in shown_decisions(decisions) if one.choice is not None]
    lines = [line for one in shown for line in (_larger(one, cells), _further(one)) if line is not None]
    by_rank = [one for one in shown if one.basis == "rank" and len(one.members) > 1]
    if by_rank:
        lines.append(
            f"Which choice is cheapest: give {_unpriced(by_rank)} a price_usd_per_hour in the study and run it again; "
            "completed measurements are kept."
        )
    return lines


def _unpriced(decisions: Sequence[Decision]) -> str:
    """`the target`, or the targets without a price by name where others have one."""
    known: dict[str, bool] = {}
    for one in decisions:
        for member in one.members:
            cost = one.costs.get(member.key)
            known[member.cell.target] = cost is not None and cost.usd_per_hour is not None
    missing = [target for target, is_priced in known.items() if not is_priced]
    if len(missing) in (0, len(known)):
        return "the target"
    return f"target{'' if len(missing) == 1 else 's'} {joined(missing)}"


def _larger(found: Decision, cells: Collection[CellResult]) -> str | None:
    """Repeats that would tell whether a larger candidate does more for what it costs, or answers sooner."""
    choice = found.choice
    assert choice is not None
    needed = _needed(found)
    if needed is None or choice.rival is None or choice.better is None:
        return None
    mine, other = found.chosen, found.members[choice.rival]
    count, ratio = choice.better.count, choice.better
    why = "for an interval" if ratio.interval is None else "for half the interval"
    wins = "answers sooner" if found.basis == "latency" else f"does more per {found.basis}"
    spent = _spent(found, cells, needed)
    return (
        f"Whether {other.name} {wins} than {mine.name}: {plural(needed, 'repeat')} instead of {count} "
        f"{why} (--set measuring.repeats={needed}){spent}."
    )


def repeats_to_decide(decisions: Sequence[Decision]) -> int | None:
    """Repeats of every cell that would settle what is open of the decisions shown; None where nothing is."""
    shown = [one for one in shown_decisions(decisions) if one.choice is not None]
    return max((needed for one in shown if (needed := _needed(one)) is not None), default=None)


def _needed(found: Decision) -> int | None:
    """Repeats for an interval; with one that leaves it open, for half of it, which takes four times as many."""
    choice = found.choice
    assert choice is not None
    if choice.better is None or not _open(choice.better):
        return None
    if choice.better.interval is not None:
        return 4 * choice.better.count
    return min_repeats(choice.comparisons, found.chosen.confidence)


def _open(ratio: Ratio) -> bool:
    """Whether a ratio may yet turn out above 1."""
    return ratio.bounds[1] > 1 + ROUNDING and not (ratio.interval is not None and ratio.is_above(1))


def _further(found: Decision) -> str | None:
    """Where the largest candidate won, a larger one may win too, unless one was planned and failed or was left out."""
    sizes = [member.cell.layout.ranks for member in found.members]
    ranks = found.chosen.cell.layout.ranks
    if found.basis == "latency" or len(set(sizes)) < 2 or ranks < max(*sizes, found.tried):
        return None
    return f"Whether more pays yet: {plural(ranks, 'rank')}, the most of {found.subject}, won; measure {2 * ranks:,}."


def _spent(found: Decision, cells: Collection[CellResult], needed: int) -> str:
    """`, about 40 s of measuring all 6 cells`, with dollars where all of them are known.

    Cells of which no repeat was completed are left out: how long one takes is not known.
    """
    total, dollars, priced, measured = 0.0, 0.0, True, 0
    for result in cells:
        took = [
            seconds
            for reading in result.completed.values()
            if (started := reading.record.started_at) and (finished := reading.record.finished_at)
            if (seconds := _between(started, finished)) > 0  # else the clock was set back meanwhile
        ]
        if not took:
            continue
        measured += 1
        more = max(0, needed - result.planned)
        cost = found.costs.get(result.key)
        price = None if cost is None else cost.usd_per_hour
        total += more * median(took)
        dollars += more * median(took) / HOUR_SECONDS * (price or 0.0)
        priced = priced and price is not None
    if not total:
        return ""
    paid = f", ${number(dollars, 2)}" if dollars and priced else ""
    others = f" all {measured} cells" if measured > _COMPARED else ""
    return f", about {number(total, 2)} s of measuring{others}{paid}"


def _between(started: str, finished: str) -> float:
    return (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
