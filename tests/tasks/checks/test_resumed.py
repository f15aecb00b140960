"""Rules of measuring that a run folder was measured with, where its plan no longer says so."""

from pathlib import Path

import pytest

from configs.plans.job import Job, Measurement
from configs.plans.plan import Plan
from configs.spec.measuring import Measuring
from configs.spec.study import StudyError
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


def test_a_cell_that_comes_back_keeps_the_rules_that_it_was_measured_with(tmp_path: Path) -> None:
    """Left out of one run, whose rules were changed, its records counted as made by the new ones in the next."""
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    cell = list(plan.cells.values())[1]
    write_record(run, cell, 0)
    made = Job(
        name="j0",
        study="made",
        measuring_pass="timed",
        measuring=Measuring(warmup=1),
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),),
        ranks_per_node=1,
        timeout_seconds=1,
        inputs="",
        cache="",
    )
    run.job("j0").folder.mkdir(parents=True)
    run.job("j0").job.write_text(made.model_dump_json())
    check_rules(under(plan, 1, warmup=5), under(plan, 2, warmup=1), run)  # nothing of the other cell was measured
    without = under(plan, 1, warmup=5)
    with pytest.raises(StudyError, match=r"measuring\.warmup: got 5, but .* was measured with 1"):
        check_rules(under(plan, 2, warmup=5), without, run)
    check_rules(under(plan, 2, warmup=1), without, run)
    run.job("j0").job.unlink()
    check_rules(under(plan, 2, warmup=5), without, run)  # nobody knows any more
