"""Verify a model in a layout against unmodified transformers, as a study of one experiment. Does not import Prefect.

verification = prepare_verification(asked, run, cache, base, saved=None)  # files and plan alone; ValueError
run_verification(verification, cache, notice, False)          # launches, records
study = load_study(run)                                       # judged by reports.correctness.section
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.execution import Dtype
from configs.plans.model_manifest import ModelManifest
from configs.plans.packing import pack_launches
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedExperiment, PlannedModel
from configs.plans.pooling import pooling_of
from configs.records.record import Record, Status, read_record
from configs.spec.experiments import Correctness
from configs.spec.measuring import Measuring
from configs.spec.study import ModelSpec, StudyError, StudySpec, study_yaml
from configs.workloads.encode import EncodeWorkload
from configs.workloads.generate import GenerateWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.planner.families import read_architecture
from engine.planner.memory.reference import STREAMED
from tasks.campaign.launches.jobs import run_job, write_job
from tasks.campaign.ledger import missing_measurements, set_aside_damaged
from tasks.campaign.records import failed_records
from tasks.checks.environment import check_environment
from tasks.checks.layouts import check_layout
from tasks.checks.verification_inputs import (
    VerificationSpec,
    check_readable,
    longest_positions,
    made_prompts,
    saved_inputs,
    with_tokenizer,
)
from tasks.models.model_cache import load_manifest
from tasks.models.saved_reference import SavedReference, place_reference
from tasks.planning.inputs import copy_inputs
from tasks.planning.predictions import with_predictions
from tasks.planning.study_models import model_spec, planned_model, resolved_note
from tasks.planning.study_plan import make_plan

BATCH_SIZE = 8
NUM_PROMPTS = 20
NEW_TOKENS = 32
NAME = "verify"
_ENCODERS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
_CELL_SECONDS, _GROUP_SECONDS = 3600.0, 300.0


@dataclass(frozen=True)
class Verification:
    """A plan that can be measured. `notes`: what a reader of the verdict must know.

    asked_cell, check_cell, reference_cell: keys; the check is the same layout in float32, None where it is the asked
    cell itself or was left out.
    """

    asked: VerificationSpec
    run: RunPaths
    plan: Plan
    notes: tuple[str, ...]
    asked_cell: str
    check_cell: str | None
    reference_cell: str

    @property
    def experiment(self) -> PlannedExperiment:
        """The one experiment of the plan."""
        return self.plan.experiments[0]

    def record(self, key: str) -> Record | None:
        """How a cell of the plan ended; None: it was not run."""
        path = self.run.record(key, "timed", 0, 1)
        return read_record(path) if path.exists() else None


def prepare_verification(
    asked: VerificationSpec, run: RunPaths, cache: Path, base: Path, saved: SavedReference | None
) -> Verification:
    """Make the run folder: model, prompts and plan.

    base: folder that relative paths start from. Raises ValueError for what cannot be verified, naming what could
    be; TransientFetchError for a model that the network does not give now.
    """
    run.inputs.mkdir(parents=True, exist_ok=True)
    spec = model_spec(asked.model, base)
    model = _resolved(spec, cache, base)
    manifest = load_manifest(Path(model.manifest))
    if asked.engine == "rankwise":  # the others' own rules are theirs
        check_layout(asked.layout, manifest, model.name)
    notes = [note for note in [resolved_note(spec, model)] if note is not None]
    if saved is not None:
        _check_kind(saved, manifest)
        tokenizer, prompts = saved_inputs(asked, saved, manifest, run, notes)
        num_prompts = saved.workload.num_prompts or NUM_PROMPTS
        new_tokens = getattr(saved.workload, "new_tokens", NEW_TOKENS)
        orders, positions = saved.workload.noise_orders, saved.positions
    else:
        num_prompts = asked.num_prompts or max(NUM_PROMPTS, asked.batch_size or 0)
        new_tokens, orders = asked.new_tokens or NEW_TOKENS, Correctness().noise_orders
        positions = longest_positions(asked, manifest)
        tokenizer = None
        if asked.prompts is not None:
            check_readable(asked.prompts, manifest)
            prompts = asked.prompts
        else:
            assert positions is not None
            # Only a decoder's new tokens follow the prompt; others have none, or a stack for them.
            room = positions - new_tokens if kind_of(manifest) == "decoder" else positions
            prompts = made_prompts(manifest, run, num_prompts, new_tokens, room)
    if tokenizer is not None:
        model = with_tokenizer(model, manifest, run.folder / "model", tokenizer)
    experiment = Correctness(
        prompts=num_prompts,
        new_tokens=new_tokens,
        positions=positions,
        layouts=[asked.layout],
        engines=[asked.engine],
        noise_orders=orders,
        dtypes=[asked.dtype],
    )
    plan = _plan(asked, spec, experiment, model, manifest, prompts, run)
    plan, left_out = _without_what_does_not_fit(plan, asked, run, cache, saved is not None)
    notes += left_out
    return _placed(asked, run, plan, saved, notes)


def run_verification(
    verification: Verification, cache: Path, notice: Callable[[str], None], reference_first: bool
) -> None:
    """Run what has no record yet. Where the asked cell fails, the rest is left, unless the reference came first."""
    plan, run = verification.plan, verification.run
    order = [verification.asked_cell, verification.check_cell, verification.reference_cell]
    if reference_first:
        order.insert(0, order.pop())
    measurements = missing_measurements(plan, set_aside_damaged(run), "timed", only_failed=False)
    launches = {
        launch.measurements[0].cell.key: launch for launch in pack_launches(measurements, "timed", 0, pack=False)
    }
    labels = {point.cell: point.label for point in verification.experiment.points}
    for key in filter(None, order):
        if key not in launches:
            continue
        notice(f"running {labels[key]}")
        job = write_job(launches[key], plan, run, cache)
        collected = run_job(job, run, notice)
        if collected.unreached:
            why = f"the launch failed to start: {collected.start_failure}"
            failed_records(run, job.name, collected.unreached, Status.FAILED, why)
        record = verification.record(key)
        failed = record is None or record.status is not Status.COMPLETED
        if failed and key != verification.check_cell:
            return


def _resolved(spec: ModelSpec, cache: Path, base: Path) -> PlannedModel:
    try:
        return planned_model(spec, 0, cache, base)
    except StudyError as error:
        raise ValueError(str(error).removeprefix("models[0].id: ")) from error


def _plan(
    asked: VerificationSpec,
    spec: ModelSpec,
    experiment: Correctness,
    model: PlannedModel,
    manifest: ModelManifest,
    prompts: Path,
    run: RunPaths,
) -> Plan:
    workload = _workload_of(manifest)(prompts=str(prompts.absolute()), batch_size=asked.batch_size or BATCH_SIZE)
    if isinstance(workload, EncodeWorkload):
        workload = workload.model_copy(update={"pooling": pooling_of(manifest) or workload.pooling})
    study = StudySpec(
        study=NAME,
        models=[spec],
        workload=workload,
        experiments={NAME: experiment},
        measuring=Measuring(
            repeats=1,
            warmup=0,
            min_seconds=0,
            min_passes=1,
            memory=False,
            cell_timeout_seconds=_CELL_SECONDS,
            group_timeout_seconds=_GROUP_SECONDS,
        ),
    )
    try:
        plan = make_plan(study, [model], copy_inputs(study, run, run.inputs), run.inputs)
    except StudyError as error:
        told = dict.fromkeys(_plain(problem, asked) for problem in error.problems)
        raise ValueError("\n".join(told)) from error
    write_atomically(run.study, study_yaml(study))
    return plan


def kind_of(manifest: ModelManifest) -> str:
    """Whether a model is a decoder, an encoder or an encoder-decoder; of an unknown family by its class."""
    config = manifest.config
    with suppress(ValueError):
        return read_architecture(config, manifest.identity).kind
    if config.get("is_encoder_decoder"):
        return "encoder_decoder"
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return "encoder" if name.endswith(_ENCODERS) and not name.endswith("LMHeadModel") else "decoder"


def _workload_of(manifest: ModelManifest) -> type[GenerateWorkload | EncodeWorkload | Seq2SeqWorkload]:
    """The workload whose answers a model is verified by."""
    kinds: dict[str, type[GenerateWorkload | EncodeWorkload | Seq2SeqWorkload]] = {
        "encoder": EncodeWorkload,
        "encoder_decoder": Seq2SeqWorkload,
    }
    return kinds.get(kind_of(manifest), GenerateWorkload)


def _check_kind(saved: SavedReference, manifest: ModelManifest) -> None:
    """Raise ValueError for a saved reference of another kind of model, whose answers cannot be compared."""
    expected, answered = _workload_of(manifest), saved.about.record.cell.workload
    if not isinstance(answered, expected):
        raise ValueError(
            f"{saved.path}: answers of a {answered.kind} workload ({saved.about.model}), "
            f"expected the model's {expected.model_fields['kind'].default}"
        )


def _plain(problem: str, asked: VerificationSpec) -> str:
    """A study's problem in the words of the command."""
    told = problem.removeprefix(f"experiments.{NAME} ").replace("workload.prompts: ", "--prompts: ")
    _, field, why = told.partition("workload.num_prompts: ")
    if not field:
        return told
    # Of a file with fewer prompts the number is the file's; --num-prompts does not raise it.
    of_the_file = asked.prompts is not None and not why.startswith(f"got {asked.num_prompts},")
    return f"{'--prompts' if of_the_file else '--num-prompts'}: {why}"


def _without_what_does_not_fit(
    plan: Plan, asked: VerificationSpec, run: RunPaths, cache: Path, saved: bool
) -> tuple[Plan, list[str]]:
    """The plan without the check in float32 where the planner says that the memory does not hold it, and the notes."""
    predictions = with_predictions(plan, run.inputs, cache).predictions
    reference = predictions[_reference_key(plan)]
    need = (reference.peak_memory_bytes or 0) / 2**30
    notes = [f"{STREAMED} ({need:.1f} GiB needed)"] if reference.fits is False and not saved else []
    key = _key(plan, "float32")
    if asked.dtype == "float32" or predictions[key].fits is not False:
        return plan, notes
    [experiment] = plan.experiments
    points = tuple(point for point in experiment.points if point.cell != key)
    kept = {
        "experiments": (experiment.model_copy(update={"points": points}),),
        "cells": {other: cell for other, cell in plan.cells.items() if other != key},
        "repeats": {other: count for other, count in plan.repeats.items() if other != key},
    }
    note = f"check in float32, which is more sensitive to small defects, skipped: {asked.layout} does not fit in memory"
    return plan.model_copy(update=kept), [*notes, note]


def _reference_key(plan: Plan) -> str:
    return next(point.cell for point in plan.experiments[0].points if point.baseline)


def _key(plan: Plan, dtype: Dtype) -> str:
    """The candidate in a precision."""
    points = plan.experiments[0].points
    return next(point.cell for point in points if not point.baseline and plan.cells[point.cell].dtype == dtype)


def _placed(
    asked: VerificationSpec,
    run: RunPaths,
    plan: Plan,
    saved: SavedReference | None,
    notes: list[str],
) -> Verification:
    """Write the plan, and the saved reference's record."""
    write_atomically(run.plan, plan.model_dump_json(indent=1))
    check_environment(run, accept=True)
    reference = _reference_key(plan)
    if saved is not None:
        place_reference(saved, run, reference, plan.cells[reference])
    asked_cell = _key(plan, asked.dtype)
    others = [key for key in plan.cells if key not in (asked_cell, reference)]
    return Verification(asked, run, plan, tuple(notes), asked_cell, others[0] if others else None, reference)
