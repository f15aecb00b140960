"""Rules of measuring that a run folder was measured with, where its plan no longer says so."""

from pathlib import Path

import pytest

from configs.common.files.reading import read_model
from configs.plans.job import Job, Measurement
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.spec.study import StudyError
from tasks.campaign.launches.leftovers import collected_marker
from tasks.checks.resumed import check_rules
from tests.support.run_folders.made_studies import planned, write_plan, write_record

STUDY = """
workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}
experiments: {sizes: {kind: sweep, over: {batch_size: [1, 2]}}}
"""


def under(plan: Plan, cells: int, **rules: int) -> Plan:
    """The plan with only so many of its cells, under these rules."""
    kept = dict(list(plan.cells.items())[:cells])
    return plan.model_copy(update={"cells": kept, "measuring": Measuring(**rules)})


def write_job(run: RunPaths, name: str, cell: Cell) -> None:
    """A job that measures a cell with one pass of warm-up."""
    made = Job(
        name=name,
        study="made",
        measuring_pass="timed",
        measuring=Measuring(warmup=1),
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),),
        ranks_per_node=1,
        timeout_seconds=1,
        inputs="",
        cache="",
    )
    run.job(name).folder.mkdir(parents=True)
    run.job(name).job.write_text(made.model_dump_json())


def test_a_cell_that_comes_back_keeps_the_rules_that_it_was_measured_with(tmp_path: Path) -> None:
    """Left out of one run, whose rules were changed, its records counted as made by the new ones in the next."""
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    cell = list(plan.cells.values())[1]
    write_record(run, cell, 0)
    write_job(run, "j0", cell)
    check_rules(under(plan, 1, warmup=5), under(plan, 2, warmup=1), run)  # nothing of the other cell was measured
    without = under(plan, 1, warmup=5)
    with pytest.raises(StudyError, match=r"measuring\.warmup: got 5, but .* was measured with 1"):
        check_rules(under(plan, 2, warmup=5), without, run)
    check_rules(under(plan, 2, warmup=1), without, run)
    run.job("j0").job.unlink()
    check_rules(under(plan, 2, warmup=5), without, run)  # nobody knows any more


def test_measurements_that_failed_hold_no_rules(tmp_path: Path) -> None:
    """Where nothing had completed, for want of a longer warm-up, say, that longer one was refused in the folder."""
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    first, second = plan.cells.values()
    write_record(run, first, 0, status=Status.FAILED)
    write_job(run, "j0", first)
    before, after = under(plan, 2, warmup=1), under(plan, 2, warmup=5)
    check_rules(after, before, run)
    check_rules(after, None, run)
    write_record(run, second, 0)
    for earlier in (before, None):
        with pytest.raises(StudyError, match=r"measuring\.warmup: got 5, but .* was measured with 1"):
            check_rules(after, earlier, run)


def test_a_job_that_a_killed_run_left_keeps_the_rules_that_it_measures_with(tmp_path: Path) -> None:
    """The next run adopted it under other rules, and its records counted as made by these."""
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    write_job(run, "0001-timed-a", next(iter(plan.cells.values())))
    before, after = under(plan, 2, warmup=1), under(plan, 2, warmup=5)
    check_rules(after, before, run)  # it was never handed over
    run.job("0001-timed-a").submitted.touch()
    with pytest.raises(StudyError, match=r"measuring\.warmup: got 5, but .* was measured with 1"):
        check_rules(after, before, run)
    check_rules(before, before, run)
    timed = run.job("0001-timed-a").job.read_text()
    run.job("0001-timed-a").job.write_text(timed.replace('"measuring_pass":"timed"', '"measuring_pass":"memory"'))
    check_rules(after, before, run)
    run.job("0001-timed-a").job.write_text(timed)
    collected_marker(run, "0001-timed-a").touch()
    check_rules(after, before, run)


def test_the_job_of_many_cells_that_come_back_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file holds all of its cells: read for each of their records, the time grew with the square of the cells."""
    plan = planned(STUDY.replace("[1, 2]", str(list(range(1, 21)))))
    run = write_plan(tmp_path / "run", plan)
    cells = list(plan.cells.values())
    write_job(run, "j0", cells[0])
    for cell in cells[1:]:
        write_record(run, cell, 0)
    read: list[Path] = []

    def counted(path: Path, model: type[Job], max_bytes: int) -> Job:
        read.append(path)
        return read_model(path, model, max_bytes)

    monkeypatch.setattr("tasks.checks.resumed.read_model", counted)
    check_rules(under(plan, 20, warmup=1), under(plan, 1, warmup=1), run)
    assert read == [run.job("j0").job]


def test_a_folder_whose_plan_is_lost_keeps_the_rules_of_its_jobs(tmp_path: Path) -> None:
    """Deleted or damaged, it was made anew, and records of both rules were one interval."""
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    check_rules(under(plan, 2, warmup=5), None, run)  # nothing is measured
    cell = next(iter(plan.cells.values()))
    write_record(run, cell, 0)
    write_job(run, "j0", cell)
    with pytest.raises(StudyError, match=r"measuring\.warmup: got 5, but .* was measured with 1"):
        check_rules(under(plan, 2, warmup=5), None, run)
    check_rules(under(plan, 2, warmup=1), None, run)
