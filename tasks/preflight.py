"""Stage 3: preflight checks of the nodes. Slow and broken nodes are reported and excluded from the study's jobs.

What was found is kept as `preflight.json` in the run folder and shown in the report; a run that goes on within some
hours takes it as it is.
"""

from datetime import UTC, datetime, timedelta
from functools import partial

from configs.common.base import write_atomically
from configs.common.files.reading import PLAN_BYTES, read_bytes, read_model
from configs.plans.job import Job
from configs.plans.paths import RunPaths
from configs.plans.preflight import Preflight, TargetPreflight
from configs.records.record import Status
from configs.targets.rented import RentedTarget
from configs.targets.resources import ClusterTarget
from reports.preflight import preflight_summary, read_preflight, sentences
from slurm.schedulers.adapter import adapter_for
from tasks.campaign.launches.leftovers import copied_from
from tasks.campaign.ledger import planned_repeats, set_aside_damaged, told_set_aside
from tasks.campaign.session import Session
from tasks.checks.node_checks import Observer, check_nodes, settings_of
from tasks.planning.predictions import with_predictions
from tasks.prefect_api.events import Happened, tell
from tasks.prefect_api.stages import stage

REUSED = timedelta(hours=12)


@stage("preflight", "test the nodes")
def preflight(session: Session, only_failed: bool = False) -> Preflight:
    """Test the nodes of every target that asks for it and has something to measure; tell the session and the
    progress."""
    run = session.run
    before = read_preflight(run) or Preflight()
    known = {target.target: target for target in before.targets}
    for target in wanted(session, only_failed):
        earlier = known.get(target.name)
        if earlier is None or not _holds(earlier, target):
            told = Observer(notice=partial(_say, session, target), check=session.watcher.check)
            _say(session, target)
            _end_earlier(run.preflight_run)
            _begin_folder(run)
            known[target.name] = check_nodes(target, session.placed_plan, run.preflight_run, session.cache, told)
            write_atomically(run.preflight, Preflight(targets=tuple(known.values())).model_dump_json(indent=1))
        found = known[target.name]
        session.run_progress.notes += [
            f"{target.name}: {text}" for text in (preflight_summary(found), *sentences(found))
        ]
    session.excluded = {
        target.name: frozenset(known[target.name].excluded)
        for target in session.targets
        if isinstance(target, ClusterTarget) and _is_of(known.get(target.name), target)
    }
    for name, nodes in session.excluded.items():
        for node in sorted(nodes):
            message = f"{name}: {node} gets no jobs, as the test of the nodes found it slow or broken"
            tell(Happened.NODE_AVOIDED, session.plan.study, message, target=name, node=node)
    all_found = Preflight(targets=tuple(known.values()))
    _predict_again(session, all_found)
    return all_found


def _predict_again(session: Session, found: Preflight) -> None:
    """What could not be predicted for want of a link can be now; what was said stays."""
    plan = session.plan
    if found.targets and any(said.throughput is None for said in plan.predictions.values()):
        session.plan = with_predictions(plan, session.run.inputs, session.cache, plan.predictions, found)
        write_atomically(session.run.plan, session.plan.model_dump_json(indent=1))


def wanted(session: Session, only_failed: bool = False) -> list[ClusterTarget]:
    """Targets whose nodes are to be tested: as they say, else where a cell that this run measures has several."""
    ledger = set_aside_damaged(session.run)
    session.run_progress.notes += told_set_aside(ledger.set_aside)
    nodes: dict[str, int] = {}
    for place in planned_repeats(session.plan):
        entry = ledger.decisive(place)
        is_missing = not only_failed if entry is None else entry.status is not Status.COMPLETED
        if is_missing:  # what failed is measured again
            cell = session.plan.cells[place[0]]
            nodes[cell.target] = max(cell.nodes, nodes.get(cell.target, 1))
    return [
        target
        for target in session.targets
        if isinstance(target, ClusterTarget)
        and not isinstance(target, RentedTarget)  # of which nothing is up, as this run measures nothing there
        and target.name in nodes
        and (nodes[target.name] > 1 if target.preflight is None else target.preflight)
    ]


def _holds(found: TargetPreflight, target: ClusterTarget) -> bool:
    """Whether an earlier test still says what a new one would: it tested something, lately, and nothing was changed."""
    age = datetime.now(UTC) - datetime.fromisoformat(found.at)
    # Of the future it is where a clock was set back, or is another machine's: it would hold until then.
    return bool(found.nodes) and abs(age) < REUSED and _is_of(found, target)


def _is_of(found: TargetPreflight | None, target: ClusterTarget) -> bool:
    """Whether a test was of the target as it is: it may have other nodes since, or be to go without tests."""
    return found is not None and found.settings == settings_of(target)


def _begin_folder(run: RunPaths) -> None:
    """Make the folder of the tests, known to clusters by the run's identity as the run is; one that is there stays."""
    if run.id.exists() and not run.preflight_run.folder.exists():
        run.preflight_run.folder.mkdir()
        write_atomically(run.preflight_run.id, read_bytes(run.id))


def _end_earlier(run: RunPaths) -> None:
    """A run that was killed while it tested nodes, of whatever target, left a job: its result would come too late."""
    for folder in sorted(run.jobs.glob("[0-9]*-*")):
        paths = run.job(folder.name)
        if paths.job.exists() and not paths.end.exists():
            job = read_model(paths.job, Job, PLAN_BYTES)
            if copied_from(run, folder.name, job) is None:
                adapter_for(job.target.adapter).cancel(folder)


def _say(session: Session, target: ClusterTarget, waits: str = "") -> None:
    session.run_progress.stage = f"preflight checks of {target.name}" + (f": {waits}" if waits else "")
