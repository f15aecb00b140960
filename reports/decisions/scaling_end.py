"""Where scaling stops paying, told beside the layout that is recommended.

    lead, why = scaling_lead(ScalingEnd(baseline=1, paid=2, measured=2), decision)

The recommendation goes by work per rank or per dollar, or by latency; scaling pays as long as an added rank does half
of what the first does. So the two may end at different numbers of ranks, and then the sentence says why.
"""

from dataclasses import dataclass

from reports.decisions.decision import Decision
from reports.text import plural


@dataclass(frozen=True)
class ScalingEnd:
    """Numbers of ranks: of the baseline, the most that pay, the most measured."""

    baseline: int
    paid: int
    measured: int


def scaling_lead(end: ScalingEnd, decision: Decision) -> tuple[str, str]:
    """The lead of the sentence, and what its body ends with: why another number of ranks is recommended, or nothing."""
    shown = f"the {plural(end.paid, 'rank')} measured" if end.paid == end.measured else plural(end.paid, "rank")
    chosen = None if decision.choice is None else decision.chosen.cell.layout.ranks
    if chosen is None or chosen == end.paid:
        paid = end.paid > end.baseline
        return (f"Scaling pays up to {shown}:" if paid else f"Scaling does not pay beyond {shown}:"), ""
    verb = "is" if chosen == 1 else "are"
    recommended = f"; {plural(chosen, 'rank')} {verb} recommended"
    sizes = [member.cell.layout.ranks for member in decision.members]
    if chosen < end.paid:
        why = _not_larger(decision) if max(sizes) > chosen else ", as no layout with more ranks is a candidate"
        return f"More ranks add throughput, up to {shown}:", recommended + why
    why = _larger(decision) if min(sizes) < chosen else ", as no layout with fewer ranks is a candidate"
    return f"Each rank beyond {end.paid:,} adds less than half of the first one's throughput:", recommended + why


def _not_larger(decision: Decision) -> str:
    """Why a recommendation stays below where scaling stops paying."""
    if decision.basis == "latency":
        return ", as no larger layout has clearly less latency"
    return f", as no larger layout does clearly more per {decision.basis}"


def _larger(decision: Decision) -> str:
    """Why a recommendation goes beyond where scaling stops paying."""
    if decision.basis == "latency":
        return " for their latency"
    if decision.basis == "dollar":
        return ", as they do the most per dollar"
    return f": {decision.chosen.name} does more per rank than any smaller candidate"
