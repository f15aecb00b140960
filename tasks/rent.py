"""Renting and giving back the nodes of a study's targets, as stages of its run.

    with study_nodes(session, rented_folder(), agreed=True):
        rent_nodes(session, "g5")           # session.target("g5") is then made of hosts
        ...
        give_back_nodes(session, "g5")

Whatever ends the block (an error, a cancellation, Ctrl-C, SIGTERM), everything that is rented is given back first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.secrets import redacted
from configs.plans.rentals import Rentals, StudyRental
from configs.spec.rented import RentedTarget
from tasks.campaign.session import Session
from tasks.prefect_api.cancellation import RunCancelled
from tasks.prefect_api.stages import run_logger, stage
from tasks.providers.giving_back import LeftBehind
from tasks.providers.rental import ProviderError
from tasks.providers.study_nodes import StudyNodes


class NodesLeft(ValueError):
    """Nodes of the study could not be given back, and may go on costing money; each is named."""


@contextmanager
def study_nodes(session: Session, rented: Path, agreed: bool) -> Iterator[None]:
    """Give back everything that is rented in the block, however it ends.

    rented: folder of the ledgers. agreed: a person has seen the price and wants it.
    """
    session.agreed_to_rent = agreed
    for target in session.plan.targets:
        if isinstance(target, RentedTarget):
            say = partial(_say, session, target.name)
            session.rentals[target.name] = StudyNodes(
                target, session.plan.study, session.run.folder, rented, say, session.watcher.check
            )
    try:
        yield
    except BaseException as error:
        for name in session.rentals:
            _give_back(session, name)
        if session.left_behind and isinstance(error, Exception) and not isinstance(error, RunCancelled):
            raise NodesLeft("\n".join([redacted(str(error)), *session.left_behind])) from error
        session.run_progress.left_behind = "; ".join(
            filter(None, [session.run_progress.left_behind, *session.left_behind])
        )
        raise


@stage("rent", "rent {name}")
def rent_nodes(session: Session, name: str) -> None:
    """Rent the nodes of a target. Raises ValueError saying what was tried; then nothing of it is up."""
    try:
        session.placed[name] = session.rentals[name].up(session.agreed_to_rent)
    except LeftBehind as error:
        raise NodesLeft(str(error)) from error
    except ProviderError as error:
        raise ValueError(redacted(str(error))) from error
    finally:
        _record(session)


@stage("give back", "give back {name}")
def give_back_nodes(session: Session, name: str) -> None:
    """Give back the nodes of a target. What is left is in the report and ends the run with an error."""
    session.run_progress.stage = f"giving back the nodes of {name}"
    _give_back(session, name)


def check_given_back(session: Session) -> None:
    """Raise NodesLeft naming everything that could not be given back."""
    if session.left_behind:
        raise NodesLeft("\n".join(session.left_behind))


def _give_back(session: Session, name: str) -> None:
    try:
        session.rentals[name].give_back()
    except (LeftBehind, ProviderError, ValueError, OSError) as error:
        session.left_behind.append(redacted(str(error)))
        run_logger().error("%s", session.left_behind[-1])
    finally:
        _record(session)


def _record(session: Session) -> None:
    """Write what was rented so far into the run folder."""
    told: list[StudyRental] = [nodes.story() for nodes in session.rentals.values()]
    write_atomically(session.run.rentals, Rentals(rentals=tuple(told)).model_dump_json(indent=1))


def _say(session: Session, name: str, line: str) -> None:
    session.run_progress.stage = f"{name}: {line}"
    run_logger().info("%s: %s", name, line)
