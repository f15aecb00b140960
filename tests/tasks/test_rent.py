"""What the block around a study's rentals does when it ends, whatever ends it; the nodes themselves are stand-ins."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.plans.paths import RunPaths
from configs.plans.rentals import Rentals, StudyRental
from tasks.campaign.progress import RunProgress
from tasks.campaign.session import Session
from tasks.prefect_api.cancellation import RunCancelled
from tasks.providers.giving_back import LeftBehind
from tasks.rent import NodesLeft, check_given_back, study_nodes


class Nodes:
    """A rental that is given back, or of which something is left."""

    def __init__(self, left: bool) -> None:
        self.left, self.given_back = left, 0

    def give_back(self) -> None:
        self.given_back += 1
        if self.left:
            raise LeftBehind("r", ["aws instance i-1 in us-east-1"], [])

    def story(self) -> StudyRental:
        return StudyRental(target="g5", provider="aws", instance="g5.xlarge", nodes=1, name="r")


def session_of(folder: Path, *nodes: Nodes) -> Session:
    plan = cast(Any, SimpleNamespace(targets=(), study="s"))
    session = Session(RunPaths(folder), plan, folder, RunProgress(), cast(Any, SimpleNamespace(check=lambda: None)))
    session.rentals = {f"t{place}": cast(Any, each) for place, each in enumerate(nodes)}
    return session


@pytest.mark.parametrize("error", [ValueError("no capacity"), KeyboardInterrupt(), RunCancelled()])
def test_whatever_ends_the_block_gives_all_nodes_back(tmp_path: Path, error: BaseException) -> None:
    nodes = [Nodes(False), Nodes(False)]
    with pytest.raises(type(error)), study_nodes(session_of(tmp_path, *nodes), tmp_path, agreed=True):
        raise error
    assert [each.given_back for each in nodes] == [1, 1]
    assert len(Rentals.model_validate_json(RunPaths(tmp_path).rentals.read_bytes()).rentals) == 2


def test_an_error_names_what_is_left_too_and_the_others_are_given_back(tmp_path: Path) -> None:
    nodes = [Nodes(True), Nodes(False)]
    with pytest.raises(NodesLeft, match="no capacity") as raised, study_nodes(
        session_of(tmp_path, *nodes), tmp_path, agreed=True
    ):  # fmt: skip
        raise ValueError("no capacity")
    assert "aws instance i-1 in us-east-1" in str(raised.value) and nodes[1].given_back == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunCancelled()])
def test_what_a_person_ended_stays_that_and_names_what_is_left(tmp_path: Path, error: BaseException) -> None:
    session = session_of(tmp_path, Nodes(True))
    with pytest.raises(type(error)), study_nodes(session, tmp_path, agreed=True):
        raise error
    assert "aws instance i-1" in session.run_progress.left_behind


def test_nodes_that_are_left_after_the_report_end_the_run_with_an_error(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    check_given_back(session)
    session.left_behind.append("NOT given back")
    with pytest.raises(NodesLeft, match="NOT given back"):
        check_given_back(session)
