"""Run folders of made-up records with known rates, sizes and answers, for the tests of encode, seq2seq, compression
and engines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from configs.plans.expand import expand
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel
from configs.records.record import Failure, Record, Status
from configs.spec.cell import Cell
from configs.spec.study import parse_study
from configs.workloads.encode import EncodeWorkload
from configs.workloads.prompted import PromptedWorkload

MODEL = PlannedModel(name="tiny", identity="folder:abc", manifest="m/manifest.json")
VOCABULARY = 8
REPEATS = 10


def planned(text: str, repeats: int = REPEATS) -> Plan:
    """The plan of a study given as YAML, whose model is MODEL and whose prompts are random."""
    data = {"study": "made", "models": [{"id": "./tiny"}], "measuring": {"repeats": repeats}, **yaml.safe_load(text)}
    return expand(parse_study(data), [MODEL], {}, lambda workload: 4)


def write_plan(folder: Path, plan: Plan) -> RunPaths:
    """A run folder without records."""
    run = RunPaths(folder)
    run.environments.mkdir(parents=True)
    run.environment("e1").write_text('{"python": "3.11.2", "commit": "abc123"}')
    run.plan.write_text(plan.model_dump_json())
    return run


def write_measurements(
    run: RunPaths,
    cell: Cell,
    seconds: float,
    answers: dict[str, Any] | None = None,
    peak_mib: float | None = None,
    repeats: int = REPEATS,
    environment: str = "e1",
    **figures: Any,
) -> None:
    """Completed repeats whose passes take so many seconds, each a little else; a cell that keeps answers has one."""
    work = cell.workload
    assert isinstance(work, PromptedWorkload)
    prompts = work.num_prompts or 1
    known = {"num_prompts": prompts, "prompt_tokens": 10 * prompts, "measurement_seconds": 2.0, "load_seconds": 0.5}
    known |= figures
    for repeat in range(1 if work.answers else repeats):
        samples = decoded(cell, seconds * (1 + 0.002 * repeat))
        samples = {**samples, **(answers or {})}
        write_record(run, cell, repeat, samples=samples, figures=known, environment=environment)
    if peak_mib is not None:
        write_record(run, cell, 0, figures={"peak_memory_bytes": int(peak_mib * 2**20)}, measuring_pass="memory")


def write_failure(run: RunPaths, cell: Cell, status: Status, message: str) -> None:
    """A repeat that ended without a figure."""
    write_record(run, cell, 0, status=status, failure=Failure(message=message))


def write_record(run: RunPaths, cell: Cell, repeat: int, samples: dict[str, Any] | None = None, **fields: Any) -> None:
    """One record, with its samples where there are any."""
    path = run.record(cell.key, fields.get("measuring_pass", "timed"), repeat, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    stamps = {"started_at": f"2026-01-01T00:0{repeat}:00Z", "finished_at": f"2026-01-01T00:0{repeat}:30Z"}
    defaults = {"attempt": 1, "status": Status.COMPLETED, "job": f"j{repeat}", "position": 0, "environment": "e1"}
    record = Record(key=cell.key, cell=cell, repeat=repeat, **{**defaults, **stamps, **fields})
    path.write_text(record.model_dump_json())
    if samples is not None:
        np.savez(path.with_suffix(".npz"), **{name: np.asarray(values) for name, values in samples.items()})


def decoded(cell: Cell, seconds: float, passes: int = 4) -> dict[str, Any]:
    """Passes of so many seconds on each replica; a fifth of a request is its first token."""
    work, samples = cell.workload, {}
    assert isinstance(work, PromptedWorkload)
    batches = max(1, (work.num_prompts or 1) // cell.layout.dp // work.batch_size)
    for rank in range(0, cell.layout.ranks, cell.layout.tp * cell.layout.pp):
        samples[f"{rank}/pass_seconds"] = [seconds] * passes
        samples[f"{rank}/request_seconds"] = [seconds / batches] * (passes * batches)
        samples[f"{rank}/batch_sequences"] = [float(work.batch_size)] * (passes * batches)
        if not isinstance(work, EncodeWorkload):
            samples[f"{rank}/ttft_seconds"] = [seconds / batches / 5] * (passes * batches)
            samples[f"{rank}/gap_seconds"] = [seconds / batches / 10] * (passes * batches * 8)
    return samples


def words(shift: float, prompts: int = 4, new: int = 3) -> dict[str, Any]:
    """Answers whose likelihoods are `shift` nats a token below those of `words(0)`, a little more or less by prompt."""
    random = np.random.default_rng(3)
    logits = random.normal(0, 2, (2 * prompts, VOCABULARY)).astype(np.float32)
    moved = np.random.default_rng(4).normal(0, 1, logits.shape) * shift
    by_prompt = np.repeat(1 + 0.1 * np.arange(prompts) - 0.05 * (prompts - 1), 5)
    tokens = np.tile(np.arange(new), prompts)
    tokens[-1] += shift > 0.5  # what is far off answers otherwise
    return {
        "0/answer_prompts": np.arange(prompts),
        "0/answer_tokens": tokens.astype(np.int32),
        "0/answer_nll": 2.0 + shift * by_prompt,
        "0/answer_nll_prompts": np.repeat(np.arange(prompts), 5),
        "0/answer_logits": (logits + moved).astype(np.float32).ravel(),
        "0/answer_logit_prompts": np.repeat(np.arange(prompts), 2),
        "0/answer_logit_positions": np.tile([0, 4], prompts),
    }


def vectors(turned: float, prompts: int = 4, size: int = 6) -> dict[str, Any]:
    """Embeddings of length 1, turned by so many radians from those of `vectors(0)`."""
    rows = np.zeros((prompts, size), dtype=np.float32)
    rows[:, 0], rows[:, 1] = np.cos(turned), np.sin(turned)
    return {"0/answer_prompts": np.arange(prompts), "0/answer_vectors": rows.ravel()}


def cells_of(plan: Plan, experiment: int = 0) -> Sequence[tuple[dict[str, Any], Cell]]:
    """Values and cell of each point."""
    return [(point.values, plan.cells[point.cell]) for point in plan.experiments[experiment].points]


def run_in_environments(folder: Path, text: str, devices: list[dict[str, object]]) -> tuple[RunPaths, Plan]:
    """A run whose cells took fewer seconds by their ranks; `devices`: for each cell the environment's content."""
    plan = planned(text, repeats=6)
    run = write_plan(folder, plan)
    for place, ((key, cell), environment) in enumerate(zip(plan.cells.items(), devices, strict=True)):
        name = f"d{place}"
        run.environment(name).write_text(json.dumps({"torch": "2.13.0"} | environment))
        write_measurements(run, cell, 1.0 / cell.layout.ranks, environment=name, repeats=6, peak_mib=None)
        assert key == cell.key
    return run, plan
