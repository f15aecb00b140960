"""`rankwise run STUDY --until-decided`: add repeats while these would settle what the report recommends."""

from collections.abc import Callable
from pathlib import Path

from configs.common.printable import plural
from configs.plans.paths import RunPaths
from configs.spec.study import load_study
from flows.cli.errors import ALL_COMPLETED, SOME_UNMEASURED


def run_until_decided(path: Path, assignments: list[str], runs: Path, measure: Callable[[list[str]], int]) -> int:
    """Measure a study, again with more repeats while its decision is open; return the exit code.

    measure: runs the study with these assignments and returns the exit code. No more repeats than the study's
    `measuring.max_repeats`, nor more time than `measuring.budget_minutes` in all.
    """
    from reports.json_form import run_answers
    from reports.reading.devices import load_comparable
    from tasks.campaign.progress import current_progress

    given, spent_minutes = list(assignments), 0.0
    budget_minutes = load_study(path, given).measuring.budget_minutes
    while True:
        code = measure(given)
        if code not in (ALL_COMPLETED, SOME_UNMEASURED):
            return code
        study = load_study(path, given)
        done, most = study.measuring.repeats, study.measuring.max_repeats
        needed = run_answers(load_comparable(RunPaths(runs / study.study))).repeats_to_decide
        # Of cells whose repeats failed or were not paid for there are fewer than were asked for: asking for as many
        # again would measure nothing.
        if needed is None or min(needed, most) <= done:
            print(
                "Decided: more repeats would settle nothing"
                if needed is None
                else f"Undecided after {plural(done, 'repeat')}"
            )
            return code
        spent_minutes += current_progress().spent_seconds / 60
        further = [f"measuring.repeats={min(needed, most)}"]
        if budget_minutes is not None:
            # Each measuring has the time that is left, not all of it anew.
            if spent_minutes >= budget_minutes:
                print(f"Undecided after {plural(done, 'repeat')}: measuring.budget_minutes {budget_minutes:g} is spent")
                return code
            further.append(f"measuring.budget_minutes={max(0.0001, budget_minutes - spent_minutes):.4f}")
        print(f"Undecided: measuring {min(needed, most)} repeats instead of {done}\n", flush=True)
        given = [*assignments, *further]
