"""A study in a few fields: model, question, ranks, repeats and target.

    study = study_of_short_form({"question": "strong scaling", "ranks": 4, "target": "lab"}, {"lab": {"kind": "slurm"}})

Everything else is `advanced`, `dotted.key=value` as with `rankwise run --set`, or a whole study file as `yaml`. Targets
are chosen by name from a list that the receiver keeps; a study in YAML may name them too, as `targets: [lab]`.
Form input is untrusted: problems are reported as StudyError, by the field of the form or of the study.
"""

import math
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError

from configs.common.base import Frozen
from configs.common.files.reading import brief, form_problem
from configs.common.files.yaml_text import YamlError, parse_yaml
from configs.common.secrets import secret_fields
from configs.spec.assignments import set_dotted
from configs.spec.study import NAME_PATTERN, StudyError, StudySpec, parse_study, suggestion

THIS_MACHINE = "local"
"""Name of the target that needs no entry in the list."""

Question = Literal[
    "strong scaling",
    "weak scaling",
    "tensor parallelism",
    "batch sizes",
    "best layout",
    "correctness",
    "strong scaling of training",
]
_GENERATE: dict[str, Any] = {
    "kind": "generate",
    "prompt_tokens": 16,
    "new_tokens": 16,
    "num_prompts": 16,
    "batch_size": 4,
}
_TRAIN: dict[str, Any] = {"kind": "train"}
_SEQUENCES = 8
"""Of a step of training, where the ranks can share so many."""
_BATCH_SIZES = [1, 2, 4, 8, 16]


class ShortStudy(Frozen):
    """A question about a model, asked of a target."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = Field(
        "my-study", description="name of the study and its run folder; an existing study is resumed"
    )
    model: Annotated[str, Field(min_length=1, pattern=r"^\S+$")] = Field(
        "synthetic:llama-4m@0", description="`owner/name`, a folder, or `synthetic:<architecture>@<seed>`"
    )
    question: Question = Field("strong scaling", description="what is measured up to the number of ranks")
    ranks: Annotated[int, Field(ge=1, le=4096)] = Field(2, description="largest number of ranks")
    repeats: Annotated[int, Field(ge=1, le=1000)] = Field(
        10, description="measurements of each cell; intervals need at least 6"
    )
    target: str = Field(THIS_MACHINE, description="where it runs: a name of the stored list of targets")
    advanced: list[str] = Field(
        [], description="further fields of the study, each as `dotted.key=value`: `workload.new_tokens=64`"
    )
    yaml: str = Field(
        "", title="YAML", description="a whole study file; the fields above, but the name, are then not read"
    )


def study_of_short_form(data: Any, targets: dict[str, dict[str, Any]]) -> StudySpec:
    """Return the study of a filled-in form. Raises StudyError.

    targets: the fields of each target that is stored, by name.
    """
    try:
        form = ShortStudy.model_validate(data)
    except ValidationError as error:
        raise StudyError([_problem(dict(detail)) for detail in error.errors(include_url=False)]) from error
    if not form.yaml.strip():
        study = _asked(form) | {"targets": [form.target]}
    else:
        study = _parsed(form.yaml)
        study.setdefault("study", form.name)
    try:
        study = with_stored_targets(study, targets)
    except StudyError as error:
        if form.yaml.strip():
            raise
        raise StudyError([problem.replace("targets[0]:", "target:", 1) for problem in error.problems]) from error
    try:
        for assignment in form.advanced:
            set_dotted(study, assignment)
    except ValueError as error:
        raise StudyError([f"advanced: {str(error).removeprefix('--set ')}"]) from error
    return parse_study(study)


def name_in_short_form(data: Any) -> str:
    """Return the name of the study that a form stands for, as far as the form can be read."""
    name = str(data.get("name", ShortStudy().name)) if isinstance(data, dict) else ShortStudy().name
    study: dict[str, Any] = {"study": name}
    try:
        form = ShortStudy.model_validate(data)
        study |= _parsed(form.yaml) if form.yaml.strip() else {}
        for assignment in form.advanced:
            set_dotted(study, assignment)
    except ValueError:
        return name  # the run says what is wrong
    return str(study["study"]) if re.match(NAME_PATTERN, str(study["study"])) else name


def with_stored_targets(study: dict[str, Any], targets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The study with the targets that it has by name as what is stored of them. Raises StudyError for unknown names."""
    named = study.get("targets")
    if not isinstance(named, list):
        return study
    known: dict[str, dict[str, Any]] = {THIS_MACHINE: {"kind": "local"}} | targets
    problems = [
        f"targets[{position}]: unknown target {brief(name)}{suggestion(name, sorted(known))}"
        for position, name in enumerate(named)
        if isinstance(name, str) and name not in known
    ]
    if problems:
        raise StudyError(problems)
    return study | {
        "targets": [known[target] | {"name": target} if isinstance(target, str) else target for target in named]
    }


def checked_targets(value: Any, where: str) -> dict[str, dict[str, Any]]:
    """A stored list of targets, by name. Raises StudyError for one that no study could have; for a secret in it."""
    if not isinstance(value, dict) or not all(isinstance(fields, dict) for fields in value.values()):
        raise StudyError([f'{where}: expected a mapping of names to fields, such as {{"lab": {{"kind": "slurm"}}}}'])
    if secrets := list(secret_fields(value)):
        raise StudyError([f"{where}: {field}: contains a secret, and everybody can read it" for field in secrets])
    targets: dict[str, dict[str, Any]] = value
    for name in targets:
        try:
            parse_study(with_stored_targets(_asked(ShortStudy()) | {"targets": [name]}, targets))
        except StudyError as error:
            raise StudyError([f"{where}: {name}: {problem}" for problem in error.problems]) from error
    return targets


def _asked(form: ShortStudy) -> dict[str, Any]:
    """The study that the question stands for, without targets."""
    degrees = [degree for degree in (1, 2, 4, 8, 16, 32, 64) if degree <= form.ranks]
    questions: dict[Question, dict[str, Any]] = {
        "strong scaling": {"kind": "strong", "grow": "dp", "to": form.ranks},
        "weak scaling": {"kind": "weak", "grow": "dp", "to": form.ranks},
        "tensor parallelism": {"kind": "strong", "grow": "tp", "to": form.ranks},
        "batch sizes": {"kind": "sweep", "over": {"dp": [form.ranks], "batch_size": _BATCH_SIZES}},
        "best layout": {"kind": "layouts", "ranks": form.ranks},
        "correctness": {"kind": "correctness", "layouts": [{"tp": degree} for degree in degrees]},
        "strong scaling of training": {"kind": "strong", "grow": "dp", "to": form.ranks},
    }
    assert set(questions) == set(get_args(Question))
    return {
        "study": form.name,
        "models": [{"id": form.model}],
        "workload": _work(form),
        "experiments": {form.question.replace(" ", "-"): questions[form.question]},
        "measuring": {"repeats": form.repeats},
    }


def _work(form: ShortStudy) -> dict[str, Any]:
    """Work that all degrees of parallelism of the question can share out, in batches that are full."""
    if form.question == "strong scaling of training":
        largest_power = 1 << (form.ranks.bit_length() - 1)  # the degrees are the powers of 2 below `ranks`, and `ranks`
        return _TRAIN | {"global_batch_size": math.lcm(_SEQUENCES, largest_power, form.ranks)}
    prompts = _GENERATE["num_prompts"]
    if form.question in ("strong scaling", "best layout"):
        prompts = max(prompts, _GENERATE["batch_size"] * form.ranks)
    if form.question == "batch sizes":
        prompts = max(_BATCH_SIZES) * form.ranks
    return _GENERATE | {"num_prompts": prompts}


def _parsed(text: str) -> dict[str, Any]:
    try:
        study = parse_yaml(text)
    except (YamlError, ValueError) as error:
        raise StudyError([f"yaml: {error}"]) from error
    if not isinstance(study, dict):
        raise StudyError([f"yaml: expected a study, a mapping of keys to values, got {type(study).__name__}"])
    return study


def _problem(detail: dict[str, Any]) -> str:
    field = ".".join(str(part) for part in detail["loc"]) or "study"
    if detail["type"] == "extra_forbidden":
        return f"{field}: unknown key{suggestion(field, list(ShortStudy.model_fields))}"
    if detail["type"] == "string_pattern_mismatch":
        return f"{field}: {form_problem(detail)}"
    given = detail.get("input")
    told = "" if isinstance(given, dict | list) else f", got {brief(given)}"
    return f"{field}: {detail['msg'][:1].lower()}{detail['msg'][1:]}{told}"
