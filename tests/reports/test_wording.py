"""Words of the report where few or no figures are there: no winner without a rival, no figure of what failed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from configs.plans.paths import RunPaths
from configs.plans.prediction import Prediction
from configs.records.record import Failure, Status
from configs.targets.target import LocalTarget
from reports.decisions.cost import cell_costs
from reports.decisions.decision import Decision, decide
from reports.decisions.next_measurement import _spent, next_lines
from reports.decisions.objectives import Judgement, Objective, objectives_sentences
from reports.document.paper import _threats
from reports.experiments.comparison import (
    optimization,
    optimization_sentence,
    optimization_table,
    sweep,
    sweep_sentence,
)
from reports.experiments.targets import side_by_side, targets_opening, targets_sentence, targets_table
from reports.numbers.statistics import Estimate
from reports.planning.accuracy import JudgedPrediction
from reports.planning.text import signed
from reports.plots.style import crosses
from reports.reading.load import load_run
from reports.training.strategies import Strategies, Way, strategies_sentence
from tests.support.run_folders.report_runs import (
    experiment,
    generate,
    plan_of,
    write_measurements,
    write_plan,
    write_record,
)

FAILED = Failure(message="no memory left")


def decision_of(run: RunPaths) -> list[Decision]:
    study = load_run(run)
    return decide(study, cell_costs(study))


def test_a_baseline_that_failed_has_no_gain_of_1(tmp_path: Path) -> None:
    base, half = generate(), generate(dtype="bfloat16")
    points = [(base, {"variant": "baseline"}, "baseline"), (half, {"variant": "half"}, "half")]
    run = write_plan(tmp_path / "run", plan_of([base, half], [experiment("half", "optimization", points)], 1))
    write_record(run, base, status=Status.FAILED, failure=FAILED)
    write_measurements(run, half, [1.0])
    study = load_run(run)
    table = optimization_table(*optimization(study, study.plan.experiments[0]))
    assert "gain (interval)" not in table.columns and table.rows[0][-1] == "failed"


def test_the_only_point_with_a_figure_is_not_called_the_fastest(tmp_path: Path) -> None:
    cells = [generate(dp=dp).model_copy(update={"target": name}) for name in ("a", "b") for dp in (1, 2)]
    experiments = [
        experiment(
            f"strong on {name}",
            "strong",
            [(cell, {"ranks": cell.layout.ranks}, f"{cell.layout.ranks}") for cell in cells if cell.target == name],
            grow="dp",
        )
        for name in ("a", "b")
    ]
    plan = plan_of(cells, experiments, 1).model_copy(update={"targets": (LocalTarget(name="a"), LocalTarget(name="b"))})
    run = write_plan(tmp_path / "run", plan)
    for cell in cells:
        if cell.layout.dp == 2:
            write_measurements(run, cell, [1.0])
        else:
            write_record(run, cell, status=Status.FAILED, failure=FAILED)
    (found,) = side_by_side(load_run(run))
    assert targets_opening(found) == "only dp=2 has a figure on a; only dp=2 has a figure on b."
    assert targets_sentence(found).startswith("On a only dp=2 has a figure: 40.0 tokens/s")
    assert "times the baseline (interval)" not in targets_table(found).columns


def test_a_clock_that_was_set_back_gives_no_negative_time(tmp_path: Path) -> None:
    """The proposal to measure again said `about -30 s of measuring`."""
    one, two = generate(), generate(dp=2)
    run = write_plan(tmp_path / "run", plan_of([one, two], [], 3))
    for cell in (one, two):
        write_measurements(run, cell, [1.0, 1.1, 0.9])
    (decision,) = decision_of(run)
    assert _spent(decision, decision.members, 5) == ", about 120 s of measuring"
    for path in run.records.glob("*/*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"finished_at": "2025-12-31T23:59:00Z"}))
    (decision,) = decision_of(run)
    assert _spent(decision, decision.members, 5) == ""


def test_answers_that_are_kept_once_are_no_threat_to_the_figures(tmp_path: Path) -> None:
    """The paper of the quickstart said that 5 of 14 cells have a range for an interval: those of its correctness."""
    cell, answers = generate(), generate(answers=True)
    run = write_plan(tmp_path / "run", plan_of([cell, answers], [], 6))
    write_measurements(run, cell, [1.0, 1.1, 0.9, 1.0, 1.1, 0.9])
    write_measurements(run, answers, [1.0])
    study = load_run(run)
    assert len(study.cells[answers.key].completed) == 1
    assert "fewer than six" not in " ".join(_threats(study, {"noise": None, "unsteady": None}))


def test_one_of_anything_has_the_singular(tmp_path: Path) -> None:
    cell = generate()
    plan = plan_of([cell], [], 1)
    run = write_plan(tmp_path / "run", plan)
    write_measurements(run, cell, [1.0])
    study = load_run(run)
    threats = _threats(study, {"noise": None, "unsteady": None})
    assert threats[0].startswith("1 of 1 cell has fewer than six repeats: its bounds are the range of")

    def way(name: str, seconds: float) -> Way:
        measured = Estimate(seconds, 0.99 * seconds, 1.01 * seconds, 3)
        return Way(name, SimpleNamespace(estimate=lambda figure: measured), Prediction(step_seconds=seconds))  # type: ignore[arg-type]

    told = strategies_sentence(Strategies("ways", "local", (way("ddp", 1.0), way("fsdp", 2.0))))
    assert told.endswith("Of 1 pair 1 differs clearly, and the planner's ranking of it is right.")
    goal = Objective("step_seconds", "time of a step", "ms", 1000, at_most=True, kinds=("generate",))
    met = Judgement(goal, 1.0, "met", "within", "tiny", "1 rank", study.cells[cell.key], 0.5, (0.4, 0.6))
    assert "is held by 1 of 1 cell (1 rank)" in objectives_sentences([met])[0]


@pytest.mark.parametrize(("predicted", "text"), [(99.999, "+0.0 %"), (104.1, "+4.1 %"), (1e9, "+999,999,900.0 %")])
def test_an_error_of_next_to_nothing_is_not_minus_0(predicted: float, text: str) -> None:
    judged = JudgedPrediction(None, "tokens_per_second", predicted, Estimate(100.0, 100.0, 100.0, 1), None)  # type: ignore[arg-type]
    assert signed(judged) == text


def test_of_many_points_without_a_figure_a_sentence_names_the_first(tmp_path: Path) -> None:
    """Of 59 that ran out of memory the opening of the section had 3,000 characters, and their states lay on another."""
    cells = [generate(num_prompts=8 * size) for size in range(1, 41)]
    swept = [(cell, {"num_prompts": cell.workload.num_prompts}, f"point {place}") for place, cell in enumerate(cells)]  # type: ignore[union-attr]
    tried = [(cell, {"variant": str(place)}, f"variant {place}") for place, cell in enumerate(cells)]
    experiments = [experiment("grid", "sweep", swept), experiment("ways", "optimization", tried)]
    run = write_plan(tmp_path / "run", plan_of(cells, experiments, 1))
    for cell in cells[:2]:
        write_measurements(run, cell, [1.0])
    for cell in cells[2:]:
        write_record(run, cell, status=Status.OUT_OF_MEMORY, failure=FAILED)
    study = load_run(run)
    told = sweep_sentence(sweep(study, study.plan.experiments[0]))
    assert told.endswith("point 5 (out of memory); point 6 (out of memory); 33 more.") and "point 7" not in told
    told = optimization_sentence(*optimization(study, study.plan.experiments[1]))
    assert told.endswith("variant 6 has no figure (out of memory). 33 more variants have no gain.")
    axes = Figure().subplots()
    crosses(axes, [(float(place), "out_of_memory") for place in range(38)])
    assert len(axes.lines) == 38 and len(axes.texts) == 10


def test_of_many_cells_that_hold_an_objective_the_first_are_named(tmp_path: Path) -> None:
    """`a, b and c and 2 more`; and the paper named four cells without a figure as if they were all."""
    cells = [generate(num_prompts=8 * size) for size in range(1, 7)]
    run = write_plan(tmp_path / "run", plan_of(cells, [], 1))
    study = load_run(run)
    goal = Objective("step_seconds", "time of a step", "ms", 1000, at_most=True, kinds=("generate",))
    judged = [
        Judgement(goal, 1.0, "met", "within", "tiny", f"cell {place}", result, 0.5, (0.4, 0.6))
        for place, result in enumerate(study.cells.values())
    ]
    assert "(cell 0, cell 1, cell 2 and 3 more)." in objectives_sentences(judged)[0]
    lost = _threats(study, {"noise": None, "unsteady": None})[0]
    assert lost.startswith("6 cells without a figure: ") and lost.endswith(" and 2 more.")


def test_a_single_choice_needs_no_price(tmp_path: Path) -> None:
    """A study of one cell was told how to find out which choice is cheapest."""
    for count in (1, 2):
        cells = [generate(), generate(dp=2)][:count]
        run = write_plan(tmp_path / str(count), plan_of(cells, [], 1))
        for cell in cells:
            write_measurements(run, cell, [1.0])
        lines = next_lines(decision_of(run), load_run(run).cells.values())
        assert any(line.startswith("Which choice is cheapest") for line in lines) == (count > 1)
