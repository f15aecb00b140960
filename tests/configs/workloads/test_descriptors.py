"""Each kind of workload is described in full, its descriptor tells the truth, and nothing else dispatches on kinds."""

import ast
import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from configs.common.execution import Engine, Layout
from configs.plans.prediction import Prediction
from configs.records.rates import Rates
from configs.spec.cell import Cell
from configs.spec.engines import TEXT_ONLY
from configs.workloads import DESCRIPTORS, STUDIED, AnyWorkload, descriptor_of, kinds_with
from configs.workloads.descriptor import Axis, Descriptor
from configs.workloads.prompted import PromptedWorkload

ROOT = Path(__file__).parents[3]
FOLDERS = ("configs", "engine", "slurm", "reports", "tasks", "flows")
CLASSES = {known.model.__name__ for known in DESCRIPTORS.values()} | {PromptedWorkload.__name__}

OWN = {
    "configs/workloads/": "every kind",
    "engine/workloads/": "every kind",
    "engine/api/inference_benchmark.py": "generate",
    "engine/prompts/pooling.py": "encode",
    "engine/prompts/tokens.py": "the kinds that take prompts",
    "engine/correctness/noise.py": "the kinds that take prompts",
    "engine/peers/reference.py": "the kinds that take prompts",
    "engine/tools/export.py": "the kinds that take prompts",
    "engine/peers/": "the kinds that take prompts",
    "engine/serving/rank.py": "generate",
    "flows/cli/serving/command.py": "generate",
    "reports/experiments/load/experiment.py": "serve",
    "reports/load/records.py": "serve",
    "engine/training/": "train",
    "engine/planner/trained_cells.py": "train",
    "engine/planner/choice/launchers.py": "train",
    "engine/planner/choice/script_files.py": "script",
    "engine/scripts/": "script",
    "tasks/planning/script_inputs.py": "script",
    "reports/training/equality.py": "train",
    "reports/training/strategies.py": "train",
    "tasks/checks/node_checks.py": "preflight",
}
"""Beginnings of the paths of modules that belong to a kind, or to a family of them."""

ALLOWED = {
    "configs/families/checkpoint.py": (1, "the workloads of each kind of model"),
    "configs/plans/expand.py": (2, "what a saved reference answered"),
    "configs/plans/plan.py": (2, "the experiment `communication`"),
    "configs/plans/points/answered.py": (6, "how much of a workload with prompts is answered"),
    "configs/plans/points/answers.py": (1, "what a saved reference answered"),
    "configs/plans/points/builder.py": (3, "counts the prompts of a file"),
    "configs/plans/points/grids.py": (1, "the experiment `communication`"),
    "configs/spec/experiments.py": (1, "the sizes of the experiment `communication`"),
    "configs/spec/form.py": (1, "what a new form is filled in with"),
    "configs/spec/placement.py": (1, "the traffic to an endpoint is held against the cap of its target"),
    "configs/spec/short_form.py": (2, "the two workloads that the short form asks for"),
    "configs/records/rates.py": (1, "the arithmetic of decoding, for the kinds whose descriptor says `decodes`"),
    "engine/answering/rank.py": (1, "an encoder's settings, as those of a cell"),
    "engine/worker.py": (1, "the one table from a kind to the module that runs it"),
    "engine/planner/cells.py": (5, "the arithmetic of batches of prompts"),
    "engine/planner/choice/descriptions.py": (1, "a cell of no work, for its machine"),
    "engine/planner/local.py": (1, "stages of a pipeline that take turns with a batch of prompts"),
    "flows/cli/first_study/write.py": (1, "writes a study of a script"),
    "engine/planner/heads.py": (3, "encoding has no head to logits, generation one, a training its task's"),
    "flows/cli/plan/benchmark.py": (2, "writes a study of training"),
    "flows/cli/plan/learned.py": (4, "a plan of training or of generation, which past runs correct"),
    "flows/cli/verify/text.py": (3, "`rankwise verify` is for the kinds that take prompts"),
    "reports/correctness/reach.py": (4, "only workloads with prompts have answers"),
    "reports/document/methods.py": (
        2,
        "questions and methods by the kind of an experiment, `communication` among them",
    ),
    "reports/experiments/targets.py": (1, "the kind of an experiment, not of a workload"),
    "tasks/planning/study_plan.py": (2, "counts the prompts of a file, and looks whether they are texts"),
    "tasks/planning/predictions.py": (1, "the training that a script is predicted as"),
    "tasks/planning/layouts.py": (1, "a cell of no work, for its machine"),
    "tasks/deployment/level_checks.py": (1, "a bundle's levels are checked by cells of generation or encoding"),
    "tasks/models/judgement.py": (1, "our own model is trained for one task alone"),
    "tasks/models/saved_reference.py": (4, "`rankwise verify` is for the kinds that take prompts"),
    "tasks/checks/resumed.py": (2, "random prompts are drawn with the seed; a script may cut its own warm-up"),
    "tasks/checks/verification.py": (10, "`rankwise verify` is for the kinds that take prompts"),
}
"""Module -> how many places in it name a kind, and why they may; a new kind touches none of them but engine.worker."""


def mentions(path: Path) -> int:
    """Places that name a workload's class, compare a kind with its name, or hold a table of kinds."""
    return sum(_names_a_kind(node) for node in ast.walk(ast.parse(path.read_text())))


def _names_a_kind(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in CLASSES
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(map(_is_kind, sides)) and any(_constants([side]) for side in sides)
    if isinstance(node, ast.Dict):
        tagged = any(
            _constants([key], ("kind",)) and _constants([value])
            for key, value in zip(node.keys, node.values, strict=True)
        )
        return tagged or len(_constants(node.keys)) > 1
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return len(_constants(node.elts)) > 1
    return isinstance(node, ast.MatchValue) and bool(_constants([node.value]))


def _constants(nodes: list[Any], words: Any = DESCRIPTORS) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and node.value in words]


def _is_kind(node: ast.AST) -> bool:
    """`work.kind`, `work["kind"]` or a variable of that name."""
    if isinstance(node, ast.Subscript):
        return bool(_constants([node.slice], ("kind",)))
    return "kind" in (getattr(node, "attr", ""), getattr(node, "id", ""))


def modules() -> Iterator[str]:
    for folder in FOLDERS:
        yield from sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py"))


def test_kinds_are_named_in_their_own_modules_alone() -> None:
    found = {name: mentions(ROOT / name) for name in modules() if not name.startswith(tuple(OWN))}
    assert {name: count for name, count in found.items() if count} == {
        name: count for name, (count, _) in ALLOWED.items()
    }


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('if work.kind == "train": pass', 1),
        ('if draft["workload"]["kind"] in ("noop", "communication"): pass', 1),
        ('UNITS = {"train": "step", "noop": "pass"}', 1),
        ('work = {"kind": "noop", "seconds": 1}', 1),
        ("if isinstance(work, TrainWorkload | NoopWorkload): pass", 2),
        ('match work.kind:\n    case "train": pass', 1),
        ('figure = {"communication": 1, "compute": 2}["communication"]', 0),
        ('verb = "train" if task == "seq2seq" else "evaluate"', 0),
    ],
)
def test_what_counts_as_naming_a_kind(code: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert mentions(path) == count


def test_every_prefix_of_an_own_module_exists() -> None:
    assert [prefix for prefix in OWN if not any(name.startswith(prefix) for name in modules())] == []


def _members(union: Any) -> Iterator[type[BaseModel]]:
    for part in get_args(union):
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield part
        else:
            yield from _members(part)


def test_the_union_and_the_descriptors_hold_the_same_kinds() -> None:
    assert Counter(_members(AnyWorkload)) == Counter(known.model for known in DESCRIPTORS.values())
    assert set(DESCRIPTORS) - set(STUDIED) == {"preflight"}


FEWEST: dict[str, dict[str, Any]] = {"script": {"command": ("train.py",)}}
"""Fields that a kind cannot do without."""


every_kind = pytest.mark.parametrize("known", DESCRIPTORS.values(), ids=DESCRIPTORS)


@every_kind
def test_a_descriptor_names_fields_and_figures_that_exist(known: Descriptor) -> None:
    fields, rates = known.model.model_fields, {field.name for field in dataclasses.fields(Rates)}
    assert fields["kind"].default == known.kind
    assert known.throughput in rates and known.throughput in Prediction.model_fields
    assert {shown.figure for shown in known.times} <= rates
    assert set(known.predicted) <= rates & set(Prediction.model_fields)
    assert set(known.latencies.values()) <= set(known.columns)
    named = {*known.batch_fields, *known.input_fields, *known.hidden_fields, *filter(None, (known.grows, known.batch))}
    assert named <= set(fields)
    assert known.batch is None or known.batch in known.batch_fields
    assert known.unit and known.pass_name and known.verb


@every_kind
def test_what_is_compared_has_a_series_a_latency_and_a_batch(known: Descriptor) -> None:
    if not known.compared:
        assert known.latency is None and not known.times and not known.predicted
        return
    assert known.series in known.columns
    assert known.latency is not None and known.latency.waited_for in known.latencies
    assert known.latency.figure in {field.name for field in dataclasses.fields(Rates)}
    assert known.batch is not None and known.predicted
    # A time that is awaited has a column in tables, as the first of them.
    shown = [(time.figure, time.unit) for time in known.times if not time.extra]
    assert shown == ([(known.latency.figure, known.latency.unit)] if known.latency.awaited else [])


@every_kind
def test_flags_that_imply_each_other(known: Descriptor) -> None:
    assert known.takes_prompts == issubclass(known.model, PromptedWorkload)
    assert not known.decodes or (known.answers == "tokens" and "new_tokens" in known.model.model_fields)
    assert known.answers is None or (known.takes_prompts and known.model_form is not None)
    assert not (known.takes_prompts or known.trains) or known.needs_model
    assert known.has_strategy == (known.trains or known.own_program)
    assert bool(known.unpredicted) == (not known.compared)


def _valid(known: Descriptor, **fields: Any) -> bool:
    work: dict[str, Any] = {"kind": known.kind, **FEWEST.get(known.kind, {})}
    if known.takes_prompts:
        work["num_prompts"] = 2
    if known.starts_server and fields.get("engine") in TEXT_ONLY:
        work["prompts"] = "prompts.jsonl"
    try:
        Cell(workload=work, model="m", **fields)
    except ValidationError:
        return False
    return True


@every_kind
def test_layouts_are_refused_as_the_descriptor_says(known: Descriptor) -> None:
    axes: tuple[Axis, ...] = get_args(Axis)
    assert tuple(axis for axis in axes if _valid(known, layout={axis: 2})) == known.axes
    assert _valid(known, layout={"dp": 2, "strategy": "fsdp"}) == known.has_strategy
    assert _valid(known, layout={}) == (known.layout_rule is None)


@every_kind
def test_engines_and_compression_are_refused_as_the_descriptor_says(known: Descriptor) -> None:
    fitting: dict[Engine, dict[str, int]] = {"deepspeed": {"tp": 2}}
    own = {} if known.layout_rule is None else {"tp": 2}
    measured = {engine for engine in get_args(Engine) if _valid(known, engine=engine, layout=fitting.get(engine, own))}
    assert measured == set(known.engines)
    assert _valid(known, compression="int8", layout=own) == known.compressible


@every_kind
def test_the_page_cache_is_set_for_the_kinds_that_load_by_it(known: Descriptor) -> None:
    own = {} if known.layout_rule is None else {"tp": 2}
    assert _valid(known, page_cache="cold", layout=own) == known.takes_prompts


@every_kind
def test_weak_scaling_grows_the_field_that_the_descriptor_names(known: Descriptor) -> None:
    work = known.model(**FEWEST.get(known.kind, {}), **({"num_prompts": 3} if known.takes_prompts else {}))
    grown: Any = work.scaled(4)
    if known.grows is None:
        assert grown == work
        return
    assert getattr(grown, known.grows) == 4 * getattr(work, known.grows)
    assert grown == work.model_copy(update={known.grows: getattr(grown, known.grows)})


@every_kind
def test_a_cell_is_called_by_the_summary_of_its_work(known: Descriptor) -> None:
    layout = Layout(tp=2) if known.axes == ("tp",) else Layout()
    cell = Cell(workload=known.model(**FEWEST.get(known.kind, {})), layout=layout)
    assert cell.workload.summary and cell.workload.summary in cell.label
    assert descriptor_of(cell.workload) is known


def test_kinds_by_a_feature() -> None:
    assert kinds_with("decodes") == ("generate", "seq2seq")
    assert kinds_with("compressible") == ("generate", "seq2seq", "encode", "serve")
    assert kinds_with("starts_server") == ("serve",)


def test_the_engine_has_a_module_for_each_kind_and_imports_none_before_it_is_asked_for() -> None:
    code = (
        "import sys, importlib.util\n"
        "from configs.workloads import DESCRIPTORS\n"
        "from engine.worker import WORKLOADS\n"
        "assert list(WORKLOADS) == list(DESCRIPTORS), list(WORKLOADS)\n"
        "assert not {'torch', 'transformers', 'numpy', *WORKLOADS.values()} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    from engine.worker import WORKLOADS

    for module in WORKLOADS.values():
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert any(
            isinstance(node, ast.FunctionDef) and node.name == "run" for node in ast.parse(path.read_text()).body
        )


def test_parts_of_a_report_are_of_kinds_that_exist() -> None:
    from reports.sections.kinds import PARTS

    assert set(PARTS) <= set(STUDIED)
