"""A study file is checked whole, at the border, with the dotted field and what would have worked."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.plans.expand import expand
from configs.plans.plan import Plan, PlannedModel
from configs.spec.study import StudyError, load_study, study_yaml
from configs.workloads.generate import GenerateWorkload
from reports.numbers.statistics import LEAST_REPEATS

MODEL = PlannedModel(name="m", identity="synthetic:llama-1m@0", manifest="unused")


def study(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "study": "s",
        "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
        "workload": {"kind": "generate", "new_tokens": 4},
        "experiments": {"batch": {"kind": "sweep", "over": {"batch_size": [1, 2]}}},
    }
    return data | changes


def write(folder: Path, data: Any) -> Path:
    path = folder / "study.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def plan_of(folder: Path, data: Any, *assignments: str) -> Plan:
    return expand(load_study(write(folder, data), list(assignments)), [MODEL], {}, lambda workload: 5)


BAD = {
    "unknown key": (study(foo=1), "foo: unknown key"),
    "misspelt key": (study(measuring={"repeat": 3}), "measuring.repeat: unknown key (did you mean repeats?)"),
    "wrong type": (study(pack="perhaps"), "pack: input should be a valid boolean"),
    "nested wrong type": (study(workload={"kind": "generate", "new_tokens": "x"}), "workload.new_tokens: "),
    "negative": (study(measuring={"repeats": -1}), "measuring.repeats: input should be greater than 0, got -1"),
    "zero": (study(workload={"kind": "generate", "batch_size": 0}), "workload.batch_size: input should be greater"),
    "no experiments": (study(experiments={}), "experiments: expected at least 1 entry, got none"),
    "no values": (
        study(experiments={"s": {"kind": "sweep", "over": {"dp": []}}}),
        "experiments.s.over.dp: expected at least 1 entry, got none",
    ),
    "too many files": (
        study(workload={"kind": "script", "command": ["true"], "inputs": ["f"] * 101}),
        "workload.inputs: expected at most 100 entries, got 101",
    ),
    "kind missing": (
        study(workload={"new_tokens": 1}),
        "workload: kind is missing\n  use one of: generate, seq2seq, encode, train, serve, script, noop, communication",
    ),
    "unknown kind": (study(workload={"kind": "sing"}), "workload: kind: unknown value 'sing'\n  use one of: gen"),
    "axis": (
        study(experiments={"s": {"kind": "strong", "grow": "nodse", "to": 2}}),
        "experiments.s.grow: unknown axis 'nodse'\n  use one of: dp, tp, pp, nodes",
    ),
    "axis of a cluster": (
        study(experiments={"s": {"kind": "strong", "grow": "nodes", "to": 2}}),
        "experiments.s.grow: target local is this machine, a single node\n  use one of: dp, tp, pp",
    ),
    "field of a sweep": (
        study(experiments={"b": {"kind": "sweep", "over": {"batchsize": [1]}}}),
        "experiments.b.over.batchsize: unknown field of a cell (did you mean batch_size?)",
    ),
    "value of a sweep": (
        study(experiments={"b": {"kind": "sweep", "over": {"batch_size": [1, -4]}}}),
        "experiments.b at batch_size -4: workload.batch_size: ",
    ),
    "model of an experiment": (
        study(experiments={"b": {"kind": "sweep", "models": ["n"], "over": {"batch_size": [1]}}}),
        "experiments.b.models: unknown model 'n'",
    ),
    "two models of a name": (study(models=[{"id": "a/m"}, {"id": "b/m"}]), "models: duplicate name m"),
    # It was dropped without a word, and `grow: pp` measured stages balanced by memory.
    "balance of one stage": (
        study(layout={"stage_balance": "speed"}, experiments={"s": {"kind": "strong", "grow": "pp", "to": 2}}),
        "layout.stage_balance: speed has no effect with one stage. Set pp here too, or stage_balance in the `base` of",
    ),
    "batch that cannot be shared": (
        study(
            workload={"kind": "train", "global_batch_size": 3},
            experiments={"s": {"kind": "strong", "grow": "dp", "to": 2}},
        ),
        "workload.global_batch_size: 3 is not divisible by dp=2. Use a multiple of 2",
    ),
    "one field twice": (
        study(experiments={"b": {"kind": "sweep", "over": {"batch_size": [1, 2], "workload.batch_size": [1, 2]}}}),
        "experiments.b.over.workload.batch_size: the same field as batch_size. Name it once",
    ),
    "one degree twice": (
        study(experiments={"b": {"kind": "sweep", "over": {"layout.tp": [1, 2], "tp": [1, 2]}}}),
        "experiments.b.over.tp: the same field as layout.tp. Name it once",
    ),
    "a part and its field": (
        study(
            experiments={
                "b": {
                    "kind": "optimization",
                    "variants": {"v": {"batch_size": 2, "workload": {"kind": "generate", "batch_size": 4}}},
                }
            }
        ),
        "experiments.b.variants.v.batch_size: the same field as workload. Name it once",
    ),
    "a part that has no fields": (
        study(experiments={"b": {"kind": "sweep", "base": {"layout": 3}, "over": {"batch_size": [1]}}}),
        "experiments.b.base.layout: expected a mapping of fields to values, got 3",
    ),
    "a layout with another field": (
        study(experiments={"b": {"kind": "weak", "grow": "dp", "to": 2, "base": {"layout": {"cp": 2}}}}),
        "experiments.b: layout.cp: unknown key",
    ),
    "a word that YAML reads as false": (
        "study: no\nworkload: {kind: generate}\nexperiments: {a: {kind: strong, grow: tp, to: 2}}",
        "study: expected text, got false: unquoted, yes, no, on and off mean true or false. Use quotes",
    ),
    "a word that YAML reads as true for a number": (
        study(measuring={"repeats": True}),
        "measuring.repeats: expected a number, got true: unquoted, yes, no, on and off mean true or false",
    ),
    "the same in a sweep": (
        study(workload={"kind": "noop"}, experiments={"b": {"kind": "sweep", "over": {"items": [True, 2]}}}),
        "experiments.b at items true: workload.items: expected a number, got true",
    ),
    "the same of nodes": (
        study(workload={"kind": "noop"}, experiments={"b": {"kind": "sweep", "over": {"nodes": [True]}}}),
        "nodes: expected a number, got true",
    ),
    "the same of layouts": (
        study(experiments={"b": {"kind": "sweep", "over": {"layout": [{"tp": True}]}}}),
        "layout.tp: expected a number, got true",
    ),
    "a number as text": (study(study=7), "study: expected text, got 7. Use quotes"),
    "a date in a sweep": (
        study(
            experiments={"b": {"kind": "sweep", "over": {"workload": [{"kind": "noop", "label": date(2026, 1, 1)}]}}}
        ),
        "workload.label: expected text, got a date. Use quotes",
    ),
    "a name with a space": (study(study="my study"), "study: got 'my study', expected up to 100 letters, digits, "),
    "a section without a value": (study(measuring=None), "measuring: has no value. Write one, or remove the key if"),
    "a list for a mapping": (study(experiments=[1]), "experiments: expected a mapping of keys to values, got a list"),
    "a text for a section": (study(measuring="fast"), "measuring: expected a mapping of keys to values, got 'fast'"),
    "a mapping for a list": (study(models={"id": "a/m"}), "models: expected a list, got a mapping"),
    "a text for a list": (study(targets="local"), "targets: expected a list, got 'local'"),
    "nothing": ("# all of it is a comment", "study.yaml: expected a mapping of keys to values, got an empty file"),
    "ranks beyond any machine": (
        study(layout={"dp": 10**12}),
        "layout.dp: input should be less than or equal to 65536",
    ),
    "control characters": (study(study="a\x1b[31m"), "study: contains the control character \\x1b"),
    "not YAML": ("study: [a\n b: c", "not YAML: line 2, column 3"),
    "key twice": ("study: a\nstudy: b", "duplicate key 'study'"),
    "not a mapping": ("- a", "expected a mapping of keys to values, got list"),
    "name that is a path": (study(study="../elsewhere"), "study: "),
}


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD.keys())
def test_a_mistake_is_named_with_its_field(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(StudyError) as caught:
        plan_of(tmp_path, data)
    assert message in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "base", "problem"),
    [
        ({"steps": 4, "min_period_seconds": 3}, {}, "workload.steps: mutually exclusive"),
        (
            {},
            {"reference_batch_size": 4},
            "experiments.b: workload.learning_rate_scaling: requires reference_batch_size",
        ),
    ],
)
def test_two_fields_that_do_not_agree_are_placed_once(
    tmp_path: Path, fields: dict[str, Any], base: dict[str, Any], problem: str
) -> None:
    grown = {"kind": "strong", "grow": "dp", "to": 2, "base": base}
    with pytest.raises(StudyError) as caught:
        plan_of(tmp_path, study(workload={"kind": "train", **fields}, experiments={"b": grown}))
    [found] = caught.value.problems
    assert found.startswith(problem)


def test_a_check_of_a_whole_list_is_placed_once(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"\Amodels: duplicate name m\."):
        plan_of(tmp_path, study(models=[{"id": "a/m"}, {"id": "b/m"}]))


def test_an_experiment_without_models_is_told_where_it_has_none(tmp_path: Path) -> None:
    swept = {"kind": "sweep", "models": [], "over": {"batch_size": [1]}}
    with pytest.raises(StudyError, match=r"\Aexperiments\.b\.models: got none, but kind generate requires a model"):
        plan_of(tmp_path, study(experiments={"b": swept}))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(StudyError) as caught:
        plan_of(tmp_path, study(foo=1, measuring={"repeats": 0, "warmup": -1}))
    assert len(caught.value.problems) == 3


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="No such file"):
        load_study(tmp_path / "none.yaml")


def test_assignments_reach_into_the_study(tmp_path: Path) -> None:
    path = write(tmp_path, study())
    changed = load_study(path, ["measuring.repeats=3", "workload.new_tokens=9", "models.0.name=other", "pack=false"])
    assert isinstance(changed.workload, GenerateWorkload)
    assert (changed.measuring.repeats, changed.workload.new_tokens) == (3, 9)
    assert (changed.models[0].name, changed.pack) == ("other", False)


@pytest.mark.parametrize(
    ("workload", "rules", "message"),
    [
        ({"kind": "train", "steps": 3}, {"warmup": 3}, "workload.steps: 3 leaves none to measure after measuring"),
        (
            {"kind": "script", "command": ["python", "train.py"], "stop_after": {"steps": 1}},
            {},
            "workload.stop_after.steps: 1 leaves none to measure after measuring.warmup of 1. Use at least 2",
        ),
        (
            {"kind": "script", "command": ["python", "train.py"], "stop_after": {"steps": 9}, "warmup_steps": 9},
            {},
            "workload.stop_after.steps: 9 leaves none to measure after workload.warmup_steps of 9. Use at least 10",
        ),
    ],
)
def test_steps_that_are_all_warmup_are_refused(
    tmp_path: Path, workload: dict[str, Any], rules: dict[str, Any], message: str
) -> None:
    alone = {"alone": {"kind": "sweep", "over": {"layout.dp": [1]}}}
    data = study(workload=workload, measuring=rules, experiments=alone)
    with pytest.raises(StudyError, match=message):
        plan_of(tmp_path, data)
    with_more = {"steps": 4} if workload["kind"] == "train" else {"stop_after": {"steps": 11}}
    assert plan_of(tmp_path, data | {"workload": workload | with_more}).cells


def test_a_warm_up_of_the_learning_rate_that_training_does_not_reach_is_refused(tmp_path: Path) -> None:
    """The record named a rate that no step had."""
    alone = {"alone": {"kind": "sweep", "over": {"steps": [50, 5]}}}
    work = {"kind": "train", "learning_rate_warmup_steps": 20}
    data = study(workload=work, experiments=alone)
    message = r"learning_rate_warmup_steps: got 20, more than the 5 steps of training, .* at most 5, or more steps"
    with pytest.raises(StudyError, match=message):
        plan_of(tmp_path, data)
    assert plan_of(tmp_path, data | {"workload": work | {"learning_rate_warmup_steps": 5}}).cells
    unknown = {"alone": {"kind": "sweep", "over": {"layout.dp": [1]}}}
    assert plan_of(tmp_path, data | {"experiments": unknown}).cells, "how many steps there will be is not known"


@pytest.mark.parametrize("assignment", ["measuring", "models.7.name=x", "study.a.b=1", "pack=[1"])
def test_a_bad_assignment_is_refused(tmp_path: Path, assignment: str) -> None:
    with pytest.raises(StudyError, match="--set"):
        load_study(write(tmp_path, study()), [assignment])


def test_strong_scaling_holds_the_total_work(tmp_path: Path) -> None:
    experiments = {"s": {"kind": "strong", "grow": "dp", "to": 4, "base": {"batch_size": 2}}}
    plan = plan_of(tmp_path, study(experiments=experiments))
    cells = [plan.cells[point.cell] for point in plan.experiments[0].points]
    assert [cell.layout.dp for cell in cells] == [1, 2, 4]
    assert {cell.workload.num_prompts for cell in cells} == {8}  # type: ignore[union-attr]
    assert [point.baseline for point in plan.experiments[0].points] == [True, False, False]


@pytest.mark.parametrize(("file", "prompts"), [(None, [2, 4, 16]), ("p.jsonl", [5, 5, 16])])
def test_prompts_follow_from_the_batch_and_the_replicas_where_no_number_is_given(
    tmp_path: Path, file: str | None, prompts: list[int]
) -> None:
    # A sweep, a layout and a compression of two replicas were refused: "num_prompts: got 1, fewer than replicas".
    # A variant had the number of the baseline: "batch 8" was measured on the one prompt that fills a batch of 1.
    # A file of 5 prompts gave batches of 5 that were called batches of 8, and could be recommended as such.
    sizes: list[dict[str, Any]] = [{"dp": 1, "batch_size": 2}, {"dp": 2, "batch_size": 2}, {"dp": 2, "batch_size": 8}]
    workload = {"kind": "generate", "new_tokens": 4, "prompts": file}
    variants = {f"v{number}": size for number, size in enumerate(sizes)}
    experiments: dict[str, Any] = {
        "s": {"kind": "sweep", "over": {"batch_size": [2]}, "base": {"dp": 1}},
        "t": {"kind": "sweep", "over": {"batch_size": [2, 8]}, "base": {"dp": 2}},
        "o": {"kind": "optimization", "variants": variants},
        "c": {"kind": "compression", "baseline": {"dp": 2, "batch_size": 8}, "passes": ["int8"]},
    }
    plan = plan_of(tmp_path, study(workload=workload, experiments=experiments))
    found = {
        experiment.name: [
            cell.workload.num_prompts
            for point in experiment.points
            if isinstance((cell := plan.cells[point.cell]).workload, GenerateWorkload) and not cell.workload.answers
        ]
        for experiment in plan.experiments
    }
    assert found["s"] + found["t"] == prompts and found["o"][1:] == prompts and found["c"] == [prompts[2]] * 2


@pytest.mark.parametrize(("kind", "prompts"), [("strong", [8, 8]), ("weak", [8, 16])])
def test_scaling_over_a_short_file_fills_the_batch_of_its_baseline(
    tmp_path: Path, kind: str, prompts: list[int]
) -> None:
    workload = {"kind": "generate", "new_tokens": 4, "prompts": "p.jsonl", "batch_size": 8}
    plan = plan_of(tmp_path, study(workload=workload, experiments={"s": {"kind": kind, "grow": "dp", "to": 2}}))
    assert [cell.workload.num_prompts for cell in plan.cells.values()] == prompts  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("experiment", "problem"),
    [
        (
            {"kind": "sweep", "over": {"batch_size": [1, 16]}},
            "at batch_size 16: .* got 4, too few to fill a batch of 16. ",
        ),
        (
            {"kind": "sweep", "over": {"dp": [1, 2], "batch_size": [2, 4]}},
            "a batch of 4 on each of 2 replicas. .* 8, or",
        ),
        ({"kind": "optimization", "variants": {"v": {"batch_size": 3, "dp": 2}}}, "variants.v: .* Use at least 6, or"),
        ({"kind": "strong", "grow": "dp", "to": 2, "base": {"batch_size": 5}}, "got 4, too few to fill a batch of 5. "),
    ],
)
def test_a_batch_that_the_prompts_never_fill_is_refused(
    tmp_path: Path, experiment: dict[str, Any], problem: str
) -> None:
    # A sweep to batch 16 over 4 prompts showed and recommended "batch 16"; what ran were batches of 4.
    workload = {"kind": "generate", "new_tokens": 4, "num_prompts": 4}
    with pytest.raises(StudyError, match=problem):
        plan_of(tmp_path, study(workload=workload, experiments={"s": experiment}))


def test_scaling_and_layouts_may_share_a_batch_out(tmp_path: Path) -> None:
    workload = {"kind": "generate", "new_tokens": 4, "num_prompts": 4, "batch_size": 4}
    for experiment in ({"kind": "strong", "grow": "dp", "to": 2}, {"kind": "sweep", "over": {"dp": [1, 2]}}):
        assert len(plan_of(tmp_path, study(workload=workload, experiments={"s": experiment})).cells) == 2


def test_fewer_prompts_than_replicas_are_refused(tmp_path: Path) -> None:
    swept, scaled = {"kind": "sweep", "over": {"dp": [8]}}, {"kind": "strong", "grow": "dp", "points": [1, 8]}
    target = {"kind": "slurm", "name": "g", "nodes": 1, "ranks_per_node": 8}
    for more, experiment in (({"num_prompts": 5}, swept), ({"prompts": "p.jsonl"}, scaled)):
        workload, experiments = {"kind": "generate", "new_tokens": 4, **more}, {"s": experiment}
        with pytest.raises(StudyError, match=r"workload.num_prompts: got 5, fewer than replicas \(dp=8\)"):
            plan_of(tmp_path, study(workload=workload, experiments=experiments, targets=[target]))


def test_weak_scaling_holds_the_work_of_a_rank(tmp_path: Path) -> None:
    for workload, field, totals in [
        ({"kind": "generate", "num_prompts": 3}, "num_prompts", [3, 6]),
        ({"kind": "seq2seq", "num_prompts": 3}, "num_prompts", [3, 6]),
        ({"kind": "encode", "num_prompts": 2}, "num_prompts", [2, 4]),
        ({"kind": "train", "global_batch_size": 4}, "global_batch_size", [4, 8]),
        ({"kind": "noop", "items": 2}, "items", [2, 4]),
    ]:
        experiments = {"w": {"kind": "weak", "grow": "dp", "to": 2}}
        plan = plan_of(tmp_path, study(workload=workload, experiments=experiments))
        assert [getattr(plan.cells[p.cell].workload, field) for p in plan.experiments[0].points] == totals


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_each_replica_has_a_full_batch_whatever_grows(tmp_path: Path, kind: str) -> None:
    experiments = {"w": {"kind": kind, "grow": "tp", "points": [1, 2]}}
    plan = plan_of(
        tmp_path, study(workload={"kind": "generate", "batch_size": 3}, layout={"dp": 4}, experiments=experiments)
    )
    works = [plan.cells[point.cell].workload for point in plan.experiments[0].points]
    assert [work.sequences for work in works] == ([12, 24] if kind == "weak" else [24, 24])


@pytest.mark.parametrize("given", ["6", 6.0, 6])
def test_a_number_of_an_experiments_base_counts_however_it_is_written(tmp_path: Path, given: Any) -> None:
    experiments: list[dict[str, Any]] = [
        {"kind": "weak", "grow": "dp", "to": 2, "base": {"num_prompts": given}},
        {"kind": "correctness", "base": {"batch_size": given, "new_tokens": given}},
        {"kind": "compression", "baseline": {"num_prompts": given}, "passes": ["int8"]},
    ]
    plans = [plan_of(tmp_path, study(experiments={"e": each})) for each in experiments]
    weak, right, small = ([plan.cells[point.cell].workload for point in plan.experiments[0].points] for plan in plans)
    assert [work.sequences for work in weak] == [6, 12]
    assert all(work.keeps_answers for work in right)
    assert [work.size_of_pass(1) for work in right] == [(1, None, 6), (6, None, 6)]
    assert {work.sequences for work in small} == {6}


@pytest.mark.parametrize("given", ["many", [1], 0, -1, 1.5])
@pytest.mark.parametrize("field", ["batch_size", "num_prompts", "new_tokens", "prompt_tokens"])
@pytest.mark.parametrize("kind", ["weak", "correctness", "compression"])
def test_a_wrong_number_of_an_experiments_base_is_named(tmp_path: Path, kind: str, field: str, given: Any) -> None:
    scaling = {"grow": "dp", "to": 2} if kind == "weak" else {}
    experiments = {"e": {"kind": kind, "base": {field: given}} | scaling}
    with pytest.raises(StudyError) as caught:
        plan_of(tmp_path, study(experiments=experiments))
    [problem] = caught.value.problems
    said = "expected a number, got a list" if given == [1] else "input should be "
    assert problem.startswith(f"experiments.e: workload.{field}: {said}"), problem
    assert problem.endswith(f", got {given!r}") or given == [1], problem


def test_several_precisions_of_a_compressions_baseline_are_refused(tmp_path: Path) -> None:
    experiments = {"e": {"kind": "compression", "baseline": {"dtype": ["float32", "bfloat16"]}}}
    with pytest.raises(StudyError, match=r"^experiments.e: dtype: unknown value \['float32', 'bfloat16'\]"):
        plan_of(tmp_path, study(experiments=experiments))


def test_a_degree_that_is_no_power_of_two_is_a_point(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, study(experiments={"s": {"kind": "strong", "grow": "dp", "to": 6}}))
    assert [point.values["ranks"] for point in plan.experiments[0].points] == [1, 2, 4, 6]


def test_a_sweep_is_every_combination(tmp_path: Path) -> None:
    over = {"batch_size": [1, 2], "dtype": ["float32", "bfloat16"], "workload.new_tokens": [4, 8, 16]}
    plan = plan_of(tmp_path, study(experiments={"b": {"kind": "sweep", "over": over}}))
    assert len(plan.cells) == 12
    assert plan.experiments[0].points[0].values == {"batch_size": 1, "dtype": "float32", "workload.new_tokens": 4}


def test_experiments_share_the_cells_that_they_have_in_common(tmp_path: Path) -> None:
    experiments = {
        "batch": {"kind": "sweep", "base": {"num_prompts": 4}, "over": {"batch_size": [1, 2]}},
        "gain": {"kind": "optimization", "baseline": {"num_prompts": 4}, "variants": {"two": {"batch_size": 2}}},
    }
    plan = plan_of(tmp_path, study(experiments=experiments))
    assert len(plan.cells) == 2
    assert [point.cell for point in plan.experiments[0].points] == [point.cell for point in plan.experiments[1].points]


def test_correctness_names_transformers_as_its_reference_and_is_reached_once(tmp_path: Path) -> None:
    experiments = {"c": {"kind": "correctness", "prompts": 20, "layouts": [{}, {"tp": 2}], "dtypes": ["bfloat16"]}}
    plan = plan_of(tmp_path, study(experiments=experiments))
    reference, *candidates = [plan.cells[point.cell] for point in plan.experiments[0].points]
    assert (reference.engine, reference.dtype, reference.layout.ranks) == ("transformers", "float32", 1)
    assert isinstance(reference.workload, GenerateWorkload)
    assert reference.workload.noise_dtypes == ("bfloat16", "float32")
    # In 16 bits a small defect can hide in rounding: what is checked there is checked in float32 too.
    assert [(cell.dtype, cell.layout.tp) for cell in candidates] == [
        ("bfloat16", 1),
        ("float32", 1),
        ("bfloat16", 2),
        ("float32", 2),
    ]
    assert set(plan.repeats.values()) == {1}


@pytest.mark.parametrize("kind", ["seq2seq", "encode"])
def test_answers_of_every_prompted_workload_are_judged(tmp_path: Path, kind: str) -> None:
    experiments = {"c": {"kind": "correctness", "prompts": 5, "new_tokens": 3, "base": {"compression": "int8"}}}
    plan = plan_of(tmp_path, study(workload={"kind": kind}, experiments=experiments))
    reference, candidate = [plan.cells[point.cell] for point in plan.experiments[0].points]
    assert (reference.engine, reference.compression, candidate.compression) == ("transformers", (), ("int8",))
    assert reference.workload.answers and candidate.workload.answers  # type: ignore[union-attr]
    assert getattr(candidate.workload, "new_tokens", 3) == 3
    assert set(plan.repeats.values()) == {1}


def test_the_shipped_studies_are_sound(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    paths = [path for folder in ("configs", "benchmarks") for path in (root / folder / "studies").glob("*.yaml")]
    assert len(paths) > 12
    for path in paths:
        loaded = load_study(path)
        assert load_study(write(tmp_path, study_yaml(loaded))) == loaded
        models = [PlannedModel(name=model.name, identity=model.id, manifest="unused") for model in loaded.models]
        assert expand(loaded, models, {}, lambda workload: 20).cells, path.name


def test_the_quickstart_covers_what_it_promises() -> None:
    loaded = load_study(Path(__file__).parents[3] / "configs" / "studies" / "quickstart.yaml")
    models = [PlannedModel(name=model.name, identity=model.id, manifest="unused") for model in loaded.models]
    plan = expand(loaded, models, {}, lambda workload: 20)
    assert len(plan.cells) >= 12
    assert {experiment.kind for experiment in plan.experiments} == {
        "strong",
        "weak",
        "sweep",
        "optimization",
        "correctness",
    }
    assert {cell.layout.ranks for cell in plan.cells.values()} == {1, 2}
    assert loaded.measuring.repeats >= LEAST_REPEATS, "its report has intervals"


@pytest.mark.parametrize(
    "lengths", [{"distribution": "uniform", "low": 1, "high": 9}, {"distribution": "lognormal", "mean": 9}]
)
def test_a_distribution_of_lengths_is_written_so_that_it_is_read_again(tmp_path: Path, lengths: dict[str, Any]) -> None:
    served = study(workload={"kind": "serve", "new_tokens": lengths}, experiments={"l": {"kind": "load", "rate": 1}})
    loaded = load_study(write(tmp_path, served))
    assert load_study(write(tmp_path, study_yaml(loaded))) == loaded


@pytest.mark.parametrize(
    ("lengths", "problem"),
    [
        ({"low": 1, "high": 9}, "distribution is missing"),
        ({"distribution": "normal", "mean": 9}, "distribution: unknown value 'normal'"),
    ],
)
def test_a_length_of_no_distribution_is_told_which_there_are(
    tmp_path: Path, lengths: dict[str, Any], problem: str
) -> None:
    served = study(workload={"kind": "serve", "new_tokens": lengths})
    with pytest.raises(StudyError) as caught:
        load_study(write(tmp_path, served))
    assert caught.value.problems == [f"workload.new_tokens: {problem}\n  use one of: uniform, lognormal"]
    experiments = {"e": {"kind": "load", "base": {"new_tokens": lengths}}}
    with pytest.raises(StudyError) as caught:
        plan_of(tmp_path, study(workload={"kind": "serve"}, experiments=experiments))
    assert caught.value.problems == [f"experiments.e: workload.new_tokens: {problem}\n  use one of: uniform, lognormal"]


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ({"new_tokens": "1e3"}, ["new_tokens: input should be a valid integer, unable to parse string as an integer"]),
        ({"new_tokens": 0}, ["new_tokens: input should be greater than 0, got 0"]),
        ({"new_tokens": [4]}, ["new_tokens: expected a number, got a list"]),
        (
            {"new_tokens": {"distribution": "uniform", "low": 1, "hi": 9}},
            ["new_tokens.high: is missing", "new_tokens.hi: unknown key (did you mean high?)"],
        ),
        (
            {"new_tokens": {"distribution": "lognormal", "mean": 9, "max": 3}},
            ["new_tokens: mean: got 9, more than max (3)"],
        ),
        ({"engine_options": {"int": None}}, ["engine_options.int: has no value"]),
        ({"engine_options": {"a": ["x"]}}, ["engine_options.a: expected text, got a list"]),
        ({"engine_options": {"a": date(2026, 11, 1)}}, ["engine_options.a: expected text, got a date. Use quotes"]),
    ],
)
def test_a_field_with_alternatives_has_one_problem_without_their_names(
    tmp_path: Path, given: dict[str, Any], problems: list[str]
) -> None:
    with pytest.raises(StudyError) as caught:
        load_study(write(tmp_path, study(workload={"kind": "serve"} | given)))
    found = caught.value.problems
    assert len(found) == len(problems), found
    assert all(one.startswith(f"workload.{problem}") for one, problem in zip(found, problems, strict=True)), found
    with pytest.raises(StudyError) as caught:
        plan_of(tmp_path, study(workload={"kind": "serve"}, experiments={"e": {"kind": "load", "base": given}}))
    assert caught.value.problems == [f"experiments.e: {one}" for one in found]
