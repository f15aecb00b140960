"""The JSON schema of study files takes what a file may hold."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from configs.common.files.project_files import ROOT
from configs.common.files.yaml_text import parse_yaml
from configs.spec.schema import study_schema
from configs.spec.study import parse_study

BASE: dict[str, Any] = {
    "study": "mine",
    "models": [{"id": "synthetic:llama-4m@0"}],
    "workload": {"kind": "train", "steps": 3},
    "experiments": {"strong": {"kind": "strong", "grow": "dp", "to": 2}},
}
AWS = {"kind": "aws", "instance": "g5.xlarge", "regions": ["us-east-1"]}
VALID = jsonschema.Draft202012Validator(study_schema())


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies_are_valid(path: Path) -> None:
    VALID.validate(parse_yaml(path.read_text()))


@pytest.mark.parametrize(
    "change",
    [
        {"targets": [{"name": "a"}, {"name": "b", "max_ranks": 2}]},
        {"targets": [{}]},
        {"targets": [{"kind": "ssh", "hosts": ["gpu-a", {"host": "gpu-b"}]}]},
        {"targets": [{**AWS, "keep": "10m"}]},
        {"targets": [{**AWS, "keep": 600}]},
        {"workload": {"kind": "train", "min_period_seconds": "30s", "max_period_seconds": "2m", "target_loss": 0.1}},
        {"experiments": None, "layouts": "auto"},
    ],
    ids=lambda change: str(change)[:60],
)
def test_the_short_forms_of_the_documents_are_valid(change: dict[str, Any]) -> None:
    """Editors marked them as errors, though `rankwise validate` takes them."""
    data = {name: value for name, value in (BASE | change).items() if value is not None}
    parse_study(data)
    VALID.validate(data)


@pytest.mark.parametrize(
    "change",
    [
        {"targets": [{"partition": "gpu"}]},
        {"targets": [{**AWS, "keep": "10 minutes"}]},
        {"workload": {"steps": 3}},
        {"experiments": None},
    ],
    ids=str,
)
def test_what_is_refused_is_invalid(change: dict[str, Any]) -> None:
    data = {name: value for name, value in (BASE | change).items() if value is not None}
    with pytest.raises(ValueError, match=r"\w"):
        parse_study(data)
    with pytest.raises(jsonschema.ValidationError):
        VALID.validate(data)
