"""Where scaling stops paying is told so that it cannot be read against the recommended layout."""

from dataclasses import replace

import pytest

from benchmarks.decisions import CLEAR, TIES, Scenario, Simulated, decided
from reports.decisions.scaling_end import ScalingEnd, scaling_lead

PRICED = Scenario((Simulated(1, 100), Simulated(2, 130)), (1,), usd_per_hour={"local": 1.0})


@pytest.mark.parametrize(
    ("scenario", "end", "lead", "why"),
    [
        (CLEAR["two ranks do more than twice the work"], (1, 2, 2), "Scaling pays up to the 2 ranks measured:", ""),
        (CLEAR["more than linear to two ranks, less after"], (1, 2, 4), "Scaling pays up to 2 ranks:", ""),
        (CLEAR["not worth its ranks"], (1, 1, 4), "Scaling does not pay beyond 1 rank:", ""),
        (
            TIES["linear"], (1, 2, 2), "More ranks add throughput, up to the 2 ranks measured:",
            "; 1 rank is recommended, as no larger layout does clearly more per rank",
        ),
        (
            TIES["as much for a dollar"], (1, 2, 4), "More ranks add throughput, up to 2 ranks:",
            "; 1 rank is recommended, as no layout with more ranks is a candidate",
        ),
        (
            Scenario((Simulated(1, 100), Simulated(2, 190, target="b")), (0,), usd_per_hour={"local": 1.0, "b": 2.0}),
            (1, 2, 2), "More ranks add throughput, up to the 2 ranks measured:",
            "; 1 rank is recommended, as no larger layout does clearly more per dollar",
        ),
        (
            PRICED, (1, 1, 2), "Each rank beyond 1 adds less than half of the first one's throughput:",
            "; 2 ranks are recommended, as they do the most per dollar",
        ),
        (
            CLEAR["only the larger meets the objective"], (1, 1, 2),
            "Each rank beyond 1 adds less than half of the first one's throughput:",
            "; 2 ranks are recommended, as no layout with fewer ranks is a candidate",
        ),
        (
            CLEAR["two ranks do more than twice the work"], (1, 1, 2),
            "Each rank beyond 1 adds less than half of the first one's throughput:",
            "; 2 ranks are recommended: cell 1 does more per rank than any smaller candidate",
        ),
    ],
)  # fmt: skip
def test_every_combination(scenario: Scenario, end: tuple[int, int, int], lead: str, why: str) -> None:
    found, _ = decided(scenario, 1)
    assert scaling_lead(ScalingEnd(*end), found) == (lead, why)


def test_by_latency_and_without_a_recommendation() -> None:
    found, _ = decided(TIES["linear"], 1)
    _, why = scaling_lead(ScalingEnd(1, 2, 2), replace(found, basis="latency"))
    assert why == "; 1 rank is recommended, as no larger layout has clearly less latency"
    larger, _ = decided(CLEAR["two ranks do more than twice the work"], 1)
    _, why = scaling_lead(ScalingEnd(1, 1, 2), replace(larger, basis="latency"))
    assert why == "; 2 ranks are recommended for their latency"
    none = replace(found, choice=None)
    assert scaling_lead(ScalingEnd(1, 2, 2), none) == ("Scaling pays up to the 2 ranks measured:", "")
    assert scaling_lead(ScalingEnd(1, 1, 1), none) == ("Scaling does not pay beyond the 1 rank measured:", "")
