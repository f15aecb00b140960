"""Renting and giving back the nodes of a study's targets, as stages of its run.

    with study_nodes(study, run, run_progress, watcher, rented_folder(), agreed=True, cache=cache_folder()) as rentals:
        rentals.begin({"g5"})               # targets with something to measure, in the background
        session = Session(..., rentals)
        rent_nodes(session, "g5")           # waits; session.target("g5") is then made of hosts
        ...
        give_back_nodes(session, "g5")

Whatever ends the block (an error, a cancellation, Ctrl-C, SIGTERM), everything that is rented is given back first.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.files.reading import read_model
from configs.common.secrets import redacted
from configs.plans.paths import RunPaths
from configs.plans.rentals import Rentals, StudyRental
from configs.spec.study import StudySpec
from configs.targets.rented import RentedTarget
from tasks.campaign.progress import RunProgress
from tasks.campaign.rental_group import RentalGroup
from tasks.campaign.session import Cancellation, Session
from tasks.prefect_api.ended import RunCancelled
from tasks.prefect_api.stages import run_logger, stage
from tasks.providers.giving_back import LeftBehind
from tasks.providers.rental import ProviderError
from tasks.providers.study_nodes import StudyNodes


class NodesLeft(ValueError):
    """Nodes of the study could not be given back, and may go on costing money; each is named."""


@contextmanager
def study_nodes(
    study: StudySpec,
    run: RunPaths,
    run_progress: RunProgress,
    watcher: Cancellation,
    rented: Path,
    agreed: bool,
    cache: Path,
) -> Iterator[RentalGroup]:
    """Give back everything that is rented in the block, however it ends.

    rented: folder of the ledgers. agreed: a person has seen the price and wants it. cache: of refreshed prices.
    """
    rentals = RentalGroup(agreed=agreed)

    def check() -> None:
        watcher.check()
        rentals.check()

    for target in study.targets:
        if isinstance(target, RentedTarget):
            say = partial(_say, run_progress, target.name)
            rentals.rentals[target.name] = StudyNodes(target, study.study, run.folder, rented, say, check, cache)
    with giving_back(rentals, run, run_progress):
        yield rentals


@contextmanager
def giving_back(rentals: RentalGroup, run: RunPaths, run_progress: RunProgress) -> Iterator[None]:
    """Give these back if the block ends by an exception, which then names what is left."""
    try:
        yield
    except BaseException as error:
        for name in rentals.rentals:
            _give_back(rentals, run, name)
        if rentals.left_behind and isinstance(error, Exception) and not isinstance(error, RunCancelled):
            raise NodesLeft("\n".join([redacted(str(error)), *rentals.left_behind])) from error
        run_progress.left_behind = "; ".join(filter(None, [run_progress.left_behind, *rentals.left_behind]))
        raise
    finally:
        rentals.close()


@stage("rent", "rent {name}")
def rent_nodes(session: Session, name: str) -> None:
    """Wait for the nodes of a target. Raises ValueError saying what was tried; then nothing of it is up."""
    try:
        session.placed[name] = session.rentals.up(name)
    except LeftBehind as error:
        raise NodesLeft(str(error)) from error
    except ProviderError as error:
        raise ValueError(redacted(str(error))) from error
    finally:
        _record(session.rentals, session.run)


@stage("give back", "give back {name}")
def give_back_nodes(session: Session, name: str) -> None:
    """Give back the nodes of a target, or leave them up for its `keep`.

    What is left is in the report and ends the run with an error.
    """
    try:
        if session.rentals.keep(name):
            _record(session.rentals, session.run)
            return
    except (ProviderError, ValueError, OSError) as error:
        run_logger().error("%s: its nodes are not kept: %s", name, redacted(str(error)))
    session.run_progress.stage = f"giving back the nodes of {name}"
    _give_back(session.rentals, session.run, name)


def check_given_back(session: Session) -> None:
    """Raise NodesLeft naming everything that could not be given back."""
    if session.rentals.left_behind:
        raise NodesLeft("\n".join(session.rentals.left_behind))


def _give_back(rentals: RentalGroup, run: RunPaths, name: str) -> None:
    try:
        rentals.give_back(name)
    except (LeftBehind, ProviderError, ValueError, OSError) as error:
        rentals.left_behind.append(redacted(str(error)))
        run_logger().error("%s", rentals.left_behind[-1])
    finally:
        try:
            _record(rentals, run)
        except OSError as error:  # a full disk must not keep the others from being given back and named
            run_logger().error("what was rented is not written: %s", error)


def _record(rentals: RentalGroup, run: RunPaths) -> None:
    """Write what was rented so far into the run folder, for targets that the study had before too."""
    stories = rentals.stories()
    before: tuple[StudyRental, ...] = ()
    with suppress(FileNotFoundError, ValueError):  # the first, or of a version that wrote it otherwise
        before = read_model(run.rentals, Rentals).rentals
    former = [rental for rental in before if rental.target not in {story.target for story in stories}]
    write_atomically(run.rentals, Rentals(rentals=(*former, *stories)).model_dump_json(indent=1))


def _say(run_progress: RunProgress, name: str, line: str) -> None:
    run_progress.stage = f"{name}: {line}"
    run_logger().info("%s: %s", name, line)
