"""The JSON schema of study files, for editors: what a file may hold, short forms included.

    study_schema()["properties"]["targets"]

Pydantic's own schema describes the values that come of a file: periods are numbers there, hosts mappings, and of a
target without a kind it cannot tell which it is.
"""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import BeforeValidatorFunctionSchema

from configs.common.base import PERIOD_PATTERN, period_seconds
from configs.spec.study import StudySpec
from configs.targets.target import LocalTarget, SshTarget


class _OfFiles(GenerateJsonSchema):
    """A generator that lets a period be text, such as `30s`."""

    def function_before_schema(self, schema: BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """Return the schema of a value that a function has read before."""
        found = super().function_before_schema(schema)
        if schema["function"]["function"] is not period_seconds:
            return found
        return {"anyOf": [found, {"type": "string", "pattern": f"^{PERIOD_PATTERN}$"}]}


def study_schema() -> dict[str, Any]:
    """Return the schema, of draft 2020-12."""
    schema = StudySpec.model_json_schema(schema_generator=_OfFiles)
    for name, definition in schema["$defs"].items():
        # What tells the members of a union apart has a default in each, and several would match without it.
        if "kind" in definition.get("properties", {}) and name != LocalTarget.__name__:
            definition["required"] = ["kind", *(each for each in definition.get("required", []) if each != "kind")]
    hosts = schema["$defs"][SshTarget.__name__]["properties"]["hosts"]
    hosts["items"] = {"anyOf": [{"type": "string"}, hosts["items"]]}
    schema["required"] = [name for name in schema["required"] if name != "experiments"]
    schema["anyOf"] = [{"required": ["experiments"]}, {"required": ["layouts"]}]  # `layouts: auto` adds one
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Rankwise study"}
