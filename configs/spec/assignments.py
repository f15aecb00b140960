"""Assignments of the command line: `--set measuring.repeats=3` changes a study's plain data before it is checked.

set_dotted(data, "experiments.batch.over={batch_size: [1, 2]}")       # values are YAML
"""

from typing import Any

from configs.common.files.reading import brief
from configs.common.files.yaml_text import YamlError, parse_yaml

_MAX_NAMES = 20
"""Of a dotted key; the deepest field of a study has 6."""
_LISTS = ("models", "targets")
"""Sections that are lists: an index makes none where there is none."""


def set_dotted(data: dict[str, Any], assignment: str) -> None:
    """Set a dotted key of plain data. Raises ValueError naming the key."""
    dotted, equals, value = assignment.partition("=")
    dotted = dotted.strip()  # in a form `measuring.repeats = 3` is written as often as not
    *parents, last = names = dotted.split(".")
    if not equals or not all(names) or len(names) > _MAX_NAMES:
        raise ValueError(f"--set {brief(assignment)}: expected dotted.key=value, such as measuring.repeats=3")
    where = f"--set {brief(dotted)[1:-1]}"
    try:
        parsed = parse_yaml(value)
    except YamlError as error:
        raise ValueError(f"{where}: value is not valid YAML: {error}") from error
    place: Any = data
    if names[0] in _LISTS and data.get(names[0]) is None and len(names) > 1:
        raise ValueError(f"{where}: the study has no {names[0]}, so none to change. Set all: {names[0]}=[...]")
    for name in parents:
        place = _step_into(place, name, where)
    if isinstance(place, list):
        place[_index(place, last, where)] = parsed
    else:
        place[last] = parsed


def _step_into(place: Any, name: str, where: str) -> Any:
    inner = place[_index(place, name, where)] if isinstance(place, list) else place.setdefault(name, {})
    if inner is None and isinstance(place, dict):  # a section of the file that has no fields yet
        inner = place[name] = {}
    if not isinstance(inner, dict | list):
        raise ValueError(f"{where}: {brief(name)[1:-1]} is a single value without fields")
    return inner


def _index(place: list[Any], name: str, where: str) -> int:
    # isdigit() alone takes "²", which int() does not.
    if not (name.isascii() and name.isdigit()) or len(name) > 9 or int(name) >= len(place):
        raise ValueError(f"{where}: {brief(name)[1:-1]} is not an index of a list of {len(place)}")
    return int(name)
