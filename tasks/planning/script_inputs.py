"""Files and folders of the user's scripts: packed, hashed, and looked through for what reaches the script.

    digest = pack_input(Path("study"), "data/", run.inputs)                # inputs/<digest>.tar
    problems = unreached(study, base)                                      # fields that reach no script

An archive holds names, contents and whether a file may be executed; times and owners are left out, so that equal files
have equal hashes. Run folders below an input are left out too: they change while the study runs.
"""

import errno
import hashlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from configs.common.files.reading import open_regular, read_text
from configs.common.printable import printable
from configs.plans.paths import RunPaths
from configs.spec.cell import Cell
from configs.spec.experiments import Optimization, StrongScaling, Sweep, WeakScaling
from configs.spec.study import StudySpec
from configs.workloads.script import FIELDS, STARTED, TEMPLATE_SUFFIX, ScriptWorkload
from engine.planner.choice.script_files import planned_contents

MAX_BYTES = 16 << 30
MAX_FILES = 200_000
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of what is written, whatever was read."""
_SKIPPED = {"__pycache__", ".git", ".hg", ".venv", "node_modules", ".mypy_cache", ".pytest_cache"}
_TEMPLATE_BYTES = 4 << 20
_BY_NATURE = {"nodes", "cores_per_rank", "dp", *STARTED}
"""Fields whose values reach the script without a placeholder: by what is started, how often and where."""


def pack_input(base: Path, written: str, folder: Path, kept: bool = True) -> str:
    """Pack a file or folder into `folder/<sha256>.tar` and return the hash. Raises ValueError naming what is wrong.

    kept: False for the hash alone, which takes no room.
    """
    source = base / written
    shown = printable(written, 200)
    if not source.exists():
        raise ValueError(f"no such file or folder: {shown} (looked for {printable(str(source), 400)})")
    files = _files(source, _stored_name(written), folder)
    try:
        if not kept:
            with open(os.devnull, "wb") as nowhere:
                return _write(files, nowhere, shown)
        return _packed(files, folder, shown)
    except OSError as error:
        place = str(folder) if error.errno in NO_ROOM else error.filename
        where = f"{printable(str(place), 400)}: " if place not in (None, str(source)) else ""
        raise ValueError(f"{shown}: {where}{error.strerror or error}") from error


def _packed(files: Iterable[tuple[Path, str]], folder: Path, shown: str) -> str:
    """Write the archive into a folder, whole or not at all."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            digest = _write(files, file, shown)
        os.chmod(name, 0o644)
        os.replace(name, folder / f"{digest}.tar")
    finally:
        Path(name).unlink(missing_ok=True)
    return digest


def _stored_name(written: str) -> str:
    """The name in the script's folder: as written, where that lies inside the study's folder."""
    path = PurePosixPath(os.path.normpath(written))
    return path.name if path.is_absolute() or ".." in path.parts else str(path)


def _write(files: Iterable[tuple[Path, str]], file: Any, shown: str) -> str:
    """Write the archive; the hash is of the archive itself, which holds nothing that changes by itself."""
    hashed = _Hashed(file)
    total = count = 0
    with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path, inside in files:
            with open_regular(path) as content:
                info = tarfile.TarInfo(inside)
                info.size = os.fstat(content.fileno()).st_size
                info.mode = 0o755 if os.fstat(content.fileno()).st_mode & stat.S_IXUSR else 0o644
                total, count = total + info.size, count + 1
                if total > MAX_BYTES or count > MAX_FILES:
                    raise ValueError(
                        f"{shown}: more than {MAX_BYTES / 2**30:g} GiB or {MAX_FILES:,} files. Let the script read "
                        "large data where it lies, by a full path"
                    )
                archive.addfile(info, content)
    if count == 0:
        raise ValueError(f"{shown}: no file in it")
    return hashed.sum.hexdigest()


def _files(source: Path, name: str, into: Path) -> Iterator[tuple[Path, str]]:
    """(path, name in the archive) of every regular file, in order of name. Links are followed, as the script would.

    into: where archives are written, which is left out. Raises ValueError for a link to a folder that it lies in.
    """
    if not source.is_dir():
        yield source, name
        return
    for folder, folders, files in os.walk(source, followlinks=True):
        folders[:] = sorted(
            each for each in folders if each not in _SKIPPED and not _of_a_run(Path(folder) / each, into)
        )
        for path in (Path(folder) / each for each in folders):
            if path.is_symlink() and path.resolve() in _around(Path(folder), source):
                inside = PurePosixPath(name) / path.relative_to(source).as_posix()
                raise ValueError(f"{printable(str(inside), 200)}: a link to a folder that it lies in")
        for each in sorted(files):
            path = Path(folder) / each
            inside = PurePosixPath(name) / path.relative_to(source).as_posix()
            yield path, str(inside)


def _of_a_run(folder: Path, into: Path) -> bool:
    """Whether this is a run folder, a bundle, or the folder that archives are written to."""
    run = RunPaths(folder)
    written_to = not folder.is_symlink() and folder.resolve() == into.resolve()
    return written_to or run.lock.exists() or (run.plan.exists() and run.study.exists())


def _around(folder: Path, source: Path) -> set[Path]:
    """Every folder that a folder of the source lies in, by the path on which it was reached and by its own."""
    on_the_way = [folder, *(up for up in folder.parents if up.is_relative_to(source))]
    return {outer for each in on_the_way for outer in (each.resolve(), *each.resolve().parents)}


class _Hashed(io.RawIOBase):
    """Writes on, and hashes what it writes."""

    def __init__(self, file: Any) -> None:
        self._file, self.sum = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sum.update(data)
        return int(self._file.write(data))


def template_variables(work: ScriptWorkload, base: Path) -> set[str]:
    """Names that the templates use, `params.lr` included. Raises ValueError naming the template."""
    from jinja2 import TemplateError, meta, nodes
    from jinja2.sandbox import SandboxedEnvironment

    found: set[str] = set()
    for name in work.templates:
        try:
            tree = SandboxedEnvironment().parse(read_text(base / name, _TEMPLATE_BYTES))
        except (OSError, ValueError) as error:
            raise ValueError(f"workload.templates: {name}: {getattr(error, 'strerror', None) or error}") from error
        except TemplateError as error:
            raise ValueError(f"workload.templates: {name}: {error}") from error
        found |= meta.find_undeclared_variables(tree)
        for node in tree.find_all(nodes.Getattr):
            if isinstance(node.node, nodes.Name) and node.node.name == "params":
                found.add(f"params.{node.attr}")
    return found


def unreached(study: StudySpec, base: Path) -> list[str]:
    """A problem for each swept field that reaches neither arguments, environment nor a file of the script."""
    problems = []
    for where, fields, work in _swept(study):
        if not isinstance(work, ScriptWorkload):
            continue
        try:
            reached = work.placeholders() | work.carried() | template_variables(work, base)
        except ValueError as error:
            return [str(error)]
        for field in fields:
            name = field.removeprefix("workload.").removeprefix("layout.")
            if not _reaches(name, reached):
                problems.append(
                    f"{where}.{field}: reaches the script by neither arguments, environment nor a file, so all "
                    f"points would be equal. Use {{{name}}} in workload.command, environment or config_files"
                )
    return problems


def unexpressed(cells: Iterable[Cell]) -> list[str]:
    """A problem for each cell whose layout a file of the planner cannot express, whatever the device."""
    problems = []
    for cell in cells:
        if isinstance(cell.workload, ScriptWorkload):
            try:
                planned_contents(cell.workload, cell.layout, cell.dtype, cell.nodes, on_cpu=False)
            except ValueError as error:
                problems.append(str(error))
    return list(dict.fromkeys(problems))


def misplaced(study: StudySpec) -> list[str]:
    """A problem for launcher srun on a target without Slurm, and for weak scaling of a throughput that counts steps."""
    problems = []
    elsewhere = next((target for target in study.targets if target.kind != "slurm"), None)
    for name, experiment in study.experiments.items():
        work = _with(study.workload, experiment.base)
        if not isinstance(work, ScriptWorkload):
            continue
        if work.launcher == "srun" and elsewhere is not None:
            problems.append(
                f"workload.launcher: srun requires targets of kind slurm, got {elsewhere.kind} "
                f"({printable(elsewhere.name)}). Use torchrun"
            )
        if isinstance(experiment, WeakScaling) and experiment.grow in ("dp", "nodes") and work.counted == "step":
            problems.append(
                f"experiments.{name}: throughput counts steps, and more ranks make no more of them. "
                "Set workload.tokens_per_step, or items_per_step and unit"
            )
    return list(dict.fromkeys(problems))


def written_twice(study: StudySpec, base: Path) -> list[str]:
    """A problem for each file that two fields name, of which the script would find one alone."""
    problems = []
    for work in _works(study):
        named = {_stored_name(written) for written in work.inputs if (base / written).is_file()}
        rendered = {_stored_name(name.removesuffix(TEMPLATE_SUFFIX)) for name in work.templates}
        written = {_stored_name(name): field for field, name in _written(work)}
        twice = [(name, "workload.inputs", "workload.templates") for name in named & rendered]
        for name in written:
            twice += [(name, "workload.inputs", written[name])] if name in named else []
            twice += [(name, "workload.templates", written[name])] if name in rendered else []
        problems += [
            f"{last}: {printable(name, 200)} would replace the file of that name of {first}. Leave one of the two out, "
            "or name one otherwise"
            for name, first, last in sorted(twice)
        ]
    return list(dict.fromkeys(problems))


def replaced_notes(study: StudySpec, base: Path) -> list[str]:
    """Say which files of folders among a script's inputs are replaced by files that the study has written."""
    notes = []
    for work in _works(study):
        folders = [(base / written, PurePosixPath(_stored_name(written))) for written in work.inputs]
        for field, name in _written(work):
            place = PurePosixPath(_stored_name(name))
            for source, stored in folders:
                if place.is_relative_to(stored) and source.is_dir() and (source / place.relative_to(stored)).is_file():
                    shown = printable(str(source / place.relative_to(stored)), 400)
                    notes.append(f"{shown} is replaced in the script's folder by the file of that name of {field}")
    return list(dict.fromkeys(notes))


def _written(work: ScriptWorkload) -> list[tuple[str, str]]:
    """(field, name) of each file that the study has written."""
    planned = [("workload.planned_files", name) for name in work.planned_files]
    return [*planned, *(("workload.config_files", name) for name in work.config_files)]


def _works(study: StudySpec) -> Iterator[ScriptWorkload]:
    """Each script as an experiment or a point of it starts it."""
    for experiment in study.experiments.values():
        overrides: list[Mapping[str, Any]] = [{}]
        if isinstance(experiment, Sweep):
            overrides += [{field: value} for field, values in experiment.over.items() for value in values]
        elif isinstance(experiment, Optimization):
            overrides = [experiment.baseline | changed for changed in ({}, *experiment.variants.values())]
        for changed in overrides:
            work = _with(study.workload, experiment.base | dict(changed))
            if isinstance(work, ScriptWorkload):
                yield work


def _reaches(name: str, reached: set[str]) -> bool:
    top = name.partition(".")[0]
    if name in reached or name.startswith("env.") or (top in _BY_NATURE and top != "params"):
        return True
    if name == "params" or top not in ("params", "tp", "pp", "strategy", "dtype", *FIELDS):
        return True  # measured otherwise, or refused elsewhere
    return name == "tp" and "ranks" in reached


def _swept(study: StudySpec) -> Iterator[tuple[str, list[str], Any]]:
    """(where, fields that differ between points, workload) of each experiment."""
    for name, experiment in study.experiments.items():
        base = _with(study.workload, experiment.base)
        where = f"experiments.{name}"
        if isinstance(experiment, Sweep):
            firsts = {field: values[0] for field, values in experiment.over.items()}
            yield f"{where}.over", list(experiment.over), _with(base, firsts)
        elif isinstance(experiment, StrongScaling | WeakScaling) and experiment.grow in ("tp", "pp"):
            yield f"{where}.grow", [experiment.grow], base
        elif isinstance(experiment, Optimization):
            for variant, overrides in experiment.variants.items():
                yield f"{where}.variants.{variant}", list(overrides), _with(base, experiment.baseline | overrides)


def _with(work: Any, overrides: Mapping[str, Any]) -> Any:
    """The workload with whatever of the overrides concerns what is started."""
    if not isinstance(work, ScriptWorkload):
        return work
    changed: dict[str, Any] = {}
    for dotted, value in overrides.items():
        field, _, entry = dotted.removeprefix("workload.").partition(".")
        if field in STARTED and not entry:
            changed[field] = {**work.params, **value} if field == "params" and isinstance(value, dict) else value
    try:
        return type(work).model_validate(work.model_dump() | changed)
    except ValueError:
        return work
