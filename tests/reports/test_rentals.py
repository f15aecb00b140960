"""The section on rented nodes: every request, its cost, and what is left."""

from pathlib import Path

from configs.plans.paths import RunPaths
from configs.plans.rentals import RentalAttempt, Rentals, StudyRental
from reports.rentals import rental_overview, rental_sections
from reports.text import UNKNOWN

REFUSED = RentalAttempt(at="2026-11-23T10:00:00+00:00", region="us-east-1", market="spot", problem="capacity: none")
RENTED = RentalAttempt(
    at="2026-11-23T10:01:00+00:00", region="us-east-1", zone="us-east-1b", market="on_demand", usd_per_hour=3.0,
    seconds=1200,
)  # fmt: skip


def written(folder: Path, *attempts: RentalAttempt, left: tuple[str, ...] = ()) -> RunPaths:
    rental = StudyRental(
        target="g5", provider="aws", instance="g5.xlarge", nodes=2, name="s-g5-0", attempts=attempts, left=left
    )
    run = RunPaths(folder)
    run.rentals.write_text(Rentals(rentals=(rental,)).model_dump_json())
    return run


def test_requests_stand_in_order_with_their_cost(tmp_path: Path) -> None:
    (section,) = rental_sections(written(tmp_path, REFUSED, RENTED))
    assert "2 requests" in section.title and "2.00 USD" in section.title
    assert [row[3] for row in section.attempts.rows] == ["capacity: none", "rented"]
    assert [row[-1] for row in section.attempts.rows] == ["0", "2.00"]


def test_time_in_which_no_run_used_the_nodes_is_priced(tmp_path: Path) -> None:
    between = RENTED.model_copy(update={"unused_seconds": 300})
    (section,) = rental_sections(written(tmp_path, between))
    assert "No run used them for 5.00 min of that (0.500 USD)." in section.title
    assert "No run used" not in rental_sections(written(tmp_path, RENTED))[0].title


def test_a_price_that_is_not_known_makes_no_sum(tmp_path: Path) -> None:
    unpriced = RENTED.model_copy(update={"usd_per_hour": None})
    (section,) = rental_sections(written(tmp_path, unpriced, left=("aws instance i-1 in us-east-1b",)))
    assert "cost unknown" in section.title and section.left == ("aws instance i-1 in us-east-1b",)


def test_without_rentals_there_is_no_section(tmp_path: Path) -> None:
    assert rental_sections(RunPaths(tmp_path)) == []
    assert rental_sections(written(tmp_path)) == []


def test_several_targets_stand_side_by_side_with_the_sum(tmp_path: Path) -> None:
    run = written(tmp_path, REFUSED, RENTED)
    assert rental_overview(run) is None
    (first,) = Rentals.model_validate_json(run.rentals.read_bytes()).rentals
    reclaimed = RENTED.model_copy(update={"seconds": 600, "problem": "capacity: i-1 was taken back"})
    second = first.model_copy(update={"target": "l4", "provider": "gcp", "attempts": (reclaimed, RENTED)})
    run.rentals.write_text(Rentals(rentals=(first, second)).model_dump_json())
    table = rental_overview(run)
    assert table is not None
    assert table.rows[0] == ("g5", "2 x aws/g5.xlarge", "us-east-1b", "on demand", "2", "3.00", "20.0", "2.00")
    assert table.rows[1][-2:] == ("30.0", "3.00"), "nodes that were taken back cost too"
    assert table.rows[2] == ("all", "", "", "", "4", "", "50.0", "5.00")


def test_a_target_without_nodes_or_price_makes_no_sum_up(tmp_path: Path) -> None:
    run = written(tmp_path, REFUSED)
    (first,) = Rentals.model_validate_json(run.rentals.read_bytes()).rentals
    second = first.model_copy(update={"attempts": (RENTED.model_copy(update={"usd_per_hour": None}),)})
    run.rentals.write_text(Rentals(rentals=(first, second)).model_dump_json())
    table = rental_overview(run)
    assert table is not None
    assert table.rows[0][2] == "none" and table.rows[0][-1] == "0" and table.rows[2][-1] == UNKNOWN
