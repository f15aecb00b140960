"""Check that a study goes on in its run folder under the rules that the folder was measured with.

check_rules(plan, before, run)         # StudyError; before anything is started

The rules of measuring are not in the key of a cell, so that its records would be taken as they are. Random prompts and
the order of training data are drawn with the seed: answers to other prompts would be called wrong, and other batches'
losses be laid over each other. A measurement of fewer passes, or of less warmed-up ones, is another figure than the
report would say that it is.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.plans.job import Job
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import Record, Status, read_record
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.spec.study import StudyError
from configs.workloads import descriptor_of
from configs.workloads.prompted import PromptedWorkload
from configs.workloads.script import ScriptWorkload
from tasks.campaign.launches.leftovers import collected_marker


@dataclass(frozen=True)
class _Rule:
    """A field of `measuring`, which cells' records depend on it, and how."""

    field: str
    shapes: Callable[[Cell], bool]
    records: str
    why: str


def check_rules(plan: Plan, before: Plan | None, run: RunPaths) -> None:
    """Raise StudyError, naming each rule, where the plan goes on with records of the run folder that other rules made.

    before: the plan of an earlier run in this folder; None: there is none that can be read.
    """
    if before is None and not run.records.is_dir():
        return
    rules_of = cache(partial(_rules_of, run))  # of each job once: its file holds all cells that it measured
    problems = [
        f"measuring.{rule.field}: got {got}, but {run.folder} was measured with {said}, {rule.why}. "
        f"Keep {said}, or use another folder with --runs"
        for rule in _RULES
        for got in [getattr(plan.measuring, rule.field)]
        for said in _others(rule, got, plan, before, run, rules_of)[:1]
    ]
    if problems:
        raise StudyError(problems)


def _others(
    rule: _Rule,
    got: object,
    plan: Plan,
    before: Plan | None,
    run: RunPaths,
    rules_of: Callable[[str], Measuring | None],
) -> list[object]:
    """Other values of a rule, with which records were made that the plan goes on with. rules_of: a job, by its name."""
    found: list[object] = []
    if before is not None and got != (said := getattr(before.measuring, rule.field)) and _kept(rule, plan, before, run):
        found = [said]
    # A cell that the study had lost and has again was measured by the rules of a plan before the earlier one; all cells
    # of a folder whose plan cannot be read by those of their jobs.
    known = before.cells if before is not None else {}
    again = [key for key, cell in plan.cells.items() if key not in known and rule.shapes(cell)]
    return found + [made for key in again for made in _made_with(rule, run.records / key, rules_of) if made != got]


def _made_with(rule: _Rule, records: Path, rules_of: Callable[[str], Measuring | None]) -> Iterator[object]:
    """The values of a rule in the jobs that measured a cell, as far as these can be read."""
    for record in _completed(records, rule):
        rules = rules_of(record.job)
        if rules is not None:
            yield getattr(rules, rule.field)


def _completed(records: Path, rule: _Rule) -> Iterator[Record]:
    """The records of a cell that a run goes on with: what failed is measured again, what is damaged set aside."""
    for path in records.glob(rule.records):
        with suppress(OSError, ValueError):
            record = read_record(path)
            if record.status is Status.COMPLETED:
                yield record


def _rules_of(run: RunPaths, job: str) -> Measuring | None:
    """The rules of a job; None where it cannot be read."""
    try:
        return read_model(run.job(job).job, Job, PLAN_BYTES).measuring
    except (OSError, ValueError):
        return None


def _kept(rule: _Rule, plan: Plan, before: Plan, run: RunPaths) -> bool:
    keys = {key for key, cell in before.cells.items() if key in plan.cells and rule.shapes(cell)}
    measured = any(any(True for _ in _completed(run.records / key, rule)) for key in keys)
    return measured or bool(keys & _under_way(rule, run))


def _under_way(rule: _Rule, run: RunPaths) -> set[str]:
    """Cells of jobs that a killed run left, whose records depend on the rule, and which this run would adopt."""
    keys: set[str] = set()
    for path in run.jobs.glob("[0-9]*-*"):
        paths = run.job(path.name)
        handed_over = any(each.exists() for each in (paths.submission, paths.submitting, paths.submitted))
        if handed_over and not collected_marker(run, path.name).exists():
            with suppress(OSError, ValueError):
                job = read_model(paths.job, Job, PLAN_BYTES)
                if job.measuring_pass == "timed" or rule.records != _TIMED:
                    keys |= {each.cell.key for each in job.measurements}
    return keys


def _draws(cell: Cell) -> bool:
    work = cell.workload
    return descriptor_of(work).trains or (isinstance(work, PromptedWorkload) and work.prompts is None)


def _has_passes(cell: Cell) -> bool:
    return descriptor_of(cell.workload).repeats_passes and not cell.workload.keeps_answers


def _warms_up(cell: Cell) -> bool:
    work = cell.workload
    return work.warmup_steps is None if isinstance(work, ScriptWorkload) else _has_passes(cell)


_TIMED = "r*.json"
_REPORTED = "and these records would be reported as if of the new rule"
_RULES = (
    _Rule("seed", _draws, "*.json", "which draws random prompts and the order of training data"),
    _Rule("warmup", _warms_up, _TIMED, _REPORTED),
    _Rule("min_seconds", _has_passes, _TIMED, _REPORTED),
    _Rule("min_passes", _has_passes, _TIMED, _REPORTED),
)
