"""A study's models and files, found and copied; the plan made of them. No Prefect here.

Used before anything is started (`flows.precheck`) and again by the stages of a run.
"""

import functools
import os
import shutil
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.common.base import sha256_of_file, write_atomically
from configs.common.files.reading import SAMPLES_BYTES, TEXT_BYTES, check_regular, read_text
from configs.common.printable import printable
from configs.hardware.price_file import read_price_file
from configs.hardware.prices import Offer, TargetPrices, listed_offers, target_prices
from configs.inputs.examples import read_examples
from configs.inputs.prompts import numbered_prompts, read_prompts
from configs.plans.expand import expand
from configs.plans.model_manifest import read_model_manifest
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel, UnusableModel, check_plan_size, read_plan
from configs.spec.experiments import CompressionPasses, Correctness, Optimization, ServerLoad, Sweep
from configs.spec.study import ModelSpec, StudyError, StudySpec
from configs.targets.target import LocalTarget
from configs.workloads.prompted import PromptedWorkload
from tasks.models.dataset import HUB_PREFIX, write_dataset
from tasks.models.judgement import unusable_in
from tasks.models.model_cache import manifest_file
from tasks.models.saved_reference import misfits, read_saved_reference, reference_in
from tasks.models.sources import ModelContentError, hub_repository, resolve_model
from tasks.planning.script_inputs import NO_ROOM, misplaced, pack_input, unexpressed, unreached, written_twice

if TYPE_CHECKING:
    from tasks.planning.predictions import MachineOf

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


class UnusableModelError(StudyError):
    """A model's files cannot be measured; a study with others is measured without it."""


class UnusableModelsError(StudyError):
    """Our engine cannot measure some models of a plan under the workloads that the study gives them."""

    def __init__(self, models: list[UnusableModel]) -> None:
        super().__init__([model.reason for model in models])
        self.models = models


def model_spec(written: str, base: Path) -> ModelSpec:
    """Return the model by folder, `owner/name@revision` or `synthetic:architecture@seed`."""
    if (base / written).is_dir():
        return ModelSpec(id=written, name=(base / written).resolve().name)
    if "@" in written and not written.startswith("synthetic:"):
        identifier, _, revision = written.rpartition("@")
        return ModelSpec(id=identifier, revision=revision)
    return ModelSpec(id=written)


def planned_model(spec: ModelSpec, position: int, cache: Path, base: Path, before: Plan | None = None) -> PlannedModel:
    """Resolve one model and bring its files.

    before: the plan of an earlier run in the same folder, which pinned the commit of a repository without a revision.
    Raises StudyError for what no retry can mend (UnusableModelError where the model's files are at fault),
    `TransientFetchError` for what one may.
    """
    try:
        manifest = resolve_model(spec.id, revision_of(spec, base, before), cache, base)
    except ModelContentError as error:
        raise UnusableModelError([f"models[{position}].id: {error}"]) from error
    except ValueError as error:
        raise StudyError([f"models[{position}].id: {error}"]) from error
    return PlannedModel(name=spec.name, identity=manifest.identity, manifest=str(manifest_file(manifest, cache)))


def usable_models(
    study: StudySpec, resolve: Callable[[ModelSpec, int], PlannedModel]
) -> tuple[list[PlannedModel], tuple[UnusableModel, ...]]:
    """Resolve the models of a study; those whose files are at fault are returned with the reason.

    Raises StudyError naming every problem for names that are wrong, and where no model is usable.
    """
    models: list[PlannedModel] = []
    unusable: list[UnusableModel] = []
    problems: list[str] = []
    for position, spec in enumerate(study.models):
        try:
            models.append(resolve(spec, position))
        except UnusableModelError as error:
            unusable.append(UnusableModel(name=spec.name, reason=str(error)))
        except StudyError as error:
            problems += error.problems
    if problems or (unusable and not models):
        raise StudyError([*problems, *(model.reason for model in unusable)])
    return models, tuple(unusable)


def revision_of(spec: ModelSpec, base: Path, before: Plan | None) -> str | None:
    """Return the revision that a study asks for, else the commit that an earlier run has pinned; None: neither."""
    repository = hub_repository(spec.id, spec.revision, base)
    if spec.revision is not None or repository is None:
        return spec.revision
    pinned = (model.identity.rpartition("@") for model in (before.models if before is not None else ()))
    return next((commit for name, _, commit in pinned if name == repository), None)


def resolved_note(spec: ModelSpec, model: PlannedModel) -> str | None:
    """Return what a model's name was resolved to; None where the study file says it all."""
    written = spec.id if spec.revision is None else f"{spec.id}@{spec.revision}"
    if model.identity == written or model.identity.startswith("folder:") or spec.id.startswith("synthetic:"):
        return None
    random = ", random weights" if model.synthetic else ""
    return f"model {written} is {model.identity}{random}"


def make_plan(
    study: StudySpec,
    models: list[PlannedModel],
    inputs: dict[str, str],
    folder: Path,
    cache: Path | None = None,
    before: Plan | None = None,
    machine_of: "MachineOf | None" = None,
) -> Plan:
    """Expand a study whose inputs lie in `folder`; find the prices of its targets and what scaling is forecast over.

    cache: where the planner finds what it knows of this machine; without it no layouts are ranked. before: the plan of
    an earlier run in the same folder, whose ranking of layouts stays, and the prices of targets that are gone.
    machine_of: where cells would run, if not here.
    """

    @functools.cache  # each cell of a sweep asks for it, and a file may have a hundred megabytes
    def selected(prompts: str, variant: str | None, limit: int | None) -> int:
        return len(read_prompts(folder / f"{prompts}.jsonl", variant, limit))

    def count_prompts(workload: PromptedWorkload) -> int:
        return selected(str(workload.prompts), workload.variant, workload.limit)

    from tasks.planning.layouts import layout_choice, with_forecast  # the planner takes time to import

    choice = layout_choice(study, models, folder, cache, before, machine_of) if cache is not None else None
    named = [each.reference for each in study.experiments.values() if isinstance(each, Correctness) and each.reference]
    references = {written: read_saved_reference(reference_in(folder, inputs[written])).workload for written in named}
    plan = expand(study, models, inputs, count_prompts, choice, references)
    if problems := misfits(plan, folder) + unexpressed(plan.cells.values()):
        raise StudyError(problems)
    _need_tokenizers(plan, folder)
    if unusable := unusable_in(plan):
        raise UnusableModelsError([_placed(study, model) for model in unusable])
    if cache is not None:
        plan = with_forecast(plan, study, folder, cache)
    listed = None if cache is None else listed_offers(cache)
    plan = plan.model_copy(update={"prices": prices_of(study, inputs, folder, listed, before)})
    check_plan_size(plan)
    return plan


def prices_of(
    study: StudySpec,
    inputs: dict[str, str],
    folder: Path,
    listed: Sequence[Offer] | None,
    before: Plan | None = None,
) -> dict[str, TargetPrices]:
    """Return the prices of a study's targets: its own, those of its price file, those listed (None: as shipped).

    before: the plan of an earlier run in the same folder. Targets that it had and the study has no more keep their
    price, unless the price file names them.
    """
    own = read_price_file(folder / f"{inputs[study.prices]}.yaml", study.prices) if study.prices else ()
    found = {} if before is None else dict(before.prices)
    for name in found:
        stated = target_prices(LocalTarget(name=name), own, ())
        found[name] = stated if stated.price is not None else found[name]
    return found | {target.name: target_prices(target, own, listed) for target in study.targets}


def make_sound_plan(
    study: StudySpec,
    models: list[PlannedModel],
    unusable: tuple[UnusableModel, ...],
    inputs: dict[str, str],
    folder: Path,
    cache: Path | None,
    before: Plan | None,
) -> Plan:
    """As `make_plan`, without the models that our engine cannot measure; the plan names them, and those of `unusable`.

    Raises StudyError where no model is left.
    """
    try:
        plan = make_plan(study, models, inputs, folder, cache, before)
    except UnusableModelsError as error:
        found = {model.name for model in error.models}
        sound = [model for model in models if model.name not in found]
        if not sound:
            raise
        plan = make_plan(study, sound, inputs, folder, cache, before)
        unusable = (*unusable, *error.models)
    return plan.model_copy(update={"unusable": unusable})


def _placed(study: StudySpec, model: UnusableModel) -> UnusableModel:
    position = [spec.name for spec in study.models].index(model.name)
    return model.model_copy(update={"reason": f"models[{position}].id: {model.name}: {model.reason}"})


def earlier_plan(run: RunPaths) -> Plan | None:
    """The plan of an earlier run in this folder; None where there is none, or none that can be read."""
    try:
        return read_plan(run.plan)
    except (OSError, ValueError):
        return None


def _need_tokenizers(plan: Plan, folder: Path) -> None:
    """Raises StudyError for models that shall read texts, and bring nothing to read them by."""
    lacking = {model.identity for model in plan.models if _lacks_tokenizer(model)}
    texts = functools.cache(functools.partial(_are_texts, folder))
    for cell in plan.cells.values():
        if cell.workload.lacks_tokenizer and cell.model in lacking:
            raise StudyError(
                [f"workload.tokenizer: {cell.model} has no tokenizer.json. Set one, or leave data out to train on "
                 "random tokens"]
            )  # fmt: skip
        if not isinstance(cell.workload, PromptedWorkload) or cell.model not in lacking:
            continue
        if texts(cell.workload.prompts, cell.workload.variant, cell.workload.limit):
            raise StudyError(
                [f"workload.prompts: {cell.model} has no tokenizer.json. Leave prompts out to run random tokens, or "
                 "give `tokens` instead of `prompt` on each line"]
            )  # fmt: skip


def _lacks_tokenizer(model: PlannedModel) -> bool:
    """Whether a model is known to bring no tokenizer.json: one that is not fetched yet may have one."""
    if model.synthetic:
        return True
    path = Path(model.manifest)
    return path.is_file() and not (Path(read_model_manifest(path).folder) / "tokenizer.json").is_file()


def _are_texts(folder: Path, prompts: str | None, variant: str | None, limit: int | None) -> bool:
    """Whether no line of a file of prompts gives token ids."""
    if prompts is None:
        return False
    return all(prompt.tokens is None for prompt in numbered_prompts(folder / f"{prompts}.jsonl", variant, limit))


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
