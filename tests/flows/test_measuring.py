"""What a run measures in each of its rounds, by its records; nothing is launched."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from configs.plans.packing import Launch
from configs.records.record import Failure, Status
from configs.targets.target import SlurmTarget
from flows import measuring
from tasks.campaign.progress import RunProgress
from tasks.campaign.session import Session
from tests.support.cluster.slurm_jobs import made
from tests.support.run_folders.made_studies import decoded, planned, write_plan, write_record

STUDY = """
workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}
experiments: {sizes: {kind: sweep, over: {batch_size: [1, 2]}}}
measuring: {repeats: 6, target_interval: 0.0000001, max_repeats: 12, memory: false}
"""


class NeverCancelled:
    """A run that nobody cancels."""

    def check(self) -> None:
        """Go on."""


def test_further_repeats_of_one_cell_measure_no_failed_one_of_another_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round of a study with a target interval began again with all that had failed, and counted it once more."""
    plan = planned(STUDY, repeats=6)
    run = write_plan(tmp_path / "run", plan)
    session = Session(run, plan, tmp_path, RunProgress(), NeverCancelled())
    failing = min(plan.cells)
    rounds: list[int] = []

    def measured(_: Session, launches: Sequence[Launch], *__: object) -> None:
        made = [measurement for launch in launches for measurement in launch.measurements]
        rounds.append(sum(measurement.cell.key == failing for measurement in made))
        for each in made:
            if each.cell.key == failing:
                failure = Failure(message="no memory is left")
                write_record(run, each.cell, each.repeat, status=Status.OUT_OF_MEMORY, failure=failure)
                continue
            figures = {"num_prompts": 1, "prompt_tokens": 8, "measurement_seconds": 2.0, "load_seconds": 0.5}
            seconds = 0.01 * (1 + 0.1 * each.repeat)
            write_record(
                run,
                each.cell,
                each.repeat,
                samples=decoded(each.cell, seconds),
                figures=figures,
                started_at="2026-01-01T00:00:00Z",
                finished_at="2026-01-01T00:00:30Z",
            )

    monkeypatch.setattr(measuring, "_run_launches", measured)
    measuring.measure_missing(session, only_failed=False)
    assert session.plan.repeats[max(plan.cells)] == 12, "the other cell is measured further"
    assert len(rounds) > 2 and rounds == [6] + [0] * (len(rounds) - 1)
    assert session.run_progress.total - session.run_progress.done < 6, "what failed is done"
    again: list[int] = []
    monkeypatch.setattr(measuring, "_run_launches", lambda _, launches, *__: again.append(len(launches)))
    measuring.measure_missing(Session(run, session.plan, tmp_path, RunProgress(), NeverCancelled()), only_failed=False)
    assert again[0] == 6, "a further run tries it again"


def test_what_only_failed_leaves_for_later_is_not_said_to_be_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One repeat completed, one failed, ten never begun: `11 of 12 measurements were already completed`."""
    plan = planned(STUDY, repeats=6)
    run = write_plan(tmp_path / "run", plan)
    first, second = plan.cells.values()
    write_record(run, first, 0, samples=decoded(first, 0.01), figures={"num_prompts": 1})
    write_record(run, second, 0, status=Status.FAILED, failure=Failure(message="no"))
    session = Session(run, plan, tmp_path, RunProgress(), NeverCancelled())
    monkeypatch.setattr(measuring, "_run_launches", lambda *_: None)
    assert measuring.measure_missing(session, only_failed=True) == 1
    assert (session.run_progress.done, session.run_progress.total) == (1, 2)
    (note,) = session.run_progress.notes
    assert note.startswith("10 measurements never tried, left out by --only-failed. "), note
    assert measuring.measure_missing(session, only_failed=False) == 1
    assert session.run_progress.total == 12 and session.run_progress.notes == [note]


def test_repeats_that_the_study_asks_for_no_more_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After --until-decided a plain run made the report of the first repeats alone, without a word."""
    plan = planned(STUDY.replace("repeats: 6, target_interval: 0.0000001, max_repeats: 12", "repeats: 2"))
    run = write_plan(tmp_path / "run", plan)
    first, second = plan.cells.values()
    for repeat in range(4):
        write_record(run, first, repeat, samples=decoded(first, 0.01), figures={"num_prompts": 1})
    write_record(run, second, 5, status=Status.FAILED, failure=Failure(message="no"))
    session = Session(run, plan, tmp_path, RunProgress(), NeverCancelled())
    monkeypatch.setattr(measuring, "_run_launches", lambda *_: None)
    measuring.measure_missing(session, only_failed=False)
    measuring.measure_missing(session, only_failed=False)
    assert session.run_progress.notes == [
        "2 completed repeats beyond those that the study asks for are left out of the report. To include them, set "
        "measuring.repeats to 4"
    ]


def test_how_long_measuring_takes_is_predicted_where_no_job_of_a_cluster_goes_on_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that had adopted a job it was the time of the other launches alone."""
    plan = planned(
        "workload: {kind: noop, seconds: 2}\nexperiments: {e: {kind: sweep, over: {items: [1, 2]}}}\n"
        "measuring: {repeats: 3, memory: false}\n"
    )
    run = write_plan(tmp_path / "run", plan)
    session = Session(run, plan, tmp_path, RunProgress(), NeverCancelled())
    monkeypatch.setattr(measuring, "_run_launches", lambda *_: None)
    measuring.measure_missing(session, only_failed=False)
    expected = session.run_progress.expected_seconds
    assert expected is not None and 12 < expected < 120
    session.adopted.append(made(run.folder, 1, under=SlurmTarget()).folder.name)
    measuring.measure_missing(session, only_failed=False)
    assert session.run_progress.expected_seconds is None
