"""A reference's answers in one file, so that a model can be verified where, or when, transformers is not run.

    save_reference(Path("good.zip"), run, plan, machine_fingerprint())      # after a verification
    saved = read_saved_reference(Path("good.zip"))
    place_reference(saved, run, key, cell)                 # the record of that cell, as if it had been measured

The file is a zip archive: reference.json (model, versions, the record), samples.npz, prompts.jsonl, and where they
exist tokenizer.json and completions.jsonl. No Prefect here.
"""

import io
import zipfile
import zlib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import Field

from configs.common.base import Frozen, canonical_json, write_atomically
from configs.common.files.reading import (
    PLAN_BYTES,
    SAMPLES_BYTES,
    TEXT_BYTES,
    check_regular,
    parse_json,
    read_bytes,
    read_json,
    read_model,
)
from configs.plans.model_manifest import ModelManifest, read_model_manifest
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import MAX_RECORD_BYTES, Record, SchemaError, Status, check_schema, read_record
from configs.spec.cell import Cell
from configs.workloads.prompted import PromptedWorkload

_ABOUT, _SAMPLES, _PROMPTS = "reference.json", "samples.npz", "prompts.jsonl"
_TOKENIZER, _COMPLETIONS = "tokenizer.json", "completions.jsonl"
_DAMAGED = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError, NotImplementedError, ValueError)


class AboutReference(Frozen):
    """What the answers are of, and of which program."""

    schema_version: int
    saved_on: dict[str, Any] = Field(
        description="machine and versions, as `tasks.checks.environment.machine_fingerprint` has them"
    )
    model: str = Field(description="identity of the model")
    model_name: str
    vocabulary: int | None
    record: Record
    environment: dict[str, Any]


@dataclass(frozen=True)
class SavedReference:
    """A reference file, read."""

    path: Path
    about: AboutReference
    samples: bytes
    prompts: bytes
    tokenizer: bytes | None
    completions: bytes | None

    @property
    def workload(self) -> PromptedWorkload:
        """What the reference was asked."""
        workload = self.about.record.cell.workload
        assert isinstance(workload, PromptedWorkload)
        return workload

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence; None: that of the prompts."""
        longest = self.workload.longest_tokens
        return None if longest is None else self.workload.positions(longest)


def save_reference(path: Path, run: RunPaths, plan: Plan, saved_on: dict[str, Any]) -> None:
    """Write the reference's record of a verification, with all that its answers depend on.

    Raises OSError, and ValueError where there are no answers to save.
    """
    key = next(point.cell for point in plan.experiments[0].points if point.baseline)
    found = run.record(key, "timed", 0, 1)
    record = read_record(found) if found.exists() else None
    if record is None or record.status is not Status.COMPLETED:
        raise ValueError(f"{path}: not written, because the reference has no answers")
    workload = plan.cells[key].workload
    assert isinstance(workload, PromptedWorkload)
    [model] = plan.models
    manifest = read_model(Path(model.manifest), ModelManifest, PLAN_BYTES)
    environment = run.environment(record.environment) if record.environment else None
    about = AboutReference(
        schema_version=record.schema_version,
        saved_on=saved_on,
        model=model.identity,
        model_name=model.name,
        vocabulary=answer_vocabulary_of(manifest),
        record=record,
        environment=read_json(environment) if environment else {},
    )
    members = {
        _ABOUT: about.model_dump_json(indent=1).encode(),
        _SAMPLES: read_bytes(found.with_suffix(".npz"), SAMPLES_BYTES),
        _PROMPTS: read_bytes(run.inputs / f"{workload.prompts}.jsonl", TEXT_BYTES),
        _TOKENIZER: _content(Path(manifest.folder) / "tokenizer.json"),
        _COMPLETIONS: _content(_completions_beside(found)),
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
        for name, content in members.items():
            if content is not None:
                writer.writestr(name, content)
    write_atomically(path, archive.getvalue())


def read_saved_reference(path: Path) -> SavedReference:
    """Read a reference file. Raises ValueError naming it where it is missing, damaged, newer or something else."""
    try:
        check_regular(path, SAMPLES_BYTES)
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > SAMPLES_BYTES:
                raise ValueError(f"unpacked more than {SAMPLES_BYTES:,} bytes")
            data = parse_json(archive.read(_ABOUT), _ABOUT)
            about = AboutReference.model_validate(check_schema(data, path))
            names = archive.namelist()
            content = {name: archive.read(name) for name in (_SAMPLES, _PROMPTS)}
            extra = {name: archive.read(name) for name in (_TOKENIZER, _COMPLETIONS) if name in names}
            workload = about.record.cell.workload
            assert isinstance(workload, PromptedWorkload)
            if workload.prompts != sha256(content[_PROMPTS]).hexdigest():
                raise ValueError(f"{_PROMPTS} has other prompts than those that were answered")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except SchemaError as error:
        raise ValueError(str(error)) from error
    except (*_DAMAGED, AssertionError, AttributeError) as error:
        raise ValueError(
            f"{path}: damaged, or not written by `rankwise verify --save-reference`. Save the reference again"
        ) from error
    return SavedReference(
        path, about, content[_SAMPLES], content[_PROMPTS], extra.get(_TOKENIZER), extra.get(_COMPLETIONS)
    )


def place_reference(saved: SavedReference, run: RunPaths, key: str, cell: Cell) -> None:
    """Put the saved answers where the plan expects the record of `cell`; its figures say whose they are.

    The cell names the model that is verified: the answers are those that it should give.
    """
    target = run.record(key, "timed", 0, 1)
    target.parent.mkdir(parents=True, exist_ok=True)
    record = saved.about.record
    whose = {"reference_model": saved.about.model, "reference_file": saved.path.name}
    record = record.model_copy(
        update={"key": key, "cell": cell, "repeat": 0, "attempt": 1, "figures": record.figures | whose}
    )
    assert len(record.model_dump_json(exclude={"rank_figures", "hosts"})) <= 2 * MAX_RECORD_BYTES
    if record.environment:
        run.environments.mkdir(exist_ok=True)
        write_atomically(run.environment(record.environment), canonical_json(saved.about.environment))
    write_atomically(target.with_suffix(".npz"), saved.samples)
    if saved.completions is not None:
        write_atomically(_completions_beside(target), saved.completions)
    write_atomically(target, record.model_dump_json())


def reference_in(inputs: Path, name: str) -> Path:
    """Return the place of a saved reference in a folder of inputs."""
    return inputs / f"{name}.zip"


def place_references(plan: Plan, run: RunPaths) -> None:
    """Put the answers of every saved reference that the study names where the plan expects its reference's record.

    Answers of a reference that it names no more are removed: no key of a cell says which reference was saved.
    """
    named: dict[str, list[str]] = {}
    for experiment in plan.experiments:
        key = next((point.cell for point in experiment.points if point.baseline), None)
        if experiment.kind == "correctness" and key is not None:
            named.setdefault(key, []).extend([experiment.reference] if experiment.reference is not None else [])
    for key, references in named.items():
        path, files = run.record(key, "timed", 0, 1), {reference_in(run.inputs, name).name for name in references}
        if _placed_from(path) not in (None, *files):
            for copy in (path, path.with_suffix(".npz"), _completions_beside(path)):
                copy.unlink(missing_ok=True)
        if references and not path.exists():
            place_reference(read_saved_reference(reference_in(run.inputs, references[0])), run, key, plan.cells[key])


def _placed_from(path: Path) -> str | None:
    """Return the file whose answers a record holds; None: it was measured, cannot be read, or is not there."""
    try:
        name = read_record(path).figures.get("reference_file")
    except (OSError, ValueError):
        return None
    return name if isinstance(name, str) else None


def _completions_beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}.completions_rank_0.jsonl")


def misfits(plan: Plan, inputs: Path) -> list[str]:
    """Return a problem for each experiment whose saved reference is of a model with another vocabulary."""
    problems = []
    for experiment in plan.experiments:
        model = next((model for model in plan.models if model.name == experiment.model), None)
        if experiment.reference is None or model is None or not model.manifest:
            continue
        about = read_saved_reference(reference_in(inputs, experiment.reference)).about
        vocabulary = answer_vocabulary_of(read_model_manifest(Path(model.manifest)))
        if vocabulary != about.vocabulary:
            problems.append(
                f"experiments.{experiment.name}.reference: vocabulary of {about.vocabulary} tokens "
                f"({about.model}), expected {vocabulary} of {model.name}. Use a reference of this model"
            )
    return problems


def answer_vocabulary_of(manifest: ModelManifest) -> int | None:
    """Rows of the embedding, by config.json."""
    text = manifest.config.get("text_config")
    size = manifest.config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def _content(path: Path) -> bytes | None:
    return read_bytes(path, TEXT_BYTES) if path.is_file() else None
