"""What the block around a study's rentals does when it ends, whatever ends it; the nodes themselves are stand-ins."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.plans.paths import RunPaths
from configs.plans.rentals import Rentals, StudyRental
from configs.targets.target import Target
from tasks.campaign.progress import RunProgress
from tasks.campaign.rental_group import RentalGroup, RentingStopped
from tasks.campaign.session import Session
from tasks.prefect_api.ended import RunCancelled
from tasks.providers.giving_back import LeftBehind
from tasks.rent import NodesLeft, check_given_back, giving_back

_SECONDS = 30.0


class Nodes:
    """A rental that is given back, or of which something is left."""

    def __init__(self, left: bool = False) -> None:
        self.left, self.given_back, self.is_up = left, 0, False

    def up(self, agreed: bool) -> Target:
        self.is_up = True
        return cast(Target, self)

    def give_back(self) -> None:
        self.given_back += 1
        self.is_up = False
        if self.left:
            raise LeftBehind("r", ["aws instance i-1 in us-east-1"], [])

    def story(self) -> StudyRental:
        return StudyRental(target="g5", provider="aws", instance="g5.xlarge", nodes=1, name="r")


class Meeting(Nodes):
    """A rental whose nodes come up, and go, when those of all others do at the same time."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def up(self, agreed: bool) -> Target:
        self.barrier.wait(_SECONDS)
        return super().up(agreed)

    def give_back(self) -> None:
        self.barrier.wait(_SECONDS)
        super().give_back()


class Booting(Nodes):
    """A rental that waits for its nodes until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.group = RentalGroup()
        self.begun = threading.Event()

    def up(self, agreed: bool) -> Target:
        self.is_up = True
        self.begun.set()
        while True:
            try:
                self.group.check()
            except RentingStopped:
                self.is_up = False
                raise
            threading.Event().wait(0.01)


class Refused(Nodes):
    """No capacity, once another rental waits for its nodes."""

    def __init__(self, other: Booting) -> None:
        super().__init__()
        self.other = other

    def up(self, agreed: bool) -> Target:
        assert self.other.begun.wait(_SECONDS)
        raise ValueError("target l4: no capacity")


def group_of(*nodes: Nodes) -> RentalGroup:
    return RentalGroup({f"t{place}": each for place, each in enumerate(nodes)}, agreed=True)


def block(folder: Path, *nodes: Nodes) -> Any:
    return giving_back(group_of(*nodes), RunPaths(folder), RunProgress())


def test_targets_are_rented_and_given_back_side_by_side() -> None:
    nodes = [Meeting(threading.Barrier(3)) for _ in range(3)]
    for each in nodes:
        each.barrier = nodes[0].barrier
    group = group_of(*nodes)
    assert [group.up(f"t{place}") for place in range(3)] == nodes
    for place in range(3):
        group.give_back(f"t{place}")
    assert [each.given_back for each in nodes] == [1, 1, 1]
    group.close()


def test_when_one_target_fails_the_others_end_and_the_failure_is_told(tmp_path: Path) -> None:
    booting = Booting()
    nodes: list[Nodes] = [booting, Refused(booting), Nodes()]
    group = group_of(*nodes)
    booting.group = group
    with pytest.raises(ValueError, match="target l4: no capacity"), giving_back(
        group, RunPaths(tmp_path), RunProgress()
    ):  # fmt: skip
        group.up("t0")
    assert [each.is_up for each in nodes] == [False] * 3 and [each.given_back for each in nodes] == [1, 1, 1]


def test_what_fails_while_nodes_boot_ends_that(tmp_path: Path) -> None:
    booting = Booting()
    booting.group = group = group_of(booting)
    with pytest.raises(ValueError, match="the hub is away"), giving_back(group, RunPaths(tmp_path), RunProgress()):
        group.begin({*group.rentals})
        assert booting.begun.wait(_SECONDS)
        raise ValueError("the hub is away")
    assert not booting.is_up and booting.given_back == 1


def test_a_target_that_has_nothing_to_measure_rents_nothing_and_gives_back_what_is_left(tmp_path: Path) -> None:
    nodes = [Nodes(), Nodes()]
    group = group_of(*nodes)
    with giving_back(group, RunPaths(tmp_path), RunProgress()):
        assert group.begin({"t1", "own"}) == ["t1"]
        group.up("t1")
        assert [each.is_up for each in nodes] == [False, True]
        for name in group.rentals:
            group.give_back(name)
    assert [each.given_back for each in nodes] == [1, 1]


@pytest.mark.parametrize("error", [ValueError("no capacity"), KeyboardInterrupt(), RunCancelled()])
def test_whatever_ends_the_block_gives_all_nodes_back(tmp_path: Path, error: BaseException) -> None:
    nodes = [Nodes(False), Nodes(False)]
    with pytest.raises(type(error)), block(tmp_path, *nodes):
        raise error
    assert [each.given_back for each in nodes] == [1, 1]
    assert len(Rentals.model_validate_json(RunPaths(tmp_path).rentals.read_bytes()).rentals) == 2


def test_an_error_names_what_is_left_too_and_the_others_are_given_back(tmp_path: Path) -> None:
    nodes = [Nodes(True), Nodes(False)]
    with pytest.raises(NodesLeft, match="no capacity") as raised, block(
        tmp_path, *nodes
    ):  # fmt: skip
        raise ValueError("no capacity")
    assert "aws instance i-1 in us-east-1" in str(raised.value) and nodes[1].given_back == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunCancelled()])
def test_what_a_person_ended_stays_that_and_names_what_is_left(tmp_path: Path, error: BaseException) -> None:
    run_progress = RunProgress()
    with pytest.raises(type(error)), giving_back(group_of(Nodes(True)), RunPaths(tmp_path), run_progress):
        raise error
    assert "aws instance i-1" in run_progress.left_behind


def test_nodes_that_are_left_after_the_report_end_the_run_with_an_error(tmp_path: Path) -> None:
    plan, watcher = SimpleNamespace(targets=()), SimpleNamespace(check=lambda: None)
    session = Session(RunPaths(tmp_path), cast(Any, plan), tmp_path, RunProgress(), cast(Any, watcher))
    check_given_back(session)
    session.rentals.left_behind.append("NOT given back")
    with pytest.raises(NodesLeft, match="NOT given back"):
        check_given_back(session)


def test_a_run_folder_that_takes_no_more_does_not_hide_why_the_block_ended(tmp_path: Path) -> None:
    nodes = [Nodes(True), Nodes(False)]
    (tmp_path / "rentals.json").mkdir()
    with pytest.raises(NodesLeft, match="no capacity"), block(tmp_path, *nodes):
        raise ValueError("no capacity")
    assert [each.given_back for each in nodes] == [1, 1]


def test_what_a_target_rented_is_kept_when_the_study_has_it_no_more(tmp_path: Path) -> None:
    """The file of the run's rentals had those of the study as it is alone, and the report lost the rest."""
    run = RunPaths(tmp_path)
    former = StudyRental(target="l4", provider="gcp", instance="g2-standard-4", nodes=1, name="old")
    before = StudyRental(target="g5", provider="aws", instance="g5.xlarge", nodes=4, name="r")
    run.rentals.write_text(Rentals(rentals=(former, before)).model_dump_json())
    with pytest.raises(ValueError, match=r"^ended$"), giving_back(RentalGroup({"g5": Nodes()}), run, RunProgress()):
        raise ValueError("ended")
    kept = Rentals.model_validate_json(run.rentals.read_bytes()).rentals
    assert [(rental.target, rental.nodes) for rental in kept] == [("l4", 1), ("g5", 1)]
