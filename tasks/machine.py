"""What this machine has, held against what a plan needs and against what a run was begun on. No Prefect here."""

import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from configs.base import canonical_json, write_atomically
from configs.model import Manifest
from configs.paths import RunPaths
from configs.plan import Plan
from configs.study import StudyError
from engine.planner.local import cpu_model
from slurm.profilers import why_not

_LEAST_FREE_DISK_BYTES = 64 << 20
_PACKAGES = ("torch", "numpy", "transformers", "rankwise")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class EnvironmentChanged(ValueError):
    """The run folder holds measurements of another machine or other versions."""


def check_plan(plan: Plan, folder: Path) -> None:
    """Raise StudyError naming each resource that the plan lacks here."""
    problems = _rank_problems(plan) + _memory_problems(plan) + _price_problems(plan) + _profiler_problems(plan)
    free = shutil.disk_usage(_existing(folder)).free
    if free < _LEAST_FREE_DISK_BYTES:
        problems.append(
            f"run folder {folder}: {free / 2**20:.0f} MiB free on its disk, at least "
            f"{_LEAST_FREE_DISK_BYTES / 2**20:.0f} MiB are needed; free some or choose another with --runs"
        )
    if problems:
        raise StudyError(problems)


def _rank_problems(plan: Plan) -> list[str]:
    problems = []
    cores = len(os.sched_getaffinity(0))
    targets = {target.name: target for target in plan.targets}
    for experiment in plan.experiments:
        for point in experiment.points:
            cell = plan.cells[point.cell]
            target, ranks = targets[cell.target], cell.layout.ranks
            held = min(cores // cell.cores_per_rank, target.max_ranks or cores)
            if ranks > held:
                limit = f", max_ranks: {target.max_ranks}" if target.max_ranks else ""
                problems.append(
                    f"experiments.{experiment.name} at {point.label}: {ranks} ranks, but target {target.name} "
                    f"holds {held} ({cores} cores, {cell.cores_per_rank} a rank{limit})"
                )
    return list(dict.fromkeys(problems))


def _price_problems(plan: Plan) -> list[str]:
    if plan.measuring.budget_usd is None or plan.usd_per_hour is not None:
        return []
    return [
        "measuring.budget_usd: the price of a target is unknown, so money cannot be counted; "
        "give targets[].price_usd_per_hour, or a file in `prices`"
    ]


def _profiler_problems(plan: Plan) -> list[str]:
    profiler = plan.measuring.profiler
    problem = why_not(profiler) if profiler else None
    return [f"measuring.profiler: {problem}"] if problem else []


def _memory_problems(plan: Plan) -> list[str]:
    """Weights alone, for all ranks of a cell, against what is free: less cannot work."""
    available = psutil.virtual_memory().available
    # A hub's model that was not fetched yet has no manifest; the flow looks again when it has.
    sizes = {model.identity: _parameters(Path(model.manifest)) for model in plan.models if model.manifest}
    problems = {}
    for cell in plan.cells.values():
        parameters = sizes.get(cell.model or "")
        if parameters is None:
            continue
        # Training keeps weights, gradients and two AdamW moments in float32.
        per_parameter = 16 if cell.workload.kind == "train" else _DTYPE_BYTES[cell.dtype]
        needed = parameters * per_parameter * cell.layout.dp
        if needed > available:
            problems[cell.model, cell.layout.dp] = (
                f"model {cell.model} on {cell.layout}: its weights alone need {needed / 2**30:.1f} GiB, "
                f"{available / 2**30:.1f} GiB are available"
            )
    return list(problems.values())


def _parameters(manifest: Path) -> int | None:
    """At least so many parameters, by the sizes of the weight files were they float32; None without files."""
    files = Manifest.model_validate_json(manifest.read_bytes()).files
    total = sum(file.size_bytes for name, file in files.items() if name.endswith(".safetensors"))
    return total // 4 or None


def check_environment(run: RunPaths, accept: bool) -> dict[str, Any]:
    """Compare today's environment with the one that the run folder was begun in; keep today's."""
    today = fingerprint()
    path = run.folder / "environment.json"
    if path.exists():
        try:
            before = json.loads(path.read_bytes())
        except ValueError:
            before = today
        changed = [name for name in today if before.get(name) != today[name]]
        if changed and not accept:
            lines = "\n".join(f"  {name}: {before.get(name)} then, {today[name]} now" for name in changed)
            raise EnvironmentChanged(
                f"{run.folder} was measured in another environment:\n{lines}\n"
                "say --accept-environment to measure the rest here, or --runs for another folder"
            )
        if not changed:
            return today
    write_atomically(path, canonical_json(today))
    return today


def fingerprint() -> dict[str, Any]:
    """What makes figures comparable: machine and versions."""
    return {
        "host": platform.node(),
        "cpu_model": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _existing(folder: Path) -> Path:
    return next(parent for parent in [folder, *folder.parents] if parent.exists())
