"""Targets: every file of a run folder, and of a cache, that a crash or somebody else may have left.

Each target puts the bytes in the place of one file of a sound run folder, and does what `status`, `report`, `compare`
and `logs` do. Where only this file is damaged nothing may be raised but for the plan and files of another version: the
report is rendered without it.
"""

import io
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from configs.common.base import canonical_json
from configs.hardware.calibration import read_calibration
from configs.plans.expand import expand
from configs.plans.job import Job, JobEnd, Launcher, Measurement, Progress, Submission
from configs.plans.model_manifest import read_model_manifest
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import Plan, PlannedModel, read_plan
from configs.plans.preflight import NodeFigures, PairFigures, Preflight, TargetPreflight
from configs.records.record import Accounting, Failure, Record, SchemaError, Status
from configs.records.samples import DamagedSamplesError, read_archive
from configs.spec.cell import Cell
from configs.spec.study import parse_study
from flows.cli.results.inspect import status_rows
from reports.document.album import Album
from reports.reading.load import load_run
from reports.reading.run_figures import run_figures
from reports.render import compose
from reports.runs.compare import compare
from slurm.launcher.job_files import measurement_under_way, read_launcher
from tasks.campaign.ledger import read_ledger
from tasks.campaign.run_lock import FolderInUse, is_locked, run_lock

_AT = "2026-01-01T00:00:0{}+00:00"
_STUDY = {
    "study": "small",
    "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
    "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4, "num_prompts": 4, "batch_size": 2},
    "measuring": {"repeats": 2},
    "experiments": {
        "dp": {"kind": "strong", "grow": "dp", "to": 2},
        "batch": {"kind": "sweep", "over": {"batch_size": [1, 2]}},
        "half": {"kind": "optimization", "baseline": {"batch_size": 1}, "variants": {"half": {"dtype": "bfloat16"}}},
    },
}
_OTHER_KINDS = {
    "weak": {"kind": "weak", "grow": "dp", "to": 2},
    "answers": {"kind": "correctness", "prompts": 2, "layouts": [{"tp": 2}]},
    "smaller": {"kind": "compression", "passes": ["int8"]},
    "links": {"kind": "communication", "ranks": [2]},
}
_JOB = "0001-timed-abc"


def targets() -> dict[str, Callable[[bytes], object]]:
    """Files of a run folder and of a cache."""
    run = _made_run(Path(tempfile.mkdtemp(prefix="rankwise-fuzz-run-")))
    paths = run.job(_JOB)
    record = _first_record(run)
    return {
        "run.plan": lambda data: _with(run, run.plan, data, read_plan),
        "run.record": lambda data: _with(run, record, data),
        "run.samples": lambda data: _with(run, record.with_suffix(".npz"), data, _archive),
        "run.environment": lambda data: _with(run, run.environment("e1"), data),
        "run.preflight": lambda data: _with(run, run.preflight, data),
        "run.lock": lambda data: _with(run, run.lock, data, lambda _: _locked(run)),
        "job.job": lambda data: _with(run, paths.job, data),
        "job.progress": lambda data: _with(run, paths.progress(0), data, lambda _: measurement_under_way(paths)),
        "job.launcher": lambda data: _with(run, paths.launcher, data, lambda _: read_launcher(paths)),
        "job.end": lambda data: _with(run, paths.end, data),
        "job.submission": lambda data: _with(run, paths.submission, data),
        "job.accounting": lambda data: _with(run, paths.accounting, data),
        "cache.manifest": lambda data: read_model_manifest(_written(run.folder.parent / "manifest.json", data)),
        "cache.calibration": lambda data: read_calibration(_written(run.folder.parent / "calibration.json", data)),
    }


def seeds() -> dict[str, tuple[bytes, ...]]:
    """What the files of a sound run hold."""
    with tempfile.TemporaryDirectory(prefix="rankwise-fuzz-seeds-") as folder:
        run = _made_run(Path(folder))
        paths = run.job(_JOB)
        records = sorted(run.records.glob("*/*.json"))
        compressed = io.BytesIO()
        np.savez_compressed(compressed, **_samples(1))  # type: ignore[arg-type]
        manifest = {
            "identity": "folder:abc",
            "source": "folder",
            "folder": "files",
            "files": {"config.json": {"sha256": "0" * 64, "size_bytes": 10}},
            "config": {"model_type": "llama", "hidden_size": 64},
        }
        return {
            "run.plan": (
                run.plan.read_bytes(),
                _planned(_STUDY | {"experiments": _OTHER_KINDS}).model_dump_json().encode(),
            ),
            "run.record": tuple(path.read_bytes() for path in records),
            "run.samples": (records[0].with_suffix(".npz").read_bytes(), compressed.getvalue()),
            "run.environment": (run.environment("e1").read_bytes(),),
            "run.preflight": (run.preflight.read_bytes(),),
            "run.lock": (b'{"pid": 1, "host": "h", "since": "now", "flow_run": "0"}',),
            "job.job": (paths.job.read_bytes(),),
            "job.progress": (paths.progress(0).read_bytes().ljust(4096),),
            "job.launcher": (paths.launcher.read_bytes(),),
            "job.end": (paths.end.read_bytes().ljust(8192),),
            "job.submission": (paths.submission.read_bytes(),),
            "job.accounting": (paths.accounting.read_bytes(),),
            "cache.manifest": (canonical_json(manifest).encode(),),
            "cache.calibration": (b'{"schema_version": 3, "fingerprint": {"cpu_model": "x", "cores": 2}}',),
        }


def _with(run: RunPaths, path: Path, data: bytes, read: Callable[[Path], object] | None = None) -> None:
    """Look at the run with other bytes in one of its files."""
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(data)
    try:
        if read is not None:
            with suppress(DamagedSamplesError):
                read(path)
        _look(run)
    except SchemaError:
        raise
    except ValueError as error:
        if path != run.plan:  # damage in one file is no reason to refuse the run
            raise AssertionError(f"refused for {path.name}: {error}") from error
        if str(path) not in str(error):
            raise AssertionError(f"names no file: {error}") from error
        raise
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


def _look(run: RunPaths) -> None:
    """What the commands that change nothing compute, all but their plots."""
    plan = read_plan(run.plan)
    status_rows(run, plan, read_ledger(run))
    study = load_run(run)
    _, *texts = compose(study, Album(draws=False))  # Matplotlib would take all of the time
    assert not any(set(text) & set("\x1b\x00\u202e") for text in texts), "a control character in the report"
    figures = run_figures(study, "run")
    compare(figures, figures, 0.05, {})


def _locked(run: RunPaths) -> None:
    is_locked(run)
    with suppress(FolderInUse), run_lock(run):
        pass


def _archive(path: Path) -> object:
    return read_archive(path)


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _first_record(run: RunPaths) -> Path:
    return sorted(run.records.glob("*/r0-a1.json"))[0]


def _made_run(folder: Path) -> RunPaths:
    """A run of two repeats of each cell, one of which failed; a job that goes on, one that has ended."""
    run = RunPaths(folder / "run")
    shutil.rmtree(run.folder, ignore_errors=True)
    run.environments.mkdir(parents=True)
    plan = _planned(_STUDY)
    run.plan.write_text(plan.model_dump_json())
    run.environment("e1").write_text(canonical_json({"python": "3.11.2", "commit": "abc", "variables": {"A": "1"}}))
    node = NodeFigures(node="n0", gemm_flops_per_second=1e9)
    pair = PairFigures(nodes=("n0", "n1"), latency_seconds=1e-6, bytes_per_second=1e9)
    at = _AT.format(0)
    tested = TargetPreflight(target="local", settings="s", at=at, ranks_per_node=1, nodes=(node,), pairs=(pair,))
    run.preflight.write_text(Preflight(targets=(tested,)).model_dump_json())
    for number, cell in enumerate(plan.cells.values()):
        for repeat in range(2):
            _write_record(run, cell, repeat, Status.FAILED if number == repeat == 1 else Status.COMPLETED)
    _write_job(run.job(_JOB), plan)
    run.lock.touch()
    return run


def _planned(study: dict[str, Any]) -> Plan:
    model = PlannedModel(name="m", identity="synthetic:llama-1m@0", manifest="")
    return expand(parse_study(study), [model], {}, lambda workload: 4)


def _write_record(run: RunPaths, cell: Cell, repeat: int, status: Status) -> None:
    path = run.record(cell.key, "timed", repeat, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = _samples(cell.layout.ranks) if status is Status.COMPLETED else {}
    record = Record(
        key=cell.key, cell=cell, repeat=repeat, attempt=1, status=status, job=_JOB, position=repeat,
        started_at=_AT.format(repeat), finished_at=_AT.format(repeat + 1), environment="e1", hosts=["n0"],
        failure=None if samples else Failure(message="exit code 1", rank=0, log="jobs/a/rank_0.log"),
        accounting=Accounting(job_id="1", state="COMPLETED", nodes=("n0",), queued_seconds=1.0, elapsed_seconds=2.0),
        figures={"num_prompts": 4, "prompt_tokens": 32, "measurement_seconds": 2.0, "load_seconds": 0.5},
        rank_figures={"cpu_seconds": [1.0] * cell.layout.ranks}, num_columns=len(samples),
    )  # fmt: skip
    path.write_text(record.model_dump_json())
    if samples:
        np.savez(path.with_suffix(".npz"), **samples)  # type: ignore[arg-type]


def _samples(ranks: int) -> dict[str, np.ndarray]:
    """Four passes of two batches on each rank."""
    columns = {"pass_seconds": 4, "request_seconds": 8, "batch_sequences": 8, "ttft_seconds": 8, "gap_seconds": 24}
    return {
        f"{rank}/{name}": np.full(count, 2.0 if name == "batch_sequences" else 0.5)
        for rank in range(ranks)
        for name, count in columns.items()
    }


def _write_job(paths: JobPaths, plan: Plan) -> None:
    paths.folder.mkdir(parents=True)
    measurement = Measurement(cell=next(iter(plan.cells.values())), repeat=0, attempt=1)
    job = Job(
        name=_JOB, study="small", measuring_pass="timed", measuring=plan.measuring, measurements=(measurement,),
        ranks_per_node=1, timeout_seconds=60, inputs="inputs", cache="cache",
    )  # fmt: skip
    progress = Progress(rank=0, pid=1, pid_started=1, phase="measurement", measurement=measurement.name, since=1.0)
    paths.job.write_text(job.model_dump_json())
    paths.progress(0).write_text(progress.model_dump_json())
    paths.launcher.write_text(Launcher(pid=1, pid_started=1, host="n0", started_at=_AT.format(0)).model_dump_json())
    paths.submission.write_text(Submission(job_id="12", submitted_at=_AT.format(0)).model_dump_json())
    paths.accounting.write_text(Accounting(job_id="12", state="COMPLETED", queued_seconds=1.0).model_dump_json())
    end = JobEnd(status=Status.COMPLETED, return_code=0, measurement=None, finished_at=_AT.format(9))
    paths.end.write_text(end.model_dump_json())
