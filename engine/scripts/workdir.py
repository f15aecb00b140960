"""The folder that a script runs in: its inputs unpacked, templates rendered, configuration files written.

    fill_workdir(work, inputs_folder, workdir, values, planned_contents(...))

An input is a tar archive of regular files, named by its hash; another member, or one that lies outside, is refused.
"""

import json
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from configs.common.files.reading import check_regular, read_text
from configs.common.files.yaml_text import yaml_text
from configs.common.printable import printable
from configs.workloads.placeholders import ParameterValue, filled_text, names_in
from configs.workloads.script import ScriptWorkload

_TEMPLATE_BYTES = 4 << 20


def fill_workdir(
    work: ScriptWorkload,
    inputs: Path,
    folder: Path,
    values: dict[str, ParameterValue | None],
    planned: Mapping[str, dict[str, Any]],
) -> None:
    """Fill the folder. planned: files of the planner. Raises OSError, and ValueError naming the field."""
    folder.mkdir(parents=True, exist_ok=True)
    for digest in work.inputs:
        path = inputs / f"{digest}.tar"
        check_regular(path)
        with tarfile.open(path, "r:") as archive:
            _unpack(archive, folder, path.name)
    for name in work.templates:
        _render(folder, name, values)
    for name in dict.fromkeys((*planned, *work.config_files)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = merged(planned.get(name, {}), _with_values(work.config_files.get(name, {}), values))
        text = json.dumps(whole, indent=1) if path.suffix == ".json" else yaml_text(whole)
        path.write_text(text, encoding="utf-8")


def _unpack(archive: tarfile.TarFile, folder: Path, name: str) -> None:
    """Unpack regular files, of which alone an input consists. Raises ValueError for another member."""
    for member in archive:
        inside = PurePosixPath(member.name)
        if not member.isreg() or inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"inputs: {name}: {printable(member.name, 200)}: no file inside the folder")
    # Python has filters since 3.11.4; Debian 12 has 3.11.2.
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The first with the entries of the second, which win; sections of both are merged, but for those of another type:
    an optimizer has settings of its own.
    """
    both = {
        name: merged(first[name], value)
        if isinstance(value, dict) and isinstance(first.get(name), dict) and _same_type(first[name], value)
        else value
        for name, value in second.items()
    }
    return {**first, **both}


def _same_type(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether both say the same `type`, or only one says any. DeepSpeed has Adam and AdamW in one class."""
    kinds = {str(section["type"]).lower() for section in (first, second) if "type" in section}
    return len(kinds) < 2 or kinds == {"adam", "adamw"}


def template_values(values: dict[str, ParameterValue | None]) -> dict[str, Any]:
    """Values as a Jinja template sees them: `params.lr` is an entry of `params`."""
    found: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    params = {name.partition(".")[2]: value for name, value in values.items() if name.startswith("params.")}
    return found | {"params": params}


def _render(folder: Path, name: str, values: dict[str, ParameterValue | None]) -> None:
    """Render a template beside itself, in a sandbox: its text came with the study."""
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    try:
        text = read_text(folder / name, _TEMPLATE_BYTES)
        engine = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        rendered = engine.from_string(text).render(template_values(values))
        (folder / name.removesuffix(".j2")).write_text(rendered, encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"workload.templates: {name} is not among the inputs. Add it to workload.inputs") from error
    except (TemplateError, TypeError, ArithmeticError) as error:  # a field that is not set is None
        raise ValueError(f"workload.templates: {name}: {error}") from error


def _with_values(content: Any, values: dict[str, ParameterValue | None]) -> Any:
    """Nested data with placeholders filled; a text that is one placeholder becomes the value, a number stays one."""
    if isinstance(content, dict):
        return {key: _with_values(value, values) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_with_values(value, values) for value in content]
    if not isinstance(content, str):
        return content
    names = names_in(content)
    if len(names) == 1 and content == f"{{{next(iter(names))}}}":
        return values[next(iter(names))]
    return filled_text(content, values)
