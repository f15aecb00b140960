"""The models that a study names: written as users write them, resolved, and their files brought. No Prefect here."""

from collections.abc import Callable
from pathlib import Path

from configs.plans.plan import Plan, PlannedModel, UnusableModel
from configs.spec.study import ModelSpec, StudyError, StudySpec
from tasks.models.model_cache import manifest_file
from tasks.models.sources import ModelContentError, hub_repository, resolve_model


class UnusableModelError(StudyError):
    """A model's files cannot be measured; a study with others is measured without it."""


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
