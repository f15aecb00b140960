"""`layouts: auto`: every layout is considered, those predicted best are measured, and nothing is dropped unsaid."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.common.execution import Layout
from configs.hardware.catalog import instance
from configs.hardware.hardware import Machine
from configs.plans.expand import expand
from configs.plans.plan import Plan, PlannedModel
from configs.plans.points.layouts import LayoutChoice
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.spec.study import StudyError, StudySpec, load_study, parse_study, study_yaml
from configs.targets.target import LocalTarget
from configs.workloads.generate import GenerateWorkload
from configs.workloads.train import TrainWorkload
from engine.planner.catalog import find_model
from engine.planner.choice.layouts import by_speed, ranked_layouts, valid_layouts
from tasks.planning.layouts import ranks_at_hand
from tasks.planning.study_plan import make_plan

MODEL = PlannedModel(name="m", identity="synthetic:llama-1m@0", manifest="")
Ranked = Sequence[tuple[Layout, Prediction]]


def study(**changes: Any) -> StudySpec:
    data: dict[str, Any] = {
        "study": "s",
        "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
        "workload": {"kind": "train", "global_batch_size": 8, "sequence_length": 16},
        "layouts": "auto",
    }
    return parse_study(data | changes)


def choice(ranked: Ranked, ranks: int = 4) -> LayoutChoice:
    return LayoutChoice(ranks=lambda target: ranks, ranked=lambda cell, most: ranked)


def said(rate: float, fits: bool = True) -> Prediction:
    return Prediction(tokens_per_second=rate, factor=1.4, fits=fits)


def plan_of(spec: StudySpec, layout_choice: LayoutChoice) -> Plan:
    return expand(spec, [MODEL], {}, lambda workload: 0, layout_choice)


RANKED: Ranked = [
    (Layout(dp=4, strategy="fsdp"), said(500)),
    (Layout(dp=2, pp=2, strategy="ddp"), said(450)),
    (Layout(dp=4, strategy="ddp"), said(400)),
    (Layout(dp=2, strategy="ddp"), said(200)),
    (Layout(), said(100)),
    (Layout(dp=1, tp=4), said(600, fits=False)),
]


def test_the_short_form_is_an_experiment() -> None:
    short = study()
    assert short.experiments["layouts"].kind == "layouts" and short.layouts == "auto"
    also = study(experiments={"s": {"kind": "strong", "grow": "dp", "to": 2}})
    assert list(also.experiments) == ["s", "layouts"]
    own = study(experiments={"layouts": {"kind": "layouts", "best": 1}})
    assert own.experiments["layouts"].model_dump()["best"] == 1
    assert parse_study(yaml.safe_load(study_yaml(short))) == short


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layouts": "all"}, "layouts: unknown value 'all'\n  use one of: auto"),
        ({"experiments": {"layouts": {"kind": "strong", "grow": "dp", "to": 2}}}, "layouts: auto adds an experiment"),
        ({"layouts": None, "experiments": {}}, "experiments: "),
        ({"experiments": {"layouts": {"kind": "layouts", "bset": 2}}}, "experiments.layouts.bset: unknown key"),
        ({"forecast": {"to": 5000}}, "forecast.to: "),
        ({"forecast": {"machin": "aws/p5.48xlarge"}}, "forecast.machin: unknown key (did you mean machine?)"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(StudyError) as caught:
        study(**changes)
    assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems


def test_the_best_that_can_be_measured_are_and_the_others_say_why_not() -> None:
    plan = plan_of(study(experiments={"layouts": {"kind": "layouts", "best": 2}}), choice(RANKED))
    (experiment,) = plan.experiments
    assert [point.label for point in experiment.points] == ["dp=4 (fsdp)", "dp=4 (ddp)"]
    assert [point.baseline for point in experiment.points] == [True, False]
    assert [plan.cells[point.cell].layout.strategy for point in experiment.points] == ["fsdp", "ddp"]
    assert {candidate.label: candidate.reason for candidate in experiment.candidates} == {
        "dp=4 (fsdp)": None,
        "dp=2 x pp=2 (ddp)": "pipeline parallelism is not supported in training",
        "dp=4 (ddp)": None,
        "dp=2 (ddp)": "not among the 2 best predicted",
        "1 rank": "not among the 2 best predicted",
        "tp=4": "does not fit",
    }
    assert [candidate.cell is not None for candidate in experiment.candidates] == [True, False, True, *[False] * 3]
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_a_measured_layout_is_the_cell_that_other_experiments_measure() -> None:
    spec = study(experiments={"s": {"kind": "strong", "grow": "dp", "points": [4]}})
    plan = plan_of(spec, choice(RANKED))
    fastest, second, _ = plan.experiments[1].points
    assert fastest.cell not in {point.cell for point in plan.experiments[0].points}, "that is fsdp"
    assert plan.experiments[0].points[0].cell == second.cell, "ddp is what a strong experiment takes"


def test_generation_gets_work_for_every_rank() -> None:
    seen: list[tuple[Cell, int]] = []

    def ranked(cell: Cell, ranks: int) -> Ranked:
        seen.append((cell, ranks))
        return [(Layout(dp=4), said(2)), (Layout(), said(1))]

    spec = study(workload={"kind": "generate", "new_tokens": 4, "batch_size": 2})
    plan = plan_of(spec, LayoutChoice(ranks=lambda target: 4, ranked=ranked))
    assert {
        cell.workload.num_prompts for cell in plan.cells.values() if isinstance(cell.workload, GenerateWorkload)
    } == {8}
    cell, ranks = seen[0]
    assert cell.layout == Layout() and ranks == 4


@pytest.mark.parametrize(
    ("ranked", "changes", "problem"),
    [
        ([], {}, "no layout of up to 4 ranks is valid"),
        (
            [RANKED[1], RANKED[5]],
            {},
            "none of 2 layouts of up to 4 ranks can be measured: pipeline parallelism is not supported in training",
        ),
        (RANKED, {"workload": {"kind": "noop"}}, "a noop workload does not have"),
    ],
)
def test_nothing_to_measure_is_a_mistake(ranked: Ranked, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(StudyError) as caught:
        plan_of(study(**changes), choice(ranked))
    assert any(problem in line for line in caught.value.problems), caught.value.problems


def node(accelerators: int = 8) -> Machine:
    return instance("aws/p5.48xlarge").model_copy(update={"accelerators": accelerators})


def test_every_valid_layout_is_there_once() -> None:
    model = find_model("llama-2-7b")
    train = Cell(model="m", workload=TrainWorkload(global_batch_size=4, sequence_length=64))
    found = list(valid_layouts(train, model, node(), 4))
    assert len(set(found)) == len(found)
    assert {(one.dp, one.tp, one.pp) for one in found} == {
        (dp, tp, pp) for dp in (1, 2, 4) for tp in (1, 2, 4) for pp in (1, 2, 4) if 4 % (dp * tp * pp) == 0
    }
    assert {one.strategy for one in found if one.dp == 4} == {"ddp", "fsdp", "zero1", "zero2", "zero3"}
    assert {one.strategy for one in found if (one.dp, one.pp) == (2, 2)} == {"ddp", "fsdp", "zero1"}
    assert {one.strategy for one in found if one.dp == 1} == {"none"}
    generate = Cell(model="m", workload=GenerateWorkload(num_prompts=2))
    assert max(one.dp for one in valid_layouts(generate, model, node(), 4)) == 2


def test_the_order_is_that_of_the_prediction() -> None:
    unknown, misfit = Prediction(reason="?"), said(900, fits=False)
    found = [(Layout(dp=2), said(1)), (Layout(dp=3), misfit), (Layout(dp=4), unknown), (Layout(dp=5), said(2))]
    assert [layout.dp for layout, _ in by_speed(found)] == [5, 2, 4, 3]
    cell = Cell(model="m", workload=GenerateWorkload(num_prompts=4))
    rates: Callable[[Cell], Prediction] = lambda cell: said(10 * cell.layout.tp + cell.layout.dp)  # noqa: E731
    assert ranked_layouts(cell, find_model("llama-2-7b"), node(), 4, rates)[0][0] == Layout(tp=4)


def test_an_earlier_ranking_stays(tmp_path: Path) -> None:
    """What a run has taught the planner must not change the order that its records are held against."""
    spec = study(targets=[{"kind": "local", "max_ranks": 2}], forecast={"machine": "aws/p5.48xlarge", "to": 64})
    model = PlannedModel(name="m", identity="gpt2@0", manifest="")
    first = make_plan(spec, [model], {}, tmp_path, tmp_path)
    (experiment,) = first.experiments
    assert experiment.candidates[0].prediction.tokens_per_second
    other = tuple(candidate.model_copy(update={"prediction": said(7)}) for candidate in reversed(experiment.candidates))
    before = first.model_copy(update={"experiments": (experiment.model_copy(update={"candidates": other}),)})
    again = make_plan(spec, [model], {}, tmp_path, tmp_path, before)
    assert {candidate.prediction.tokens_per_second for candidate in again.experiments[0].candidates} == {7}
    changed = study(workload={"kind": "train", "global_batch_size": 16}, targets=[{"kind": "local", "max_ranks": 2}])
    fresh = make_plan(changed, [model], {}, tmp_path, tmp_path, before)
    assert {candidate.prediction.tokens_per_second for candidate in fresh.experiments[0].candidates} != {7}
    assert first.forecast.to == 64 and first.forecast.machine is not None
    assert first.forecast.machine.name == "aws/p5.48xlarge" and first.forecast.machine.accelerator.operators is None


def test_an_instance_that_is_not_known_is_named(tmp_path: Path) -> None:
    spec = study(
        layouts=None, experiments={"w": {"kind": "weak", "grow": "dp", "to": 2}}, forecast={"machine": "aws/p5"}
    )
    with pytest.raises(StudyError, match=r"forecast\.machine: .*aws/p5"):
        make_plan(spec, [MODEL], {}, tmp_path, tmp_path)


def test_a_plan_knows_the_machine_of_its_scaling(tmp_path: Path) -> None:
    spec = study(layouts=None, experiments={"w": {"kind": "weak", "grow": "dp", "to": 2}})
    plan = make_plan(spec, [MODEL], {}, tmp_path, tmp_path)
    assert plan.machines["local"].neighbour is not None
    assert make_plan(spec, [MODEL], {}, tmp_path).machines == {}


def test_layouts_of_another_engine_are_not_ranked_by_our_engine(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"engine transformers is not predicted\. List the layouts in a sweep"):
        make_plan(study(engine="transformers", workload={"kind": "generate"}), [MODEL], {}, tmp_path, tmp_path)


def test_ranks_at_hand() -> None:
    assert ranks_at_hand(LocalTarget(max_ranks=1)) == 1
    assert ranks_at_hand(LocalTarget(cores_per_rank=100_000)) == 1


def test_a_study_file_may_say_it(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("study: s\nworkload: {kind: train}\nmodels: [{id: 'synthetic:llama-1m@0'}]\nlayouts: auto\n")
    assert load_study(path).experiments["layouts"].kind == "layouts"


@pytest.mark.parametrize("name", ["nodes", "tp", "layout.pp", "strategy", "stage_balance"])
def test_a_layout_in_the_base_of_ranked_layouts_is_refused(name: str) -> None:
    """All but `nodes` were dropped without a word, and every layout was ranked and measured."""
    value = {"strategy": "fsdp", "stage_balance": "speed"}.get(name, 2)
    experiments = {"best": {"kind": "layouts", "base": {name: value, "sequence_length": 32}}}
    spec = study(experiments=experiments, layouts=None)
    with pytest.raises(StudyError, match=rf"^experiments\.best\.base\.{name}: determined by the ranked layouts"):
        plan_of(spec, choice(RANKED))
