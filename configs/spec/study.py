"""Load and validate study files; all other modules rely on this validation.

    study = load_study(Path("study.yaml"), ["measuring.repeats=3"])

Raises StudyError with every problem found, each with the dotted field and the accepted values.
"""

import difflib
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    Field,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from configs.common.base import Frozen
from configs.common.booleans import YAML_BOOLEANS, boolean_problems
from configs.common.execution import Dtype, Engine, Layout
from configs.common.files.reading import brief, form_problem, length_problem, read_text
from configs.common.files.yaml_text import MAX_YAML_CHARACTERS, YamlError, parse_yaml, yaml_text
from configs.common.printable import printable, printable_lines, shortened
from configs.common.secrets import redacted, secret_fields
from configs.load.lengths import DISTRIBUTIONS
from configs.spec.alternatives import model_at, without_alternatives
from configs.spec.assignments import set_dotted
from configs.spec.engines import EngineEnvironment, OtherServer
from configs.spec.experiments import (
    Communication,
    CompressionPasses,
    Correctness,
    Experiment,
    Layouts,
    Optimization,
    ServerLoad,
    StrongScaling,
    Sweep,
    WeakScaling,
)
from configs.spec.measuring import Measuring
from configs.spec.objectives import Objectives, Purpose
from configs.spec.plain import plain_problems
from configs.spec.size import size_problems
from configs.targets.rented import RentedTarget
from configs.targets.target import EndpointTarget, LocalTarget, PbsTarget, SlurmTarget, SshTarget, Target
from configs.workloads import STUDIED, Workload

MAX_NAME = 100
"""Characters in a name of an experiment, a model or a target."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


_MAX_PROBLEM_CHARACTERS = 600
_MAX_PROBLEMS_CHARACTERS = 1900


class StudyError(ValueError):
    """An invalid study. `problems` are lines of the form `field: what is wrong`, bounded in length.

    num_problems: how many there are; those beyond what one screen holds are only counted.
    """

    def __init__(self, problems: list[str]) -> None:
        self.num_problems = len(problems)
        self.problems: list[str] = []
        left = _MAX_PROBLEMS_CHARACTERS
        for problem in problems:
            # Secrets are hidden before the text is cut: half of one is not known any more. The rest may be megabytes.
            near = redacted(problem[: 4 * _MAX_PROBLEM_CHARACTERS])
            text = printable_lines(near, _MAX_PROBLEM_CHARACTERS)
            left -= len(text)
            if left < 0:
                break
            self.problems.append(text)
        super().__init__("\n".join([*self.problems, *self.more]))

    @property
    def more(self) -> list[str]:
        """The line that counts the problems which are not listed; none where all are."""
        rest = self.num_problems - len(self.problems)
        return [f"and {rest:,} more problem{'' if rest == 1 else 's'}"] if rest else []


class ModelSpec(Frozen):
    """A model by `id`: `owner/name` with a revision, a local folder, or `synthetic:<architecture>@<seed>`."""

    id: str
    revision: str | None = None
    name: str = Field("", description="short name for tables; default: last part of the id")

    @model_validator(mode="after")
    def _named(self) -> "ModelSpec":
        if not self.name:
            last = self.id.removeprefix("synthetic:").rstrip("/").rpartition("/")[2]  # folders above may have an @
            object.__setattr__(self, "name", last.partition("@")[0] or last)
        return self


class ForecastSpec(Frozen):
    """Range and interconnect of the scaling forecast."""

    to: PositiveInt = Field(4096, le=4096, description="maximum number of ranks; powers of 2 up to it")
    machine: str | None = Field(
        None, description="`provider/instance` of the catalog; none: machines like the measured one"
    )


class StudySpec(Frozen):
    """One study file."""

    study: str = Field(pattern=NAME_PATTERN, description="name, also of the run folder")
    models: list[ModelSpec] = []
    workload: Workload
    layout: Layout = Layout()
    dtype: Dtype = "float32"
    engine: Engine = "rankwise"
    targets: list[Target] = Field([LocalTarget()], min_length=1)
    engines: dict[OtherServer, EngineEnvironment] = Field(
        {}, description="where servers of other projects are installed; none: by `rankwise engine add`"
    )
    experiments: dict[str, Experiment] = Field(min_length=1)
    measuring: Measuring = Measuring()
    pack: bool = Field(True, description="false: a separate launch for every cell")
    objectives: Objectives = Field(Objectives(), description="bounds that the report marks as met, missed or undecided")
    purpose: Purpose | None = Field(None, description="batch, serving or hybrid: the savings considered by the report")
    prices: str | None = Field(None, description="file with your own prices, relative to the study's")
    layouts: Literal["auto"] | None = Field(None, description="auto: adds an experiment `layouts` with its defaults")
    forecast: ForecastSpec = Field(ForecastSpec(), description="range and interconnect of the scaling forecast")

    @model_validator(mode="before")
    @classmethod
    def _layouts_are_an_experiment(cls, data: Any) -> Any:
        """`layouts: auto` is short for an experiment of that name and kind."""
        if not isinstance(data, dict) or data.get("layouts") != "auto":
            return data
        experiments = data.get("experiments") or {}
        if not isinstance(experiments, dict):
            return data
        named = experiments.get("layouts", {"kind": "layouts"})
        kind = named.get("kind") if isinstance(named, dict) else getattr(named, "kind", None)
        if kind != "layouts":
            raise ValueError(
                f"layouts: auto adds an experiment named layouts, but experiments.layouts is of kind {kind}. "
                "Rename that experiment"
            )
        return data | {"experiments": experiments | {"layouts": named}}

    @field_validator("layout", mode="wrap")
    @classmethod
    def _balance_has_stages(cls, given: Any, handler: ValidatorFunctionWrapHandler) -> Layout:
        """A layout of one stage keeps no balance, which experiments with several would be measured without."""
        layout: Layout = handler(given)
        if layout.pp == 1 and isinstance(given, dict) and given.get("stage_balance", "memory") != "memory":
            raise ValueError(
                f"layout.stage_balance: {given['stage_balance']} has no effect with one stage. Set pp here too, or "
                "stage_balance in the `base` of each experiment with several stages"
            )
        return layout

    @field_validator("models")
    @classmethod
    def _distinct_models(cls, models: list[ModelSpec]) -> list[ModelSpec]:
        names = [model.name for model in models]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"models: duplicate name {', '.join(sorted(twice))}. Give each model a unique `name`")
        return models

    @model_validator(mode="after")
    def _names_exist(self) -> "StudySpec":
        known = [model.name for model in self.models]
        for place, model in enumerate(known):
            _check_name(f"models[{place}].name", model)
        for name, experiment in self.experiments.items():
            _check_name(f"experiments.{shortened(name, 40)}", name)
            unknown = [model for model in experiment.models or [] if model not in known]
            if unknown:
                raise ValueError(
                    f"experiments.{name}.models: unknown model {brief(unknown[0])}{suggestion(unknown[0], known)}"
                )
        names = [target.name for target in self.targets]
        for place, name in enumerate(names):
            _check_name(f"targets[{place}].name", name)
            if name in names[:place]:
                raise ValueError(f"targets[{place}].name: duplicate name {name}. Give each target a unique `name`")
        return self


def _check_name(where: str, name: str) -> None:
    """Raises ValueError for a name that tables, plots and file names cannot show."""
    if not name.strip():
        raise ValueError(f"{printable(where)}: got an empty name, expected 1 to {MAX_NAME} characters")
    if len(name) > MAX_NAME:
        raise ValueError(f"{printable(where)}: got a name of {len(name):,} characters, expected at most {MAX_NAME}")
    if printable(name) != name:
        raise ValueError(f"{printable(where)}: got a name with control characters, expected one line of text")


def suggestion(word: str, known: list[str]) -> str:
    """Return the end of an error message: the closest and all accepted values."""
    close = difflib.get_close_matches(word[:100], known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{hint}\n  use one of: {', '.join(known)}" if known else hint


def load_study(path: Path, assignments: list[str] | None = None) -> StudySpec:
    """Read a study file and apply `dotted.key=value` assignments (values are YAML).

    Raises StudyError naming every problem.
    """
    data = read_mapping(path, str(path), "expected a mapping of keys to values")
    try:
        for assignment in assignments or []:
            set_dotted(data, assignment)
    except ValueError as error:
        raise StudyError([str(error)]) from error
    return parse_study(data)


def read_mapping(path: Path, name: str, what: str) -> dict[str, Any]:
    """Read a YAML file that holds a mapping. Raises StudyError.

    name: what the user calls the file. what: what the file should be.
    """
    try:
        data = parse_yaml(read_text(path, 4 * MAX_YAML_CHARACTERS))
    except OSError as error:
        raise StudyError([f"{name}: {error.strerror or error}"]) from error
    except YamlError as error:
        raise StudyError([f"{name}: not YAML: {error}"]) from error
    except ValueError as error:
        raise StudyError([f"{name}: {str(error).removeprefix(f'{path}: ')}"]) from error
    if not isinstance(data, dict):
        got = "an empty file" if data is None else type(data).__name__
        raise StudyError([f"{name}: {what}, got {got}"])
    return data


def parse_study(data: dict[str, Any]) -> StudySpec:
    """Check a study given as plain data. Raises StudyError naming every problem."""
    problems = plain_problems(data)
    if problems:
        raise StudyError(problems)
    if secrets := list(secret_fields(data)):
        raise StudyError([f"{field}: contains a secret, and the study is kept. Remove it" for field in secrets])
    try:
        study = StudySpec.model_validate(data)
    except ValidationError as error:
        details = without_alternatives(error.errors(include_url=False), data)
        raise StudyError([_problem(detail) for detail in details]) from error
    problems = boolean_problems(data, study)
    problems += size_problems(study.experiments, len(study.models), len(study.targets), study.measuring.repeats)
    if problems:
        raise StudyError(problems)
    return study


KINDS: dict[str, dict[str, type[BaseModel]]] = {
    "workload": {kind: known.model for kind, known in STUDIED.items()},
    "experiments": {
        "strong": StrongScaling,
        "weak": WeakScaling,
        "sweep": Sweep,
        "optimization": Optimization,
        "correctness": Correctness,
        "communication": Communication,
        "compression": CompressionPasses,
        "layouts": Layouts,
        "load": ServerLoad,
    },
    "targets": {
        "local": LocalTarget,
        "endpoint": EndpointTarget,
        "slurm": SlurmTarget,
        "pbs": PbsTarget,
        "ssh": SshTarget,
        "aws": RentedTarget,
        "gcp": RentedTarget,
        "azure": RentedTarget,
    },
}
"""The alternatives of each part of a study that has a `kind`."""
_PLAIN: dict[str, type[BaseModel]] = {
    "models": ModelSpec,
    "layout": Layout,
    "measuring": Measuring,
    "objectives": Objectives,
    "forecast": ForecastSpec,
}


def _problem(detail: dict[str, Any]) -> str:
    """Format a validation error of pydantic as `dotted.field: what is wrong`, without the tags of unions."""
    location = list(detail["loc"])
    tag_at = {"workload": 1, "experiments": 2, "targets": 2}.get(str(location[0]) if location else "", len(location))
    if len(location) > tag_at and location[tag_at] in KINDS[str(location[0])]:
        tag = str(location.pop(tag_at))
    else:
        tag = ""
    dotted = ""
    for item in location:
        dotted += f"[{item}]" if isinstance(item, int) else f"{'.' if dotted else ''}{item}"
    model = _model_at(location, tag, detail["alternative"])
    message = field_problem(detail, str(location[-1]) if location else "", model)
    if tag and len(location) == tag_at and message.partition(": ")[0] in model.model_fields:
        return f"{dotted}.{message}"  # a validator of several fields names the wrong one
    is_named = not dotted or message.startswith((f"{dotted}.", f"{dotted}: "))  # by a check of several fields
    return message if is_named else f"{dotted}: {message}"


def _model_at(location: list[Any], tag: str, alternative: str | None) -> type[BaseModel]:
    """Return the model that has the last item of a location as a field."""
    top = str(location[0]) if location else ""
    if not tag:
        return _PLAIN.get(top, StudySpec) if len(location) > 1 else StudySpec
    return model_at(KINDS[top][tag], location[1:], alternative)


def type_problem(detail: dict[str, Any]) -> str | None:
    """What is wrong with a value of another type, as YAML has it; None for other errors of pydantic."""
    given, kind = detail.get("input"), detail["type"]
    if given is None and kind.endswith("_type"):
        return "has no value. Write one, or remove the key if it is optional"
    if kind == "string_type" and isinstance(given, bool):
        return f"expected text, got {str(given).lower()}: {YAML_BOOLEANS}. Use quotes"
    if kind == "string_type" and isinstance(given, int | float | date):
        return f"expected text, got {'a date' if isinstance(given, date) else brief(given)}. Use quotes"
    if isinstance(given, dict | list) and kind in ("string_type", "int_type", "float_type", "bool_type"):
        expected = {"string": "text", "bool": "true or false"}.get(kind.removesuffix("_type"), "a number")
        return f"expected {expected}, got {'a list' if isinstance(given, list) else 'a mapping'}"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return f"expected a mapping of keys to values, got {'a list' if isinstance(given, list) else brief(given)}"
    if kind in ("list_type", "tuple_type"):
        return f"expected a list, got {'a mapping' if isinstance(given, dict) else brief(given)}"
    return None


def field_problem(detail: dict[str, Any], name: str, model: type[BaseModel]) -> str:
    """What is wrong with a field of a model, an error of pydantic: got what, expected what."""
    given, kind, context = detail.get("input"), detail["type"], detail.get("ctx", {})
    if (told := type_problem(detail) or length_problem(detail)) is not None:
        return told
    if kind == "string_pattern_mismatch" and context.get("pattern") == NAME_PATTERN:
        return f"got {brief(given)}, expected up to {MAX_NAME} letters, digits, '.', '_' and '-'"
    if kind == "string_pattern_mismatch":
        field = model.model_fields.get(name)
        return form_problem(detail) + (f" ({field.description})" if field is not None and field.description else "")
    if kind == "extra_forbidden" and model in KINDS["targets"].values():
        others = [kind for kind, other in KINDS["targets"].items() if name in other.model_fields]
        if others:
            return f"supported by targets of kind {' or '.join(others)} only. Set `kind: {others[0]}`"
    if kind == "extra_forbidden":
        return f"unknown key{suggestion(name, list(model.model_fields))}"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    if kind in ("literal_error", "union_tag_invalid"):
        expected = str(context.get("expected", context.get("expected_tags"))).replace("'", "").replace(" or ", ", ")
        tag = "distribution" if context.get("discriminator") == "'distribution'" else "kind"
        value = given.get(tag) if kind == "union_tag_invalid" and isinstance(given, dict) else given
        what = "axis" if name == "grow" else "value"
        where = f"{tag}: " if kind == "union_tag_invalid" else ""
        return f"{where}unknown {what} {brief(value)}\n  use one of: {expected}"
    if kind == "union_tag_not_found" and context.get("discriminator") == "'distribution'":
        return f"distribution is missing\n  use one of: {', '.join(DISTRIBUTIONS)}"
    if kind == "union_tag_not_found":
        tags = ", ".join(KINDS["workload" if name == "workload" else "experiments"])
        return f"kind is missing\n  use one of: {tags}"
    text = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{text}, got {brief(given)}" if not isinstance(given, dict | list) else text


def study_yaml(study: StudySpec) -> str:
    """Return the study as YAML for `load_study`, without defaults."""
    data = study.model_dump(mode="json", exclude_defaults=True)
    data["workload"]["kind"] = study.workload.kind
    for name, value in study.workload:
        if hasattr(value, "distribution"):  # the tag of a union, as kind is
            data["workload"][name]["distribution"] = value.distribution
    for name, experiment in study.experiments.items():
        data["experiments"][name]["kind"] = experiment.kind
    for place, target in enumerate(study.targets if "targets" in data else []):
        data["targets"][place]["kind"] = target.kind
    return yaml_text(data)
