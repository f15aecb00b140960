"""The fields of a study as a form in Prefect's UI.

A study file has experiments in a mapping and unions discriminated by `kind`; a form supports neither (it
falls back to a JSON text box). Here experiments are a list of named questions, and unions are plain
alternatives, shown as a choice. Form input is untrusted: the receiver calls `study_of_form`, which validates it
like a file and reports problems by the study's fields.

    study = study_of_form({"study": "mine", "workload": {...}, "experiments": [{"name": "strong", ...}]})
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, WithJsonSchema, field_serializer

from configs.common.base import Frozen
from configs.common.execution import Dtype, Engine, Layout
from configs.spec.experiments import (
    Communication,
    CompressionPasses,
    Correctness,
    Optimization,
    StrongScaling,
    Sweep,
    WeakScaling,
)
from configs.spec.measuring import Measuring
from configs.spec.objectives import Objectives, Purpose
from configs.spec.study import NAME_PATTERN, ModelSpec, StudyError, StudySpec, parse_study
from configs.targets.target import LocalTarget, SlurmTarget
from configs.workloads import STUDIED, Workload
from configs.workloads.generate import GenerateWorkload

SLURM_FIELDS = (
    "kind",
    "name",
    "partition",
    "nodes",
    "ranks_per_node",
    "cores_per_rank",
    "gpus_per_node",
    "account",
    "time_limit_minutes",
    "max_running",
    "price_usd_per_hour",
)
"""Fields of a Slurm target in the form; the others require a study file."""


def _drawn_workloads() -> WithJsonSchema:
    """The kinds of workload that a form offers, each as `_drawn` has it."""
    offered = [(known.model, known.form_title) for known in STUDIED.values()]
    return WithJsonSchema({"anyOf": [_drawn(model, title).json_schema for model, title in offered if title]})


def _drawn(model: type[BaseModel], title: str, only: Sequence[str] = (), **descriptions: str) -> WithJsonSchema:
    """Return a union's member for the form: a title for its button, and descriptions for its fields.

    only: the fields shown; none: all. The others require a study file.

    The schema is inlined, because the UI would show the class name of a reference as the title.
    """
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})  # references would be dangling inside another schema
    schema = _inlined(schema, definitions)
    if only:
        schema["properties"] = {name: schema["properties"][name] for name in only}
    for field, description in descriptions.items():
        schema["properties"][field]["description"] = description
    return WithJsonSchema(schema | {"title": title})


def _inlined(part: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a JSON schema with its references inlined."""
    if isinstance(part, list):
        return [_inlined(item, definitions) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _inlined(definitions[part["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(value, definitions) for name, value in part.items()}


class NamedExperiment(Frozen):
    """One experiment of the study."""

    name: str = Field("strong", description="unique name, used in the report")
    question: (
        Annotated[StrongScaling, _drawn(StrongScaling, "Strong scaling")]
        | Annotated[WeakScaling, _drawn(WeakScaling, "Weak scaling")]
        | Annotated[
            Sweep,
            _drawn(Sweep, "Sweep", over='lists of values by dotted field of the cell: `{"batch_size": [1, 2, 4]}`'),
        ]
        | Annotated[
            Optimization,
            _drawn(
                Optimization,
                "Optimization",
                baseline='changes to the cell that all are compared with: `{"dtype": "float32"}`',
                variants='changes to the baseline by name: `{"half": {"dtype": "bfloat16"}}`',
            ),
        ]
        | Annotated[Correctness, _drawn(Correctness, "Correctness")]
        | Annotated[
            CompressionPasses,
            _drawn(
                CompressionPasses,
                "Compression",
                baseline='changes to the cell that hold for all passes: `{"layout.tp": 2}`',
            ),
        ]
        | Annotated[Communication, _drawn(Communication, "Communication")]
    ) = StrongScaling(grow="dp", to=2)


class StudyForm(Frozen):
    """Models, layouts and machine of a study; the measurements of every cell are kept in the run folder."""

    study: Annotated[str, Field(pattern=NAME_PATTERN)] = Field(
        "from-the-form",
        title="Name",
        description="name of the study and its run folder; an existing study is resumed",
    )
    models: list[ModelSpec] = Field(
        [ModelSpec(id="synthetic:llama-4m@0")],
        description="`owner/name` with a revision, a folder, or `synthetic:<architecture>@<seed>`",
        json_schema_extra={"default": [{"id": "synthetic:llama-4m@0"}]},  # see _without_given_names
    )
    workload: Annotated[Workload, _drawn_workloads()] = Field(
        GenerateWorkload(prompt_tokens=16, new_tokens=16, num_prompts=8, batch_size=4),
        description="work done in one measurement of a cell",
    )
    experiments: list[NamedExperiment] = Field([NamedExperiment()], min_length=1, description="questions of the study")
    layout: Layout = Field(Layout(), description="default degrees of data, tensor and pipeline parallelism")
    dtype: Dtype = "float32"
    engine: Engine = "rankwise"
    target: (
        Annotated[LocalTarget, _drawn(LocalTarget, "This machine")]
        | Annotated[SlurmTarget, _drawn(SlurmTarget, "Slurm", only=SLURM_FIELDS)]
    ) = Field(LocalTarget(), description="where cells run")
    measuring: Measuring = Field(Measuring(), description="the same for every cell")
    pack: bool = Field(True, description="off: a separate launch for every cell")
    objectives: Objectives = Field(Objectives(), description="bounds; the report lists the cells that meet them")
    purpose: Purpose | None = Field(None, description="savings considered by the report; none: all")
    prices: str | None = Field(None, description="file with your own prices, on the machine of the worker")

    @field_serializer("models")
    def _without_given_names(self, models: list[ModelSpec]) -> list[dict[str, Any]]:
        """Remove derived model names, which must follow when an id is changed in the form."""
        return [
            model.model_dump(exclude={"name"} if model == ModelSpec(id=model.id, revision=model.revision) else None)
            for model in models
        ]


def study_of_form(data: dict[str, Any]) -> StudySpec:
    """Return the study of a filled-in form.

    Raises StudyError with every problem, each with the dotted field of the study.
    """
    if not isinstance(data, dict):
        raise StudyError([f"study: expected a mapping of fields to values, got {type(data).__name__}"])
    study = dict(data)
    if "target" in study:
        study["targets"] = [study.pop("target")]
    for field, value in StudyForm().model_dump(mode="json", exclude={"experiments", "target"}).items():
        study.setdefault(field, value)
    study["experiments"] = _mapping(data.get("experiments", [NamedExperiment().model_dump(mode="json")]))
    return parse_study(study)


def _mapping(items: Any) -> dict[str, Any]:
    """Convert the form's list of named questions to the study's mapping."""
    if not isinstance(items, list):
        raise StudyError([f"experiments: expected a list of named questions, got {type(items).__name__}"])
    experiments: dict[str, Any] = {}
    for position, item in enumerate(items):
        if not isinstance(item, dict) or set(item) - {"name", "question"}:
            raise StudyError([f"experiments[{position}]: expected a name and a question"])
        name = str(item.get("name", NamedExperiment().name))
        if name in experiments:
            raise StudyError([f"experiments[{position}].name: duplicate name {name!r}. Use a unique name"])
        experiments[name] = item.get("question", {})
    return experiments
