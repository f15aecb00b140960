"""Verify a model in a layout against unmodified transformers, as a study of one experiment. Does not import Prefect.

    verification = prepare(asked, run, cache, base, saved=None)   # files and plan, nothing started; ValueError: refused
    measure(verification, cache, notice)                          # launches, records
    study = load_study(run)                                       # judged by reports.correctness.section

Where nobody gives prompts, they have lengths from a few tokens to a few hundred in mixed order, so that batches are
padded and the cache is used again. A model without a tokenizer gets one that reads numbers: token 17 is written `17`.
"""

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import configs
from configs.common.base import write_atomically
from configs.common.execution import Dtype, Engine, Layout
from configs.plans.model_manifest import ModelManifest
from configs.plans.packing import pack_launches
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedExperiment, PlannedModel
from configs.plans.record import Record, Status, read_record
from configs.spec.experiments import Correctness
from configs.spec.measuring import Measuring
from configs.spec.prompts import read_prompts
from configs.spec.study import ModelSpec, StudyError, StudySpec, study_yaml
from configs.workloads.encode import EncodeWorkload
from configs.workloads.generate import GenerateWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.planner.choice.search import divisors
from engine.planner.families import READERS, read_architecture
from tasks.campaign.jobs import run_job, write_job
from tasks.campaign.ledger import missing_measurements, read_ledger
from tasks.campaign.records import failed_records
from tasks.checks.machine import check_environment
from tasks.checks.saved_reference import SavedReference, answer_vocabulary_of, place_reference
from tasks.models.sources import load_manifest
from tasks.planning.inputs import copy_inputs, make_plan, planned_model
from tasks.planning.predictions import with_predictions

BATCH_SIZE = 4
NUM_PROMPTS = 20
NEW_TOKENS = 16
NAME = "verify"
_TEXT_CHARACTERS = (8, 60, 800)
_NUMBER_TOKENS = (2, 12, 192)
"""The shortest prompt, the next, and the longest: a batch is fed token by token as far as its shortest prompt goes,
so that one very short prompt is enough."""
_SPECIAL_TOKENS = 8
"""Room in the context for what a tokenizer adds to a text."""
_DEFAULT_POSITIONS = 2048
_ONE_RANK = Layout()
_CELL_SECONDS, _GROUP_SECONDS = 3600.0, 300.0


@dataclass(frozen=True)
class VerificationSpec:
    """What is to be verified. None: as the saved reference says, else the default."""

    model: str
    layout: Layout = _ONE_RANK
    engine: Engine = "rankwise"
    dtype: Dtype = "float32"
    prompts: Path | None = None
    num_prompts: int | None = None
    new_tokens: int | None = None


@dataclass(frozen=True)
class Verification:
    """A plan that can be measured. `notes`: what a reader of the verdict must know.

    asked_cell, check_cell, reference_cell: keys; the check is the same layout in float32, None where it is the asked
    cell itself or was left out.
    """

    asked: VerificationSpec
    run: RunPaths
    plan: Plan
    own_tokenizer: bool
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


def prepare(
    asked: VerificationSpec, run: RunPaths, cache: Path, base: Path, saved: SavedReference | None
) -> Verification:
    """Make the run folder: model, prompts and plan.

    base: folder that relative paths start from. Raises ValueError for what cannot be verified, naming what could
    be; TransientFetchError for a model that the network does not give now.
    """
    run.inputs.mkdir(parents=True, exist_ok=True)
    spec = _spec(asked.model, base)
    model = _resolved(spec, cache, base)
    manifest = load_manifest(Path(model.manifest))
    _check_layout(asked, manifest, model.name)
    notes: list[str] = []
    if saved is not None:
        tokenizer, prompts = _saved_inputs(asked, saved, manifest, run, notes)
        num_prompts = saved.workload.num_prompts or NUM_PROMPTS
        new_tokens = getattr(saved.workload, "new_tokens", NEW_TOKENS)
        orders, own_tokenizer = saved.workload.noise_orders, saved.about.own_tokenizer
    else:
        num_prompts, new_tokens = asked.num_prompts or NUM_PROMPTS, asked.new_tokens or NEW_TOKENS
        tokenizer, prompts = _inputs(asked, manifest, run, num_prompts, new_tokens)
        orders, own_tokenizer = Correctness().noise_orders, tokenizer is None
    if tokenizer is not None:
        model = _with_tokenizer(model, manifest, run.folder / "model", tokenizer)
    experiment = Correctness(
        prompts=num_prompts,
        new_tokens=new_tokens,
        layouts=[asked.layout],
        engines=[asked.engine],
        noise_orders=orders,
        dtypes=[asked.dtype],
    )
    plan = _plan(spec, experiment, model, manifest, prompts, run)
    plan, left_out = _without_what_does_not_fit(plan, asked, run, cache)
    notes += left_out
    return _placed(asked, run, plan, own_tokenizer, saved, notes)


def measure(verification: Verification, cache: Path, notice: Callable[[str], None], reference_first: bool) -> None:
    """Run what has no record yet. Where the asked cell fails, the rest is left, unless the reference came first."""
    plan, run = verification.plan, verification.run
    order = [verification.asked_cell, verification.check_cell, verification.reference_cell]
    if reference_first:
        order.insert(0, order.pop())
    measurements = missing_measurements(plan, read_ledger(run), "timed", only_failed=False)
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


def own_prompts(texts: list[str] | None, vocabulary: int, count: int, room: int) -> list[str]:
    """Prompts of mixed lengths, the same for the same arguments.

    texts: repeated to their lengths, in characters; None: numbers of random tokens. room: tokens that fit.
    """
    shortest, short, longest = _NUMBER_TOKENS if texts is None else _TEXT_CHARACTERS
    longest = min(longest, room if texts is None else room - _SPECIAL_TOKENS)
    if longest < shortest:
        raise ValueError(f"--new-tokens: leaves {room} tokens for prompts, which is too few. Use fewer --new-tokens")
    short = min(short, longest)
    generator = random.Random(0)
    steps = max(1, count - 2)
    lengths = [round(short * (longest / short) ** (step / steps)) for step in range(count - 1)]
    lengths.append(shortest if count > 1 else longest)
    generator.shuffle(lengths)
    if texts is None:
        return [" ".join(str(generator.randrange(vocabulary)) for _ in range(length)) for length in lengths]
    chosen = (texts[position % len(texts)] for position in range(count))
    return [(text * -(-length // len(text)))[:length] for text, length in zip(chosen, lengths, strict=True)]


def numbers_tokenizer(vocabulary: int) -> str:
    """A tokenizer.json that reads token ids written as numbers, with spaces between them."""
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {str(token): token for token in range(vocabulary)},
                "unk_token": "0",
            },
        }
    )


def _spec(written: str, base: Path) -> ModelSpec:
    """The model by folder, `owner/name@revision` or `synthetic:architecture@seed`."""
    if (base / written).is_dir():
        return ModelSpec(id=written, name=(base / written).resolve().name)
    if "@" in written and not written.startswith("synthetic:"):
        identifier, _, revision = written.rpartition("@")
        return ModelSpec(id=identifier, revision=revision)
    return ModelSpec(id=written)


def _resolved(spec: ModelSpec, cache: Path, base: Path) -> PlannedModel:
    try:
        return planned_model(spec, 0, cache, base)
    except StudyError as error:
        hint = ". Use owner/name@revision" if "needs `revision`" in str(error) else ""
        raise ValueError(str(error).removeprefix("models[0].id: ") + hint) from error


def _check_layout(asked: VerificationSpec, manifest: ModelManifest, name: str) -> None:
    """Refuse at once what our engine cannot do; the others' own rules are theirs."""
    if asked.engine != "rankwise":
        return
    kind, layout = manifest.config.get("model_type"), asked.layout
    if kind not in READERS:
        raise ValueError(f"{name}: config.json has the unknown model_type {kind!r}")
    architecture = read_architecture(manifest.config, name)
    if architecture.kind == "vision":
        raise ValueError(f"{name}: {kind} is an image model, but verify supports text models only")
    shared = architecture.kv_heads  # the width of the feed-forward may be shared out unevenly
    degrees = [degree for degree in divisors(architecture.heads) if shared % degree == 0 or degree % shared == 0]
    if layout.tp not in degrees:
        heads = f"{architecture.heads} attention heads ({architecture.kv_heads} of keys and values)"
        raise ValueError(
            f"--tp {layout.tp}: {heads} of {name} are not divisible by {layout.tp} ranks; "
            f"use one of: {', '.join(map(str, degrees))}"
        )
    # Each stage of an encoder-decoder holds layers of both.
    layers = min(architecture.layers, architecture.decoder_layers or architecture.layers)
    if layout.pp > layers:
        raise ValueError(f"--pp {layout.pp}: {name} has {layers} layers. Use at most {layers}")


def _inputs(
    asked: VerificationSpec, manifest: ModelManifest, run: RunPaths, count: int, new_tokens: int
) -> tuple[str | None, Path]:
    """A tokenizer where the model brings none, and the file of prompts."""
    vocabulary = answer_vocabulary_of(manifest)
    brings_tokenizer = (Path(manifest.folder) / "tokenizer.json").is_file()
    if asked.prompts is not None:
        if not brings_tokenizer:
            raise ValueError(
                f"--prompts: {manifest.identity} has no tokenizer.json. "
                "Leave --prompts out to verify with random tokens"
            )
        return None, asked.prompts
    if vocabulary is None:
        raise ValueError(f"{manifest.identity}: config.json has no vocab_size")
    known = (manifest.config.get(key) for key in ("max_position_embeddings", "n_positions"))
    positions = next((found for found in known if found), _DEFAULT_POSITIONS)
    texts = read_prompts(_shipped_prompts()) if brings_tokenizer else None
    lines = own_prompts(texts, vocabulary, count, int(positions) - new_tokens)
    path = run.inputs / "own.jsonl"
    write_atomically(path, "".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return None if brings_tokenizer else numbers_tokenizer(vocabulary), path


def _saved_inputs(
    asked: VerificationSpec, saved: SavedReference, manifest: ModelManifest, run: RunPaths, notes: list[str]
) -> tuple[str | None, Path]:
    """Tokenizer and prompts of a saved reference. Raises ValueError where model or request do not fit it."""
    work, about, file = saved.workload, saved.about, saved.path
    vocabulary = answer_vocabulary_of(manifest)
    if vocabulary != about.vocabulary:
        raise ValueError(
            f"{file}: vocabulary of {about.vocabulary} tokens ({about.model}), expected the model's {vocabulary}"
        )
    if asked.prompts is not None:
        raise ValueError(
            f"--prompts: {file} contains its own prompts. Leave --prompts out, or save a reference with these prompts"
        )
    for option, given, held in (
        ("--num-prompts", asked.num_prompts, work.num_prompts),
        ("--new-tokens", asked.new_tokens, getattr(work, "new_tokens", asked.new_tokens)),
    ):
        if given not in (None, held):
            raise ValueError(
                f"{option} {given}: {file} was saved with {held}. Leave it out, or save the reference again"
            )
    if asked.dtype not in work.noise_dtypes:
        raise ValueError(
            f"--dtype {asked.dtype}: {file} contains the noise of {', '.join(work.noise_dtypes)} only. "
            f"Save it again with --dtype {asked.dtype}"
        )
    own = Path(manifest.folder) / "tokenizer.json"
    if about.own_tokenizer and saved.tokenizer is not None and own.is_file() and own.read_bytes() != saved.tokenizer:
        notes.append(f"the model's tokenizer.json differs from that of {file.name}; the latter was used")
    path = run.inputs / "own.jsonl"
    write_atomically(path, saved.prompts)
    return saved.tokenizer.decode() if saved.tokenizer is not None else None, path


def _shipped_prompts() -> Path:
    return Path(configs.__file__).parent / "studies" / "prompts.jsonl"


def _with_tokenizer(model: PlannedModel, manifest: ModelManifest, folder: Path, tokenizer: str) -> PlannedModel:
    """The model with this tokenizer beside links to its files. It is the same model still."""
    folder.mkdir()
    for source in Path(manifest.folder).iterdir():
        if source.is_file() and source.name != "tokenizer.json":
            os.symlink(source.resolve(), folder / source.name)
    write_atomically(folder / "tokenizer.json", tokenizer)
    path = folder.with_name("manifest.json")
    write_atomically(path, manifest.model_copy(update={"folder": str(folder.resolve())}).model_dump_json())
    return model.model_copy(update={"manifest": str(path.resolve())})


def _plan(
    spec: ModelSpec, experiment: Correctness, model: PlannedModel, manifest: ModelManifest, prompts: Path, run: RunPaths
) -> Plan:
    study = StudySpec(
        study=NAME,
        models=[spec],
        workload=_workload_of(manifest)(prompts=str(prompts.absolute()), batch_size=BATCH_SIZE),
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
        raise ValueError("\n".join(_plain(problem) for problem in error.problems)) from error
    write_atomically(run.study, study_yaml(study))
    return plan


def kind_of(manifest: ModelManifest) -> str:
    """Whether a model is a decoder, an encoder or an encoder-decoder; an unknown one is taken for a decoder."""
    known = manifest.config.get("model_type") in READERS
    return read_architecture(manifest.config, manifest.identity).kind if known else "decoder"


def _workload_of(manifest: ModelManifest) -> type[GenerateWorkload | EncodeWorkload | Seq2SeqWorkload]:
    """The workload whose answers a model is verified by."""
    kinds: dict[str, type[GenerateWorkload | EncodeWorkload | Seq2SeqWorkload]] = {
        "encoder": EncodeWorkload,
        "encoder_decoder": Seq2SeqWorkload,
    }
    return kinds.get(kind_of(manifest), GenerateWorkload)


def _plain(problem: str) -> str:
    """A study's problem in the words of the command."""
    return problem.removeprefix(f"experiments.{NAME} ").replace("workload.prompts: ", "--prompts: ")


def _without_what_does_not_fit(
    plan: Plan, asked: VerificationSpec, run: RunPaths, cache: Path
) -> tuple[Plan, list[str]]:
    """The plan without the check in float32 where the planner says that the memory does not hold it, and the note."""
    if asked.dtype == "float32":
        return plan, []
    key = _key(plan, "float32")
    prediction = with_predictions(plan, run.inputs, cache).predictions[key]
    if prediction.fits is not False:
        return plan, []
    [experiment] = plan.experiments
    points = tuple(point for point in experiment.points if point.cell != key)
    kept = {
        "experiments": (experiment.model_copy(update={"points": points}),),
        "cells": {other: cell for other, cell in plan.cells.items() if other != key},
        "repeats": {other: count for other, count in plan.repeats.items() if other != key},
    }
    note = f"check in float32, which is more sensitive to small defects, skipped: {asked.layout} does not fit in memory"
    return plan.model_copy(update=kept), [note]


def _key(plan: Plan, dtype: Dtype) -> str:
    """The candidate in a precision."""
    points = plan.experiments[0].points
    return next(point.cell for point in points if not point.baseline and plan.cells[point.cell].dtype == dtype)


def _placed(
    asked: VerificationSpec,
    run: RunPaths,
    plan: Plan,
    own_tokenizer: bool,
    saved: SavedReference | None,
    notes: list[str],
) -> Verification:
    """Write the plan, and the saved reference's record."""
    write_atomically(run.plan, plan.model_dump_json(indent=1))
    check_environment(run, accept=True)
    reference = next(point.cell for point in plan.experiments[0].points if point.baseline)
    if saved is not None:
        place_reference(saved, run, reference, plan.cells[reference])
    asked_cell = _key(plan, asked.dtype)
    others = [key for key in plan.cells if key not in (asked_cell, reference)]
    return Verification(
        asked, run, plan, own_tokenizer, tuple(notes), asked_cell, others[0] if others else None, reference
    )
