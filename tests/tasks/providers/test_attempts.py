"""What a rental cost, and how much of it was unused, told from its ledger."""

from typing import Any

import pytest

from configs.plans.rentals import StudyRental
from tasks.providers.attempts import attempts_of


def test_machines_that_are_billed_when_off_cost_money_until_they_are_given_back() -> None:
    entries = [
        {"event": "opened", "epoch": 0, "expires_at": 3600},
        {"event": "create", "region": "r", "market": "spot", "usd_per_hour": 2.0, "epoch": 0},
        {"event": "created", "epoch": 0},
    ]
    given_back = [*entries, {"event": "given_back", "epoch": 7200}]
    assert [attempts_of(given_back, 9000, off)[0].seconds for off in (False, True)] == [3600, 7200]
    assert [attempts_of(entries, 9000, off)[0].seconds for off in (False, True)] == [3600, 9000]


def test_the_story_of_a_rental_is_told_over_all_its_runs() -> None:
    """Refused, then rented by a run that was killed, then given back by the next one, whose nodes are up now."""
    ask = {"event": "create", "region": "us-east-1", "market": "spot", "usd_per_hour": 2.0}
    entries = [
        {"event": "opened", "epoch": 0, "expires_at": 3600},
        ask | {"epoch": 1, "zone": "a"},
        {"event": "refused", "epoch": 2},
        {"event": "no_nodes", "epoch": 2, "problem": "capacity: none"},
        ask | {"epoch": 3, "zone": "b"},
        {"event": "created", "epoch": 10},
        {"event": "given_back", "epoch": 1810},
        {"event": "opened", "epoch": 1900, "expires_at": 5500},
        ask | {"epoch": 1901, "market": "on_demand"},
        {"event": "created", "epoch": 2000},
    ]
    refused, killed, up = attempts_of(entries, now=2900)
    assert (refused.problem, refused.usd(2)) == ("capacity: none", 0.0)
    assert (killed.problem, killed.seconds, killed.usd(2)) == (None, 1800, 2.0)
    assert (up.market, up.seconds, up.zone) == ("on_demand", 900, None)
    assert attempts_of(entries, now=90_000)[2].seconds == 3500, "the nodes ended by themselves with their lease"
    assert (killed.unused_seconds, up.unused_seconds) == (1800, 0), "killed before its nodes were ready"


def test_nodes_of_an_earlier_run_cost_what_so_many_of_them_cost() -> None:
    """The study asks for four nodes by now; its first run, which was killed, had two for an hour."""
    ask = {"event": "create", "region": "us-east-1", "market": "spot", "usd_per_hour": 2.0}
    entries = [
        {"event": "opened", "epoch": 0, "expires_at": 3600},
        ask | {"epoch": 0},
        {"event": "created", "epoch": 0, "ids": ["i-1", "i-2"]},
        {"event": "given_back", "epoch": 3600},
        {"event": "opened", "epoch": 3600, "expires_at": 7200},
        ask | {"epoch": 3600},
        {"event": "created", "epoch": 3600, "ids": ["i-3", "i-4", "i-5", "i-6"]},
    ]
    rental = StudyRental(
        target="t", provider="aws", instance="x", nodes=4, name="r", attempts=attempts_of(entries, 7200)
    )
    assert [attempt.usd(rental.nodes) for attempt in rental.attempts] == [4.0, 8.0] and rental.usd == 12.0


def test_nodes_between_two_runs_are_counted_as_unused() -> None:
    """The second run took them over 300 s after the first was killed, the third 60 s after the second."""
    entries: list[dict[str, Any]] = [
        {"event": "create", "region": "r", "market": "spot", "usd_per_hour": 2.0, "epoch": 0},
        {"event": "created", "epoch": 10},
        {"event": "ready", "epoch": 40},
        {"event": "extended", "epoch": 500, "expires_at": 9000, "unused_seconds": 300},
        {"event": "extended", "epoch": 700, "expires_at": 9000, "unused_seconds": 0},
        {"event": "extended", "epoch": 900, "expires_at": 9000, "unused_seconds": 60},
        {"event": "given_back", "epoch": 1810},
    ]
    (attempt,) = attempts_of(entries, now=5000)
    assert (attempt.seconds, attempt.unused_seconds, attempt.unused_usd(2)) == (1800, 360, 0.4)


@pytest.mark.parametrize(
    ("end", "off", "unused"),
    [
        (2000, False, 1400),  # given back before their lease ended
        (90_000, False, 3000),  # the lease ended at 3600
        (90_000, True, 89_400),  # where a cloud charges for nodes that are off
    ],
)
def test_nodes_that_no_run_takes_over_are_unused_from_the_kill_to_their_end(end: int, off: bool, unused: int) -> None:
    """Their whole time was called used. A try that was in vain, and what an extension has counted, count once."""
    entries: list[dict[str, Any]] = [
        {"event": "opened", "epoch": 0, "expires_at": 3600},
        {"event": "create", "region": "r", "market": "spot", "usd_per_hour": 2.0, "epoch": 0},
        {"event": "created", "epoch": 10},
        {"event": "ready", "epoch": 40},
        {"event": "abandoned", "epoch": end - 100, "last_used": 600.0},
        {"event": "left", "epoch": end - 50},
        {"event": "abandoned", "epoch": end, "last_used": 600.0},
        {"event": "given_back", "epoch": end + 30},
    ]
    (attempt,) = attempts_of(entries, end + 60, off)
    assert attempt.unused_seconds == unused and attempt.seconds >= unused
    entries[4:5] = [{"event": "extended", "epoch": 1000, "expires_at": 3600, "unused_seconds": 400.0}]
    assert attempts_of(entries, end + 60, off)[0].unused_seconds == unused
