"""YAML that somebody else wrote: plain data with text keys, bounded in depth and in what aliases expand to.

    data = parse_yaml(text)           # YamlError: "line 3, column 5: duplicate key 'study'"

Merge keys (`<<: *anchor`) are supported. PyYAML alone raises RecursionError, TypeError, ValueError, IndexError,
KeyError and AttributeError for some texts, and keeps the last of two equal keys.
"""

import re
from typing import Any

import yaml

from configs.common.files.reading import brief
from configs.common.printable import printable

MAX_YAML_CHARACTERS = 1_000_000
_MAX_DEPTH = 50
_MAX_NODES = 50_000
"""Values, keys included, with every alias expanded."""
_MERGE = "tag:yaml.org,2002:merge"
_MAX_DIGITS = 18
"""Of a whole number: less than 64 bits."""
_OTHER_BASES = {"octal": re.compile("[-+]?0[0-9_]+"), "base 60": re.compile("[-+]?[0-9_]+(:[0-9.]+)+")}
"""Numbers of YAML 1.1 that their writers mean otherwise: 010 is 8, and 1:30:00 is 5400."""


class YamlError(ValueError):
    """Text that is not YAML, or not plain data. The message begins with line and column where there is one."""


def parse_yaml(text: str) -> Any:
    """Return the data of one YAML document. Raises YamlError."""
    if len(text) > MAX_YAML_CHARACTERS:
        raise YamlError(f"{len(text):,} characters of YAML, expected at most {MAX_YAML_CHARACTERS:,}")
    try:
        return _unshared(yaml.load(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        raise YamlError(_described(error)) from None
    except (yaml.YAMLError, ValueError, IndexError, RecursionError) as error:
        raise YamlError(printable(str(error), 300)) from None


def yaml_text(data: Any) -> str:
    """Plain data as YAML, in the order given, which readers of YAML 1.1 and 1.2 take alike."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes texts which are values to other readers, such as those of Kubernetes and Compose."""


for _tag, _written, _first in (
    ("bool", "[yYnN]", "yYnN"),
    ("int", "[-+]?0o[0-7]+", "-+0"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_written})$"), list(_first))


def _unshared(data: Any) -> Any:
    """Return a copy in which an alias and its anchor are two values, so that one can be changed."""
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    return [_unshared(item) for item in data] if isinstance(data, list) else data


def _described(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = str(error.problem or error.context or "not YAML")
    if problem.startswith("found character '\\t'"):
        problem = "found a tab. Indent with spaces"
    elif problem.startswith("but found") and error.context:
        problem = f"{error.context}, {problem}"
    return f"{place}{printable(problem, 300)}"


def _refused(problem: str, where: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)  # type: ignore[arg-type]


class _Loader(yaml.SafeLoader):
    """SafeLoader with bounds, which rejects duplicate keys and keys that are not text."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._nodes = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, counting it and, at an alias, all that the alias stands for."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        begun = self._nodes
        self._nodes += 1
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _refused(f"nested deeper than {_MAX_DEPTH} levels", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise _refused(f"alias {brief(event.anchor)} is inside its own anchor", event)
            self._nodes += self._sizes[id(node)]
        else:
            self._sizes[id(node)] = self._nodes - begun
        if self._nodes > _MAX_NODES:
            raise _refused(f"more than {_MAX_NODES:,} values, counting what aliases stand for", event)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping without duplicate keys; what a merge key brings gives way to keys of the mapping."""
        seen: set[Any] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = _MERGE if key_node.tag == _MERGE else self._text_key(key_node)
            if key in seen:
                written = "<<" if key == _MERGE else key
                raise _refused(f"duplicate key {brief(written)}", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def _text_key(self, node: yaml.Node) -> str:
        key = self.construct_object(node, deep=True) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(key, str):
            return key
        what = f"key {brief(node.value)}" if isinstance(node, yaml.ScalarNode) else "this key"
        raise _refused(f"{what} is not text. Write keys as text, in quotes where needed", node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return a node's value; what a constructor of PyYAML cannot convert is an error with line and column."""
        try:
            value = super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            tag = str(node.tag).rpartition(":")[2]
            raise _refused(f"{brief(node.value)} is not a valid {printable(tag, 40)}", node) from None
        if isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS:
            raise _refused(f"number too large, expected at most {_MAX_DIGITS} digits", node)
        if isinstance(value, int | float) and isinstance(node, yaml.ScalarNode) and not isinstance(value, bool):
            for base, written in _OTHER_BASES.items():
                if written.fullmatch(node.value):
                    what = f"{brief(node.value)[1:-1]} means {value} in YAML ({base})"
                    raise _refused(f"{what}. Write a decimal number, or a text in quotes", node)
        return value
