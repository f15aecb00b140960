"""The files that a study names, found, checked and copied to its run folder. No Prefect here."""

import os
import shutil
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.common.base import sha256_of_file, write_atomically
from configs.common.files.reading import SAMPLES_BYTES, TEXT_BYTES, check_regular, read_text
from configs.common.printable import printable
from configs.hardware.price_file import read_price_file
from configs.inputs.examples import read_examples
from configs.inputs.prompts import read_prompts
from configs.plans.paths import RunPaths
from configs.spec.experiments import CompressionPasses, Correctness, Optimization, ServerLoad, Sweep
from configs.spec.study import StudyError, StudySpec
from tasks.models.dataset import HUB_PREFIX, write_dataset
from tasks.models.saved_reference import read_saved_reference
from tasks.planning.script_inputs import NO_ROOM, misplaced, pack_input, unreached, written_twice

_TEXT = ".txt"
_SUFFIXES = {
    "prompts": ".jsonl",
    "data": _TEXT,
    "validation_data": _TEXT,
    "tokenizer": ".json",
    "prices": ".yaml",
    "reference": ".zip",
    "trace": ".jsonl",
}
LEARNT = ("data", "validation_data")
"""Fields that name data to learn from, which may come from a hub."""
_PACKED = "inputs"
"""Field whose files and folders become an archive each."""
_EXAMPLES = {".jsonl": ".ndjson", ".ndjson": ".ndjson", ".npz": ".npz"}
"""Suffixes that say that data are rows, and what they have in the inputs, where every .jsonl holds prompts."""
_MAX_LEARNT = {_TEXT: SAMPLES_BYTES, ".ndjson": TEXT_BYTES, ".npz": SAMPLES_BYTES}
"""Bytes of data that ranks read (`engine.training`), by suffix in the inputs."""


def copy_inputs(study: StudySpec, run: RunPaths, base: Path, kept: bool = True) -> dict[str, str]:
    """Copy each file that the study names to `inputs/<sha256>.*`; returns path as written -> sha256.

    Relative paths are relative to the study file's folder. kept: False for a plan that is only looked at: files are
    linked, and archives of scripts hashed alone, which take no room. Raises StudyError for one that is missing, empty
    or malformed.
    """
    run.inputs.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    first: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    problems = []
    for dotted, field, written in named_inputs(study):
        kind = "data" if field in LEARNT else field  # one file may be prompts here and data there
        if (kind, written) in seen:
            continue
        seen.add((kind, written))
        try:
            digest = _copy_input(field, written, base, run.inputs, kept)
        except StudyError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(f"{dotted}: {error}")
        else:
            if names.setdefault(written, digest) != digest:
                problems.append(f"{dotted}: {_kept_otherwise(written, first[written])}")
            first.setdefault(written, dotted)
    problems += unreached(study, base) + misplaced(study) + written_twice(study, base)
    if problems:
        raise StudyError(problems)
    return names


def _kept_otherwise(written: str, where: str) -> str:
    """What is wrong with a path that another field has, too, whose file is packed or converted."""
    head, slash, name = written.rpartition("/")
    return (
        f"{printable(written, 200)} is the same path as in {where}, which keeps the file in another form. "
        f"Write one of the two as {printable(f'{head}{slash}./{name}', 200)}"
    )


def named_inputs(study: StudySpec) -> Iterator[tuple[str, str, str]]:
    """(dotted field, kind of input, path as written) wherever a study can name a file."""
    if study.prices is not None:
        yield "prices", "prices", study.prices
    yield from _inputs_of(study.workload.model_dump(), "workload")
    for name, experiment in study.experiments.items():
        where = f"experiments.{name}"
        yield from _inputs_of(experiment.base, f"{where}.base")
        if isinstance(experiment, Correctness) and experiment.reference is not None:
            yield f"{where}.reference", "reference", experiment.reference
        if isinstance(experiment, Optimization | CompressionPasses):
            yield from _inputs_of(experiment.baseline, f"{where}.baseline")
        if isinstance(experiment, Optimization):
            for variant, overrides in experiment.variants.items():
                yield from _inputs_of(overrides, f"{where}.variants.{variant}")
        if isinstance(experiment, ServerLoad):
            yield from _inputs_of(experiment.asked, where)
        if isinstance(experiment, Sweep | ServerLoad):
            for field, values in experiment.over.items():
                for value in values:
                    yield from _inputs_of({field: value}, f"{where}.over")


def _inputs_of(fields: dict[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
    for dotted, value in fields.items():
        field = dotted.removeprefix("workload.")  # `params.data` is a script's own
        if dotted == "workload" and isinstance(value, dict):
            yield from _inputs_of(value, f"{where}.workload")
        elif field in _SUFFIXES and isinstance(value, str):
            yield f"{where}.{dotted}", field, value
        elif field == _PACKED and isinstance(value, list | tuple):
            yield from ((f"{where}.{dotted}", field, item) for item in value if isinstance(item, str))


def _check_source(source: Path, written: str) -> None:
    shown = printable(written, 200)
    try:
        check_regular(source)
    except FileNotFoundError as error:
        raise ValueError(f"no such file: {shown} (looked for {printable(str(source), 400)})") from error
    except OSError as error:
        raise ValueError(f"{shown}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{shown}: {str(error).removeprefix(f'{source}: ')}") from error
    if source.stat().st_size == 0:
        raise ValueError(f"{shown}: empty file")


def _copy_input(field: str, written: str, base: Path, folder: Path, kept: bool) -> str:
    if field in LEARNT:
        return _copy_learnt(written, base, folder, kept)
    if field == _PACKED:
        return pack_input(base, written, folder, kept)
    source = base / written
    _check_source(source, written)
    digest = sha256_of_file(source)  # first: that of another content than the one looked at is found out by the copy
    if field == "prompts":
        read_prompts(source, None, None)
    if field == "reference":
        saved = read_saved_reference(source)
        if saved.workload.prompts is not None:
            write_atomically(folder / f"{saved.workload.prompts}.jsonl", saved.prompts)
    if field == "prices":
        read_price_file(source, written)
    _place(source, written, folder / f"{digest}{_SUFFIXES[field]}", kept)
    return digest


def _copy_learnt(written: str, base: Path, folder: Path, kept: bool) -> str:
    if written == "stdlib":
        return write_stdlib_text(folder)
    source, of_library = base / written, written.startswith(HUB_PREFIX)
    if not of_library:
        _check_source(source, written)
    if of_library or source.suffix == ".parquet":
        digest = write_dataset(written, base, folder)
        for made in folder.glob(f"{digest}.*"):
            _check_size(made, made.suffix, written)
        return digest
    suffix = _EXAMPLES.get(source.suffix.lower(), _TEXT)
    _check_size(source, suffix, written)
    digest = sha256_of_file(source)
    if suffix == ".ndjson":
        read_examples(source)
    if suffix == ".npz" and not zipfile.is_zipfile(source):
        raise ValueError(f"{written}: not an .npz file (write it with `numpy.savez`)")
    _place(source, written, folder / f"{digest}{suffix}", kept)
    return digest


def _check_size(path: Path, suffix: str, written: str) -> None:
    """Raise ValueError for data that the ranks would refuse to read, each of them, cell after cell."""
    size, most = path.stat().st_size, _MAX_LEARNT[suffix]
    if size > most:
        raise ValueError(f"{printable(written, 200)}: {size:,} bytes to learn from, expected at most {most:,}")


def _place(source: Path, written: str, destination: Path, kept: bool) -> None:
    """Copy a file, whole or not at all; a link does where the copy is not to be kept.

    destination: named by the file's hash. Raises ValueError where the file has another one by now.
    """
    if not kept:
        if not destination.is_symlink():
            destination.symlink_to(source.absolute())
        return
    if destination.exists() and destination.stat().st_size == source.stat().st_size:
        return
    handle, name = tempfile.mkstemp(dir=destination.parent, prefix=".")
    os.close(handle)
    try:
        shutil.copyfile(source, name)
        if sha256_of_file(Path(name)) != destination.stem:
            raise ValueError(f"{printable(written, 200)}: changed while it was read. Start again when nobody writes it")
        os.chmod(name, 0o644)
        os.replace(name, destination)
    except OSError as error:
        if error.errno in NO_ROOM:  # of the copy, and not of the file that it is of
            error.filename, error.filename2 = str(destination.parent), None
        raise
    finally:
        Path(name).unlink(missing_ok=True)


def write_stdlib_text(folder: Path) -> str:
    """All source of Python's standard library as installed, in order of path, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "site-packages", "__pycache__", "idle_test", "lib2to3"}
    texts = []
    for path in sorted(root.rglob("*.py")):
        if not skipped.intersection(path.relative_to(root).parts):
            texts.append(read_text(path, errors="replace"))
    handle, name = tempfile.mkstemp(dir=folder, prefix=".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write("\n".join(texts))
        digest = sha256_of_file(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, folder / f"{digest}.txt")
    finally:
        Path(name).unlink(missing_ok=True)
    return digest
