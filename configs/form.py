"""A study as a form draws it: the same fields, shaped for Prefect's UI.

A study file keeps experiments in a mapping and tells unions apart by `kind`; a form can draw neither (it
falls back to a box of JSON). Here experiments are a list of named questions, and unions are plain
alternatives, which the form draws as a choice. The form is never trusted: whoever receives it calls
`study_of_form`, which checks it as it checks a file and names what is wrong by the study's fields.

    study = study_of_form({"study": "mine", "workload": {...}, "experiments": [{"name": "strong", ...}]})
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, WithJsonSchema, field_serializer

from configs.base import Frozen
from configs.cell import (
    Dtype,
    EncodeWorkload,
    Engine,
    GenerateWorkload,
    Layout,
    NoopWorkload,
    Seq2SeqWorkload,
)
from configs.experiments import (
    Communication,
    CompressionPasses,
    Correctness,
    Optimization,
    StrongScaling,
    Sweep,
    WeakScaling,
)
from configs.job import Measuring
from configs.objectives import Objectives, Purpose
from configs.study import NAME_PATTERN, ModelSpec, StudyError, StudySpec, parse_study
from configs.target import LocalTarget, SlurmTarget
from configs.training import TrainWorkload

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
"""What of a cluster a form asks for; the rest is for a study file."""


def _drawn(model: type[BaseModel], title: str, only: Sequence[str] = (), **descriptions: str) -> WithJsonSchema:
    """A union's member as the form draws it: the title is on its button, descriptions are added to its fields.

    only: the fields that a person fills in; none: all. A study file has the others.

    Written out instead of referred to: the UI takes the title of what is referred to, the name of the class.
    """
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})  # inside another schema the references would lead nowhere
    schema = _inlined(schema, definitions)
    if only:
        schema["properties"] = {name: schema["properties"][name] for name in only}
    for field, description in descriptions.items():
        schema["properties"][field]["description"] = description
    return WithJsonSchema(schema | {"title": title})


def _inlined(part: Any, definitions: dict[str, Any]) -> Any:
    """A part of a JSON schema with what it refers to written out."""
    if isinstance(part, list):
        return [_inlined(item, definitions) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _inlined(definitions[part["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(value, definitions) for name, value in part.items()}


class NamedExperiment(Frozen):
    """One question that the study answers."""

    name: str = Field("strong", description="how the report calls it; each name once")
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
    """Which models, in which layouts, on which machine; every cell is measured and kept in the run folder."""

    study: Annotated[str, Field(pattern=NAME_PATTERN)] = Field(
        "from-the-form",
        title="Name",
        description="of the study and of its run folder; a study that exists goes on where it stopped",
    )
    models: list[ModelSpec] = Field(
        [ModelSpec(id="synthetic:llama-4m@0")],
        description="`owner/name` with a revision, a folder, or `synthetic:<architecture>@<seed>`",
        json_schema_extra={"default": [{"id": "synthetic:llama-4m@0"}]},  # see _without_given_names
    )
    workload: (
        Annotated[GenerateWorkload, _drawn(GenerateWorkload, "Generate")]
        | Annotated[Seq2SeqWorkload, _drawn(Seq2SeqWorkload, "Sequence to sequence")]
        | Annotated[EncodeWorkload, _drawn(EncodeWorkload, "Encode")]
        | Annotated[TrainWorkload, _drawn(TrainWorkload, "Train")]
        | Annotated[NoopWorkload, _drawn(NoopWorkload, "Noop")]
    ) = Field(
        GenerateWorkload(prompt_tokens=16, new_tokens=16, num_prompts=8, batch_size=4),
        description="what one visit of a cell does",
    )
    experiments: list[NamedExperiment] = Field([NamedExperiment()], min_length=1, description="what the study asks")
    layout: Layout = Field(
        Layout(), description="degrees of data, tensor and pipeline parallelism, where no experiment says otherwise"
    )
    dtype: Dtype = "float32"
    engine: Engine = "rankwise"
    target: (
        Annotated[LocalTarget, _drawn(LocalTarget, "This machine")]
        | Annotated[SlurmTarget, _drawn(SlurmTarget, "Slurm", only=SLURM_FIELDS)]
    ) = Field(LocalTarget(), description="where cells run")
    measuring: Measuring = Field(Measuring(), description="the same for every cell")
    pack: bool = Field(True, description="off: every cell gets a launch of its own")
    objectives: Objectives = Field(Objectives(), description="bounds; the report says which cells hold them")
    purpose: Purpose | None = Field(None, description="whose savings the report weighs; none: all")
    prices: str | None = Field(None, description="file with your own prices, on the machine of the worker")

    @field_serializer("models")
    def _without_given_names(self, models: list[ModelSpec]) -> list[dict[str, Any]]:
        """Without the names that models give themselves: they must follow when an id is changed in the form."""
        return [
            model.model_dump(exclude={"name"} if model == ModelSpec(id=model.id, revision=model.revision) else None)
            for model in models
        ]


def study_of_form(data: dict[str, Any]) -> StudySpec:
    """The study that a filled-in form asks for.

    Raises StudyError with every problem, each with the dotted field of the study.
    """
    if not isinstance(data, dict):
        raise StudyError([f"study: a form is a mapping of fields to values, this is {type(data).__name__}"])
    study = dict(data)
    if "target" in study:
        study["targets"] = [study.pop("target")]
    for field, value in StudyForm().model_dump(mode="json", exclude={"experiments", "target"}).items():
        study.setdefault(field, value)
    study["experiments"] = _mapping(data.get("experiments", [NamedExperiment().model_dump(mode="json")]))
    return parse_study(study)


def _mapping(items: Any) -> dict[str, Any]:
    """The form's list of named questions as the study's mapping."""
    if not isinstance(items, list):
        raise StudyError([f"experiments: a list of named questions, not {type(items).__name__}"])
    experiments: dict[str, Any] = {}
    for position, item in enumerate(items):
        if not isinstance(item, dict) or set(item) - {"name", "question"}:
            raise StudyError([f"experiments[{position}]: write it as a name and a question"])
        name = str(item.get("name", NamedExperiment().name))
        if name in experiments:
            raise StudyError([f"experiments[{position}].name: {name!r} is given twice; name each question once"])
        experiments[name] = item.get("question", {})
    return experiments
