"""Measure compression levels on the hardware that will serve them, and keep answers to test every server with.

    checks, requests = check_levels(model, target, levels, dtype, folder, cache, max_loss, say)

A study of one repeat, launched on the target like any other: speed at batch 1, bytes, and what the answers lose against
the uncompressed model there. A level that loses more than `max_loss`, or whose answers cannot be compared, is refused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.common.base import write_atomically
from configs.common.execution import Dtype
from configs.inputs.prompts import PromptLine, numbered_prompts
from configs.plans.packing import pack_launches
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel
from configs.plans.pooling import pooling_of
from configs.records.record import Record
from configs.serving.deployment import FirstRequest, LevelCheck, OptimizationLevel
from configs.serving.settings import GROUP_TIMEOUT_SECONDS
from configs.spec.measuring import Measuring
from configs.spec.study import StudySpec, parse_study, study_yaml
from configs.targets.target import LocalTarget, SlurmTarget, SshTarget
from reports.correctness.data import ANSWER_COLUMNS, answers_of
from reports.experiments.compression import Compressed, compression, weight_bytes
from reports.experiments.compression_answers import VECTOR_COLUMNS
from reports.reading.load import CellResult, StudyResult, load_run
from reports.tables import noise_warning
from reports.text import number, percent
from tasks.campaign.launches.jobs import run_job, write_job
from tasks.campaign.ledger import missing_measurements, set_aside_damaged
from tasks.checks.environment import check_environment
from tasks.checks.verification import kind_of
from tasks.checks.verification_inputs import made_prompts
from tasks.models.model_cache import load_manifest
from tasks.planning.inputs import copy_inputs
from tasks.planning.study_plan import make_plan
from tasks.providers.giving_back import Say

KINDS = {"encoder": "encode", "encoder_decoder": "seq2seq", "decoder": "generate"}
_PROMPTS, _NEW_TOKENS, _POSITIONS = 20, 16, 256
LEAST_LENGTH = _NEW_TOKENS + 10
"""Tokens of the shortest prompt, those around it, and its answer, with which every server is tested."""
_KEPT_REQUESTS, _REQUEST_CHARACTERS, _REQUEST_TOKENS = 3, 400, 96


def check_levels(
    model: PlannedModel,
    target: LocalTarget | SshTarget | SlurmTarget,
    levels: Sequence[OptimizationLevel],
    dtype: Dtype,
    folder: Path,
    cache: Path,
    max_loss: float,
    say: Say,
    tp: int = 1,
    nodes: int = 1,
    max_length: int = _POSITIONS,
    group_timeout_seconds: float = GROUP_TIMEOUT_SECONDS,
) -> tuple[dict[OptimizationLevel, LevelCheck], dict[OptimizationLevel, tuple[FirstRequest, ...]]]:
    """Return the check of each level, and requests with the answers that this level gives on the target.

    levels: those above `none`, which is always measured. tp: ranks of a launch, over `nodes` of the target.
    max_length: of prompt and answer, as it will be served. group_timeout_seconds: of the servers. Raises ValueError
    where `none` could not be measured.
    """
    run = RunPaths(folder.absolute())
    positions = min(_POSITIONS, max_length)
    plan, prompts = _plan(model, target, levels, dtype, run, tp, nodes, positions, group_timeout_seconds)
    _measure(plan, run, cache, say)
    study = load_run(run)
    if (warning := noise_warning(study)) is not None:
        say(warning)
    [experiment] = plan.experiments
    if levels:
        rows = {_level_of(row): row for row in compression(study, experiment).rows}
    else:
        rows = {}
    answering = {_level_of_cell(study.cells[key]): study.cells[key] for key in plan.cells if _has_answers(study, key)}
    base = answering.get("none")
    if base is None or not base.completed:
        cells = [cell for cell in study.cells.values() if not cell.completed]
        raise ValueError(f"{model.name}: the uncompressed model could not be measured: {_why(cells[0])}")
    checks: dict[OptimizationLevel, LevelCheck] = {"none": _base_check(rows.get("none"), base)}
    for level in levels:
        checks[level] = _check(level, rows.get(level), max_loss)
    requests = {
        level: _requests(study, cell, prompts)
        for level, cell in answering.items()
        if cell.completed and checks[level].refused is None
    }
    return checks, requests


def _plan(
    model: PlannedModel,
    target: LocalTarget | SshTarget | SlurmTarget,
    levels: Sequence[str],
    dtype: Dtype,
    run: RunPaths,
    tp: int,
    nodes: int,
    positions: int,
    group_timeout_seconds: float,
) -> tuple[Plan, list[PromptLine]]:
    run.inputs.mkdir(parents=True, exist_ok=True)
    manifest = load_manifest(Path(model.manifest))
    kind = KINDS[kind_of(manifest)]
    limit = manifest.config.get("max_position_embeddings")
    positions = min(positions, limit) if isinstance(limit, int) and limit > 0 else positions
    file = made_prompts(manifest, run, _PROMPTS, _NEW_TOKENS, positions - _NEW_TOKENS)
    workload: dict[str, Any] = {"kind": kind, "prompts": str(file), "batch_size": 1}
    workload |= {"pooling": pooling_of(manifest) or "mean"} if kind == "encode" else {"new_tokens": _NEW_TOKENS}
    layout = {"tp": tp, "nodes": nodes} if tp > 1 else {}
    experiment = {"kind": "compression", "passes": list(levels) or ["balanced"], "dtypes": [dtype], "baseline": layout}
    told = target.model_dump(exclude_defaults=True) | {"kind": target.kind}
    if tp > 1 and target.kind != "local":
        told |= {"ranks_per_node": tp // nodes}
    group_timeout = max(Measuring().group_timeout_seconds, group_timeout_seconds)
    rules = {"repeats": 1, "memory": False, "min_seconds": 0.5, "cell_timeout_seconds": 900}
    study: StudySpec = parse_study(
        {
            "study": "levels",
            "models": [{"id": model.identity, "name": model.name}],
            "workload": workload,
            "dtype": dtype,
            "targets": [told],
            "experiments": {"levels": experiment},
            "measuring": rules | {"group_timeout_seconds": group_timeout},
        }
    )
    plan = make_plan(study, [model], copy_inputs(study, run, run.inputs), run.inputs)
    if not levels:
        plan = _uncompressed(plan)
    write_atomically(run.study, study_yaml(study))
    write_atomically(run.plan, plan.model_dump_json(indent=1))
    if target.kind == "local":
        check_environment(run, accept=True)
    return plan, numbered_prompts(file)


def _uncompressed(plan: Plan) -> Plan:
    """The plan without compressed cells: an experiment has one pass at least."""
    cells = {key: cell for key, cell in plan.cells.items() if not cell.compression}
    experiments = tuple(
        each.model_copy(update={"points": tuple(point for point in each.points if point.cell in cells)})
        for each in plan.experiments
    )
    repeats = {key: plan.repeats[key] for key in cells}
    return plan.model_copy(update={"cells": cells, "experiments": experiments, "repeats": repeats})


def _measure(plan: Plan, run: RunPaths, cache: Path, say: Say) -> None:
    missing = missing_measurements(plan, set_aside_damaged(run), "timed", only_failed=False)
    for launch in pack_launches(missing, "timed", plan.measuring.seed, plan.pack):
        say(f"measuring {launch.measurements[0].cell.label} on {plan.targets[0].name}")
        run_job(write_job(launch, plan, run, cache), run, say)


def _has_answers(study: StudyResult, key: str) -> bool:
    return bool(getattr(study.cells[key].cell.workload, "answers", False))


def _level_of_cell(cell: CellResult) -> OptimizationLevel:
    passes = cell.cell.compression
    return passes[0] if passes else "none"  # type: ignore[return-value]


def _level_of(row: Compressed) -> OptimizationLevel:
    return _level_of_cell(row.result)


def _message(record: Record) -> str:
    return record.status.value.replace("_", " ") if record.failure is None else record.failure.message


def _why(cell: CellResult) -> str:
    ended = next(iter(cell.measurements.values()), None)
    return "it was never started" if ended is None else _message(ended.record)


def _base_check(row: Compressed | None, answering: CellResult) -> LevelCheck:
    result = row.result if row is not None and row.result.completed else answering
    found = result.estimate("throughput")
    size = weight_bytes(result)
    return LevelCheck(
        level="none",
        weights_bytes=None if size is None else int(size),
        throughput=None if found is None else found.median,
        speed=1.0,
        loss=0.0,
        loss_text="the base",
    )


def _check(level: OptimizationLevel, row: Compressed | None, max_loss: float) -> LevelCheck:
    if row is None or not row.result.completed:
        reason = "not measured" if row is None else _why(row.result)
        return LevelCheck(level=level, refused=reason)
    found = row.result.estimate("throughput")
    refused = None
    if row.loss is None:
        refused = "its answers could not be compared"
    elif row.loss > max_loss:
        assert row.quality is not None
        limit = number(max_loss) if row.quality.ladder is None else percent(max_loss)  # as the loss is told
        refused = f"{row.quality.text()}, more than {limit}"
    passes = () if row.resolved in (None, "none") else tuple(str(row.resolved).split("+"))
    return LevelCheck(
        level=level,
        passes=passes,
        weights_bytes=None if row.size_bytes is None else int(row.size_bytes),
        throughput=None if found is None else found.median,
        speed=row.speed if passes else None,  # unchanged weights are as fast as themselves: the ratio is noise
        loss=row.loss,
        loss_text="" if row.quality is None else row.quality.text(),
        refused=refused,
    )


def _requests(study: StudyResult, cell: CellResult, prompts: Sequence[PromptLine]) -> tuple[FirstRequest, ...]:
    """Return some short prompts with the answers that were measured."""
    measurement = cell.completed[min(cell.completed)]
    short = [index for index, prompt in enumerate(prompts) if _is_short(prompt)]
    columns = (*ANSWER_COLUMNS, *VECTOR_COLUMNS)
    samples = study.samples(measurement, columns)
    found: list[FirstRequest] = []
    if cell.kind.answers == "vectors":
        indices = samples["0/answer_prompts"].tolist()
        rows = samples["0/answer_vectors"].reshape(len(indices), -1)
        vectors = {int(index): row for index, row in zip(indices, rows, strict=True)}
        for index in [index for index in short if index in vectors][:_KEPT_REQUESTS]:
            found.append(FirstRequest(prompt=_written(prompts[index]), vector=tuple(map(float, vectors[index]))))
        return tuple(found)
    vocabulary = measurement.figure("answer_vocabulary")
    answers = answers_of(samples, None if vocabulary is None else int(vocabulary))
    for index in [index for index in short if index in answers.top_logits][:_KEPT_REQUESTS]:
        top = answers.top_logits[index]
        found.append(
            FirstRequest(
                prompt=_written(prompts[index]),
                tokens=tuple(map(int, answers.tokens[index])),
                gaps=tuple(float((row[0] - row[1]) / max(abs(row[0]), abs(row[1]), 1e-9)) for row in top),
            )
        )
    return tuple(found)


def _is_short(prompt: PromptLine) -> bool:
    if prompt.tokens is not None:
        return len(prompt.tokens) <= _REQUEST_TOKENS
    return 0 < len(prompt.text) <= _REQUEST_CHARACTERS


def _written(prompt: PromptLine) -> str | tuple[int, ...]:
    return prompt.text if prompt.tokens is None else prompt.tokens
