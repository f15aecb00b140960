"""Errors of pydantic at fields with alternatives, such as a number or a mapping: one for each value that is wrong.

    details = without_alternatives(error.errors(), data)

Pydantic reports an error for each alternative, with its name in the location: `prompt_tokens.constrained-int` and
`prompt_tokens.tagged-union[...].uniform.high` for a mapping that lacks `high`, which is no number either.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

_NAME = re.compile(r"(bool|int|float|str|uniform|lognormal)$|constrained-|tagged-union\[|function-")
"""How pydantic names an alternative of a union in a location."""
_OF_MAPPINGS = re.compile(r"(model|model_attributes|dict|dataclass)_type$|union_tag_")
_OF_SCALARS = re.compile(r"(bool|int|float|string)_(type|parsing|from_float)$")


def without_alternatives(details: Iterable[Mapping[str, Any]], data: Any) -> list[dict[str, Any]]:
    """Return the errors with locations of the data alone, and of those of one value the one that tells most.

    data: what was validated; a key of it that is called like an alternative stays in the location. An error inside an
    alternative has its name as `alternative`.
    """
    found = [(_location(detail["loc"], data), dict(detail)) for detail in details]
    chosen: dict[tuple[Any, ...], dict[str, Any]] = {}
    kept: list[dict[str, Any]] = []
    for location, detail in found:
        names = [item for item in detail["loc"] if item not in location]
        is_alternative = location != tuple(detail["loc"])
        detail |= {"loc": location, "alternative": names[-1] if names else None}
        if not is_alternative:
            kept.append(detail)
        elif _is_likelier(detail, chosen.get(location)):
            chosen[location] = detail
    around = {location[:length] for location in chosen for length in range(len(location))}
    for location, detail in chosen.items():
        if not (location in around and _OF_SCALARS.match(detail["type"])):
            kept.append(detail)
    order = {location: -number for number, (location, _) in enumerate(reversed(found))}
    return sorted(kept, key=lambda detail: order[detail["loc"]])


def model_at(model: type[BaseModel], path: Sequence[Any], alternative: str | None = None) -> type[BaseModel]:
    """Return the model that has the last item of a path as a field.

    model: where the path begins. alternative: the tag of a union that the path goes through.
    """
    for item in path[:-1]:
        field = model.model_fields.get(str(item))
        inner = [] if field is None else _models_in(field.annotation)
        tagged = [each for each in inner if alternative in (one.default for one in each.model_fields.values())]
        model = next(iter(tagged or inner), model)
    return model


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _location(given: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    place = data
    for item in given:
        is_key = isinstance(place, Mapping) and item in place
        is_index = isinstance(place, list | tuple) and isinstance(item, int) and item < len(place)
        if is_key or is_index:
            place = place[item]
        elif isinstance(item, str) and _NAME.match(item):
            continue
        found.append(item)
    return tuple(found)


def _is_likelier(detail: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Whether an error is of the alternative that the author is likelier to have meant, by the form of the value."""
    return other is None or _rank(detail) >= _rank(other)


def _rank(detail: Mapping[str, Any]) -> int:
    """0: of an alternative of another form; 1: of another type, 2: where text would do; 3: a value out of bounds."""
    kind, is_nested = detail["type"], isinstance(detail.get("input"), Mapping)
    if (_OF_SCALARS if is_nested else _OF_MAPPINGS).match(kind):
        return 0
    if kind == "string_type":
        return 2
    return 1 if _OF_SCALARS.match(kind) else 3
