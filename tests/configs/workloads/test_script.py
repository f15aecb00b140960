"""Fields of a script: what reaches it, what is refused and by which name, and the arithmetic of its tokens."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from configs.plans.expand import expand
from configs.records.rates import MeasurementSamples, rates_of
from configs.spec.cell import Cell
from configs.spec.study import StudyError, StudySpec, parse_study
from configs.workloads import descriptor_of
from configs.workloads.placeholders import arithmetic, filled_text, names_in
from configs.workloads.script import ScriptWorkload


def work(**fields: Any) -> ScriptWorkload:
    return ScriptWorkload(**{"command": ("train.py",), **fields})


def study(**changes: Any) -> StudySpec:
    base = {"kind": "script", "command": ["train.py", "{micro_batch_size}"], "micro_batch_size": 4}
    experiments = changes.pop("experiments", {"weak": {"kind": "weak", "grow": "dp", "to": 2}})
    return parse_study({"study": "s", "workload": base | changes, "experiments": experiments})


@pytest.mark.parametrize(
    ("text", "value"), [("4 * 2 * 1024", 8192), ("max(1, 3) // 2", 1), ("-(2 - 7) % 3", 2), ("1_000 / 8", 125)]
)
def test_arithmetic(text: str, value: float) -> None:
    assert arithmetic(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "2 ** 9",
        "x + 1",
        "1 if 1 else 2",
        "min(1, key=2)",
        "1 / 0",
        "9" * 20,
        "",
        "[1][0]",
        "1" * 500,
        "(" * 90 + "1" + ")" * 90 + "+",
        "True",
        "1 < 2",
        "max()",
    ],
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        arithmetic(text)


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    assert filled_text('{"a": {dp}, "lr": {params.lr}}', {"dp": 2, "params.lr": 3e-4}) == '{"a": 2, "lr": 0.0003}'
    assert names_in("{dp}{params.x}", '{"json": 1}') == {"dp", "params.x"}
    with pytest.raises(KeyError, match="lr"):
        filled_text("{lr}", {})


def test_every_field_of_a_layout_reaches_the_command() -> None:
    chosen = work(
        command=("train.py", "--tp={tp}"),
        arguments={"strategy": {"fsdp": ("--fsdp", "full"), "ddp": ()}},
        params={"a": 1},
    )
    cell = Cell(workload=chosen, layout={"dp": 2, "tp": 2, "strategy": "fsdp"})
    assert isinstance(cell.workload, ScriptWorkload)
    assert cell.workload.argv(cell.workload.values(cell.layout)) == ["train.py", "--tp=2", "--fsdp", "full"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": ()}, "command"),
        ({"command": ("a", "{nope}")}, "workload.command: {nope} is no field of a cell"),
        ({"command": ("a", "{params.lr}")}, "workload.command: {params.lr} has no value: workload.params has nothing"),
        ({"command": ("a", "{micro_batch_size}")}, "workload.micro_batch_size: {micro_batch_size} is used, but"),
        ({"tokens_per_step": "{dp} * 0"}, "workload.tokens_per_step: {dp} * 0 is 0, expected a whole number"),
        (
            {"tokens_per_step": "{nodes} * 8"},
            "workload.tokens_per_step: {nodes} is not known to its arithmetic\n  use one of: dp, tp, pp",
        ),
        ({"tokens_per_step": "open('x')"}, "workload.tokens_per_step: got"),
        ({"tokens_per_step": 4, "items_per_step": 4}, "workload.items_per_step: mutually exclusive"),
        ({"items_per_step": 4}, "workload.unit: required with items_per_step"),
        ({"measure": "lines"}, "workload.lines.pattern or preset: required by measure lines"),
        ({"measure": "json"}, "workload.json_figures.figures: required by measure json"),
        (
            {"json_figures": {"figures": {"a": "b"}}},
            "workload.measure: got probe, but json_figures are given. Use json",
        ),
        ({"tensorboard": {"tag": "a"}}, "workload.measure: got probe, but tensorboard is given. Use tensorboard"),
        ({"measure": "wall", "stop_after": {"steps": 3}}, "workload.stop_after.steps: measure wall counts no steps"),
        ({"stop_after": {}}, "expected either steps or minutes"),
        ({"templates": ("a.yaml",)}, "workload.templates: a.yaml: expected a name that ends in .j2"),
        ({"config_files": {"../x.json": {}}}, "expected a relative name that ends in .json or .yaml"),
        (
            {"environment": {"HF_TOKEN": "hf_abcdefghijklmnopqrstuv"}},
            "workload.environment.HF_TOKEN: looks like a secret",
        ),
        ({"environment": {"URL": "https://u:pw@host/"}}, "workload.environment.URL: looks like a secret"),
        ({"measure": "lines", "lines": {"pattern": "("}}, "not a regular expression"),
        ({"measure": "lines", "lines": {"pattern": "step"}}, "has no named group"),
        (
            {"measure": "lines", "lines": {"pattern": r"peak (?P<peak_memory_bytes>\d+)"}},
            "group peak_memory_bytes: is a figure that Rankwise measures itself. Use another name",
        ),
        (
            {"measure": "json", "json_figures": {"figures": {"device": "torch.device"}}},
            "device: is a figure that Rankwise measures itself. Use another name, such as own_device",
        ),
        (
            {"measure": "lines", "lines": {"pattern": "(?P<a>x)", "units": {"b": "ms"}}},
            "units.b: the pattern has no such",
        ),
    ],
)
def test_refusals_name_their_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Cell(workload=work(**fields))
    assert message in str(caught.value)


def planned(spec: StudySpec) -> list[Cell]:
    return list(expand(spec, [], {}, lambda _: 0).cells.values())


def test_strong_scaling_asks_for_equal_work() -> None:
    strong = {"strong": {"kind": "strong", "grow": "dp", "to": 2}}
    with pytest.raises(StudyError, match=r"workload.tokens_per_step: got 4,096 at 1 rank, 8,192 at 2 ranks"):
        planned(study(tokens_per_step="{micro_batch_size} * {dp} * 1024", experiments=strong))
    with pytest.raises(StudyError, match=r"workload.tokens_per_step: required by strong scaling"):
        planned(study(experiments=strong))
    assert len(planned(study(tokens_per_step=4096, experiments=strong))) == 2


def test_params_are_swept_by_dotted_names_and_share_no_state() -> None:
    swept = {"lr": {"kind": "sweep", "over": {"params.lr": [1e-4, 3e-4], "workload.params.b": [1, 2]}}}
    cells = planned(study(command=["t.py", "{params.lr}", "{params.b}"], params={"keep": 7}, experiments=swept))
    assert [cell.workload.model_dump()["params"] for cell in cells] == [
        {"keep": 7, "lr": lr, "b": b} for lr in (1e-4, 3e-4) for b in (1, 2)
    ]
    assert len({cell.key for cell in cells}) == 4


def test_each_cell_has_a_launch_of_its_own() -> None:
    keys = {Cell(workload=work(params={"a": value})).pack_key for value in range(3)}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("fields", "unit", "throughput"),
    [
        ({}, "token", "tokens_per_second"),
        ({"measure": "wall"}, "step", "items_per_second"),
        ({"measure": "wall", "tokens_per_step": 5}, "token", "tokens_per_second"),
        ({"items_per_step": 5, "unit": "sample"}, "sample", "items_per_second"),
        ({"measure": "lines", "preset": "torchtitan"}, "token", "tokens_per_second"),
        ({"measure": "hf_trainer"}, "step", "items_per_second"),
    ],
)
def test_the_unit_is_what_the_source_counts(fields: dict[str, Any], unit: str, throughput: str) -> None:
    known = descriptor_of(work(**fields))
    assert (known.unit, known.throughput) == (unit, throughput)


def test_rates_combine_ranks_and_cut_to_the_fewest_steps() -> None:
    samples = {
        "0/step_seconds": [1.0, 2.0, 9.0],
        "0/step_units": [10.0, 10.0, 9.0],
        "1/step_seconds": [2.0, 1.0],
        "1/step_units": [30.0, 30.0],
    }
    for combine, tokens in (("sum", 80.0), ("max", 60.0), ("rank_0", 20.0)):
        cell = Cell(workload=work(combine=combine), layout={"dp": 2})
        arrays = {name: np.array(column) for name, column in samples.items()}
        rates = rates_of(MeasurementSamples(cell, arrays), {})
        assert (rates.wall_seconds, rates.passes, rates.tokens_per_second) == (4.0, 2, tokens / 4)
