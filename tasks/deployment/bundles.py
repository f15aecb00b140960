"""Bundles: what is served, at which level, and the evidence that it may be.

    # ValueError: nothing may be served
    bundle = make_bundle(wanted, model, target, folder, cache, judge, fit_text, say)    # <folder>/bundle.json
    save_bundle(bundle, bundles)                                                # <bundles>/<model>-<id>/bundle.json
    bundle = read_bundle(bundles, "tiny-stdlib-3f2a9c1d")

The level that was asked for is measured on the target's hardware with all milder ones. One whose answers lose more than
`max_loss` is not deployed: the next milder one is, down to the unchanged weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from configs.common.base import WrongArgument, content_hash, utc_now, write_atomically
from configs.common.execution import Dtype, Layout
from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.printable import file_slug
from configs.plans.paths import RunPaths
from configs.plans.plan import PlannedModel
from configs.serving.deployment import LEVEL_ORDER, LevelCheck, OptimizationLevel, ServingBundle
from configs.serving.settings import GROUP_TIMEOUT_SECONDS
from configs.targets.target import LocalTarget, SlurmTarget, SshTarget
from configs.workloads import descriptor_of
from engine.planner.architecture import Architecture
from engine.planner.families import read_architecture
from reports.experiments.compression import MOST_LOSS
from tasks.checks.layouts import check_layout
from tasks.checks.verification import kind_of
from tasks.deployment.level_checks import check_levels
from tasks.models.model_cache import load_manifest
from tasks.planning.study_models import model_spec, planned_model
from tasks.providers.giving_back import Say

Judge = Callable[[str, Layout, Dtype], tuple[str, str]]
"""Compares a model's answers in a layout with unmodified transformers: the verdict's word, and its reason."""
_MAX_LENGTH = 2048
_FILE = "bundle.json"


@dataclass(frozen=True)
class WantedBundle:
    """What a user asks for. from_run: folder of the study that layout, precision and batch were taken from."""

    model: str
    level: OptimizationLevel = "none"
    layout: Layout = field(default_factory=Layout)
    dtype: Dtype = "bfloat16"
    max_loss: float = MOST_LOSS
    max_sequences: int = 32
    max_length: int | None = None
    group_timeout_seconds: float = GROUP_TIMEOUT_SECONDS
    name: str | None = None
    from_run: str | None = None


def resolved_model(written: str, cache: Path, base: Path) -> PlannedModel:
    """Find a model and bring its files. Raises WrongArgument naming --model, TransientFetchError."""
    try:
        return planned_model(model_spec(written, base), 0, cache, base)
    except ValueError as error:
        raise WrongArgument(f"--model: {str(error).replace('models[0].id: ', '', 1)}") from error


def make_bundle(
    wanted: WantedBundle,
    model: PlannedModel,
    target: LocalTarget | SshTarget | SlurmTarget,
    folder: Path,
    cache: Path,
    judge: Judge | None,
    fit_text: str,
    say: Say,
    nodes: int = 1,
) -> ServingBundle:
    """Measure, choose the level and gather the evidence. folder: of the measuring run. nodes: over which it is cut.

    The evidence stays in that folder, too, whether or not the bundle is served in the end.
    judge: None: the layout is not compared with transformers. Raises ValueError where answers are wrong.
    """
    manifest = load_manifest(Path(model.manifest))
    kind = kind_of(manifest)
    check_layout(wanted.layout, manifest, model.name)
    verdict, reason = ("not judged", "--no-verify") if judge is None else judge(wanted.model, wanted.layout, "float32")
    if verdict == "defect":
        raise ValueError(f"{model.name}: answers differ from transformers', so nothing is deployed: {reason}")
    length = served_length(read_architecture(manifest.config, manifest.identity), wanted.max_length)
    levels = LEVEL_ORDER[1 : LEVEL_ORDER.index(wanted.level) + 1]
    found, requests = check_levels(model, target, levels, wanted.dtype, folder, cache, wanted.max_loss, say,
                                   wanted.layout.tp, nodes, length, wanted.group_timeout_seconds)  # fmt: skip
    level = chosen_level(wanted.level, found, say)
    compression = () if level == "none" else found[level].passes
    made_of = {
        "identity": model.identity,
        "layout": wanted.layout.model_dump(),
        "dtype": wanted.dtype,
        "passes": compression,
        "length": length,
        "sequences": wanted.max_sequences,
        "group_timeout_seconds": wanted.group_timeout_seconds,
        "name": wanted.name,
        # The evidence is of this hardware: another target's has other speeds, and answers that end in other ties.
        "target": [target.kind, target.name, target.device],
    }
    bundle = ServingBundle.model_validate(
        {
            "id": content_hash(made_of, 12),
            "model": wanted.name or model.name,
            "identity": model.identity,
            "manifest": model.manifest,
            "kind": kind,
            "files": manifest.files,
            "layout": wanted.layout,
            "dtype": wanted.dtype,
            "asked_level": wanted.level,
            "level": level,
            "compression": compression,
            "checks": tuple(found.values()),
            "verdict": verdict,
            "verdict_text": reason,
            "fit_text": fit_text,
            "first_requests": requests[level],
            "max_sequences": wanted.max_sequences,
            "max_length": length,
            "group_timeout_seconds": wanted.group_timeout_seconds,
            "from_run": wanted.from_run,
            "created_at": utc_now(),
        }
    )
    write_atomically(folder / _FILE, bundle.model_dump_json(indent=1))
    return bundle


def served_length(architecture: Architecture, wanted: int | None) -> int:
    """Return the tokens of the longest prompt and answer that are served. wanted: by the user; None: chosen here."""
    # Not a key of config.json, which may leave it to the family's default.
    limit = architecture.max_positions if wanted is None else architecture.position_limit
    length = _MAX_LENGTH if wanted is None else wanted
    return length if limit is None else min(limit, length)


def chosen_level(asked: OptimizationLevel, checks: dict[OptimizationLevel, LevelCheck], say: Say) -> OptimizationLevel:
    """Return the asked level, or the next milder one whose answers are within bounds; says so."""
    for level in reversed(LEVEL_ORDER[: LEVEL_ORDER.index(asked) + 1]):
        check = checks[level]
        if check.refused is None:
            if level not in ("none", asked):
                say(f"{level} is deployed in its place: {check.loss_text}")
            elif level == "none" and asked != "none":
                say("the unchanged weights are deployed in its place")
            if level != "none" and not check.passes:
                say(f"{level}: this hardware gains from no pass, so the weights stay unchanged")
            elif check.speed is not None and check.speed < 1:
                say(f"{level}: {check.speed:.2f} times the speed of the unchanged weights at batch 1")
            return level
        passes = f" ({'+'.join(check.passes)})" if check.passes else ""
        say(f"{level}{passes} is not deployed: {check.refused}")
    raise AssertionError("the unchanged weights are never refused")


def bundle_name(bundle: ServingBundle) -> str:
    """Return the folder of a bundle: `tiny-stdlib-3f2a9c1d5e6f`."""
    return f"{file_slug(bundle.model)[:40]}-{bundle.id}"


def save_bundle(bundle: ServingBundle, bundles: Path, replaces: bool = True) -> None:
    """Write a bundle.

    replaces: older evidence of the same bundle, as once servers have been tested with this. False: older evidence
    stays, because servers that run were tested with that.
    """
    folder = bundles / bundle_name(bundle)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if replaces or not (folder / _FILE).exists():
        write_atomically(folder / _FILE, bundle.model_dump_json(indent=1))


def read_bundle(bundles: Path, name: str) -> ServingBundle:
    """Read a bundle by its folder's name. Raises ValueError, FileNotFoundError."""
    return read_model(bundles / name / _FILE, ServingBundle, PLAN_BYTES)


def wanted_of_run(run: Path, wanted: WantedBundle) -> WantedBundle:
    """Return what a study recommends: model, layout, precision, and batch. Raises ValueError where it decides nothing.

    A level that is named beside --from stays; so does a model, which must be one of the study's. What a study
    recommends for training says nothing of serving, and the weights that it trained are not the model's.
    """
    from reports.json_form import run_answers
    from reports.reading.devices import load_comparable

    study = load_comparable(RunPaths(run.absolute()))
    specs = {model.name: model for model in study.plan.models}
    trained = False
    for decision in run_answers(study).decisions:
        if decision.chosen is None:
            continue
        result = study.cells[decision.chosen.key]
        cell = result.cell
        if descriptor_of(cell.workload).trains:
            trained = True
            continue
        planned = next((model for model in specs.values() if model.identity == cell.model), None)
        if planned is None or cell.engine != "rankwise" or (wanted.model and wanted.model not in (planned.name, "")):
            continue
        level = wanted.level
        passes = cell.compression
        if not level or level == "none":
            level = _level_of(passes, run)
        batch = getattr(cell.workload, "batch_size", wanted.max_sequences)
        return WantedBundle(
            model=as_written(planned.identity, planned.manifest),
            level=level,
            layout=cell.layout,
            dtype=cell.dtype,
            max_loss=wanted.max_loss,
            max_sequences=max(1, batch),
            max_length=wanted.max_length,
            group_timeout_seconds=wanted.group_timeout_seconds,
            name=wanted.name or planned.name,
            from_run=str(run),
        )
    what = "a way to train, none to serve" if trained else "nothing for this model"
    raise ValueError(f"--from {run}: the study recommends {what}. See its report, or name --model")


def can_be_cut(layout: Layout, nodes: int) -> bool:
    """Return whether a server over several nodes has a part of its one replica on each."""
    return nodes == 1 or (layout.dp == 1 and layout.ranks % nodes == 0)


def _level_of(passes: Sequence[str], run: Path) -> OptimizationLevel:
    """Return the level that a study measured. Raises ValueError for passes that are none: it decided nothing else."""
    found = next((one for one in LEVEL_ORDER if tuple(passes) in ((one,), ())), None)
    if found is None:
        raise ValueError(
            f"--from {run}: the study recommends `compression: {'+'.join(passes)}`, which is no level of a deployment. "
            f"Name {' or '.join(LEVEL_ORDER[1:])} with --optimization"
        )
    return found


def as_written(identity: str, manifest: str) -> str:
    """Return how a model is named so that it is found again: a folder's is that of its manifest."""
    return load_manifest(Path(manifest)).folder if identity.startswith("folder:") else identity
