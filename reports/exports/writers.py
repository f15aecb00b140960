"""One writer for each format. Each writes below a folder, uses no network, and gives the paths of what it wrote.

    EXPORTS["prometheus"](study, folder)

A cell is a run of MLflow and Weights & Biases and a directory of TensorBoard; a repeat is a step.
"""

import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from configs.common.base import canonical_json, write_atomically
from configs.common.printable import printable
from configs.records.record import Status
from reports.export import cells_csv, records_parquet
from reports.exports.figures import ExportedCell, exported_cells
from reports.reading.load import CellResult, StudyResult
from reports.reading.run_figures import OTHERS_SHARE

_MLFLOW_PARAMETERS = 100
"""Of one batch."""
_OF_HOST = "peak_host_memory_bytes"
"""Figure of memory passes on GPUs alone, whose `peak_memory_bytes` are of the GPU."""


def parquet(study: StudyResult, folder: Path) -> list[Path]:
    """`records.parquet`, a row for each record, and `cells.csv`."""
    records, cells = folder / "records.parquet", folder / "cells.csv"
    write_atomically(records, records_parquet(study))
    write_atomically(cells, cells_csv(study))
    return [records, cells]


def prometheus(study: StudyResult, folder: Path) -> list[Path]:
    """`metrics.prom` in the text format, for the node exporter's textfile collector."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry, gauges = CollectorRegistry(), dict[str, Gauge]()
    labels = ("study", "model", "cell", "key", "stat")
    status = Gauge("rankwise_cell_status", "1 for the cell's status", (*labels[:4], "status"), registry=registry)
    for cell in exported_cells(study):
        named = (study.plan.study, cell.result.model, cell.result.name, cell.key)
        status.labels(*named, cell.status).set(1)
        for name, value in cell.estimates.items():
            if name not in gauges:
                gauges[name] = Gauge(
                    f"rankwise_{name}", "median over repeats and its bounds", labels, registry=registry
                )
            low, high = value.bounds
            for stat, number in {"median": value.median, "low": low, "high": high, "repeats": value.count}.items():
                gauges[name].labels(*named, stat).set(number)
    path = folder / "metrics.prom"
    write_atomically(path, generate_latest(registry))
    return [path]


def tensorboard(study: StudyResult, folder: Path) -> list[Path]:
    """Event files by cell: `tensorboard --logdir FOLDER`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    paths = []
    for cell in exported_cells(study):
        if not cell.figures:
            continue
        place = folder / "tensorboard" / cell.key
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        writer = EventFileWriter(str(place))
        try:
            for name, values in cell.figures.items():
                for repeat, number in values.items():
                    value = Summary.Value(tag=name, simple_value=number)
                    moment = _moment(cell, repeat)
                    writer.add_event(Event(wall_time=moment, step=repeat, summary=Summary(value=[value])))
        finally:
            writer.close()
        paths.append(place)
    return paths


def _moment(cell: ExportedCell, repeat: int) -> float:
    """When a repeat ended, in seconds since the epoch."""
    reading = cell.result.measurements.get(repeat)
    ended = None if reading is None else reading.record.finished_at
    return datetime.fromisoformat(ended).timestamp() if ended else 0.0


def mlflow(study: StudyResult, folder: Path) -> list[Path]:
    """`mlflow.db`: `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db`.

    A cell of this run folder that is there already gets the repeats that it lacks, and its status.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient

    path = folder.absolute() / "mlflow.db"
    client = MlflowClient(tracking_uri=f"sqlite:///{path}")
    known = client.get_experiment_by_name(study.plan.study)
    artifacts = (folder.absolute() / "mlflow_artifacts").as_uri()
    experiment = known.experiment_id if known else client.create_experiment(study.plan.study, artifacts)
    # All runs of a study have folders of its name: when one began tells them apart, and stays when its folder is moved.
    began = min((at for each in study.readings if (at := each.record.started_at)), default="")
    of_run = {"run": study.folder.absolute().name, "began": began}
    for cell in exported_cells(study):
        tags = {"key": cell.key, **of_run}
        found = client.search_runs([experiment], f"tags.key = '{cell.key}'")
        run = next((one for one in found if _is_of(one.data.tags, of_run)), None)
        run = run or client.create_run(experiment, run_name=printable(cell.title), tags=tags)
        identifier = run.info.run_id
        # A parameter cannot be changed; what further repeats change is a tag.
        changing = {name: cell.fields[name] for name in (OTHERS_SHARE,) if name in cell.fields}
        fixed = {name: value for name, value in cell.fields.items() if name not in {*changing, *run.data.params}}
        params = [Param(name, _text(value)[:500]) for name, value in fixed.items()]
        metrics = _lacking(client, identifier, cell)
        client.log_batch(identifier, params=params[:_MLFLOW_PARAMETERS])
        for start in range(0, len(metrics), 1000):
            client.log_batch(identifier, metrics=metrics[start : start + 1000])
        for name, value in {"status": cell.status, "began": began, **changing}.items():
            client.set_tag(identifier, name, _text(value))
        client.set_terminated(identifier, "FINISHED" if cell.status == Status.COMPLETED else "FAILED")
    return [path]


def _text(value: Any) -> str:
    """A field as MLflow has it, whose parameters and tags are text."""
    return value if isinstance(value, str) else canonical_json(value)


def _is_of(tags: Mapping[str, str], of_run: Mapping[str, str]) -> bool:
    """Whether a run of MLflow is of a run folder; one from before anything was measured there has no beginning."""
    return tags.get("run") == of_run["run"] and tags.get("began", "") in ("", of_run["began"])


def _lacking(client: Any, run: str, cell: ExportedCell) -> list[Any]:
    """Figures of a cell that its run of MLflow does not have."""
    from mlflow.entities import Metric

    wanted = [
        Metric(name, number, int(1000 * _moment(cell, repeat)), repeat)
        for name, values in cell.figures.items()
        for repeat, number in values.items()
    ]
    there = {
        (name, each.step, each.timestamp, each.value)
        for name in cell.figures
        for each in client.get_metric_history(run, name)
    }
    return [each for each in wanted if (each.key, each.step, each.timestamp, each.value) not in there]


def wandb(study: StudyResult, folder: Path) -> list[Path]:
    """Offline runs, which `wandb sync FOLDER/wandb/offline-run-*` uploads."""
    for kind in ("CACHE", "CONFIG", "DATA"):
        os.environ[f"WANDB_{kind}_DIR"] = str(folder / "wandb" / kind.lower())
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb as library

    settings = library.Settings(
        console="off", disable_git=True, disable_job_creation=True, save_code=False, silent=True,
        x_disable_meta=True, x_disable_stats=True,
    )  # fmt: skip
    paths = []
    for cell in exported_cells(study):
        run = library.init(
            project=study.plan.study, name=printable(cell.title), config={"key": cell.key, **cell.fields},
            dir=str(folder), mode="offline", settings=settings, reinit="finish_previous",
        )  # fmt: skip
        repeats = sorted({repeat for values in cell.figures.values() for repeat in values})
        for repeat in repeats:
            row = {name: values[repeat] for name, values in cell.figures.items() if repeat in values}
            run.log({**row, "repeat": repeat})
        paths.append(Path(run.dir).parent)
        run.finish(exit_code=0 if cell.status == Status.COMPLETED else 1)
    library.teardown()  # waits for the process that writes the files, which a busy machine leaves behind `finish`
    return paths


def optimum(study: StudyResult, folder: Path) -> list[Path]:
    """A `benchmark_report.json` of optimum-benchmark for each cell with a latency: samples are medians of repeats."""
    paths = []
    for cell in exported_cells(study):
        report = _optimum_report(cell)
        if report:
            path = folder / cell.key / "benchmark_report.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(report, indent=1) + "\n")
            write_atomically(path.with_name("benchmark_config.json"), json.dumps(cell.fields, indent=1) + "\n")
            paths.append(path)
    return paths


def _optimum_report(cell: ExportedCell) -> dict[str, Any]:
    """Targets of optimum-benchmark: `prefill` and `per_token` of generation, `forward` or `train` of other work."""
    found: dict[str, Any] = {}
    targets = {"ttft_seconds": "prefill", "time_per_output_token_seconds": "per_token"}
    targets |= {"step_seconds": "train"}
    if not targets.keys() & cell.figures.keys():
        targets = {"latency_seconds": "forward"}
    for figure, target in targets.items():
        values = list(cell.figures.get(figure, {}).values())
        if values:
            found[target] = {"memory": None, "latency": _optimum_latency(values), "throughput": None}
            found[target] |= {"energy": None, "efficiency": None}
    rate = cell.estimates.get("tokens_per_second")
    if found and rate is not None:
        next(reversed(found.values()))["throughput"] = {"unit": "tokens/s", "value": rate.median}
    if found and cell.result.peak_bytes is not None:
        next(iter(found.values()))["memory"] = _optimum_memory(cell.result)
    return found


def _optimum_memory(result: CellResult) -> dict[str, Any]:
    """Megabytes over all ranks. On a GPU the peak is that of torch's allocator, and the host's is beside it."""
    memory = dict.fromkeys(("max_ram", "max_global_vram", "max_process_vram", "max_reserved", "max_allocated"))
    reading, megabytes = result.memory, (result.peak_bytes or 0.0) / 1e6
    if reading is None or _OF_HOST not in {**reading.record.figures, **reading.record.rank_figures}:
        return {"unit": "MB", **memory, "max_ram": megabytes}
    host = reading.numbers_by_rank(_OF_HOST)
    return {"unit": "MB", **memory, "max_ram": sum(host) / 1e6 if host else None, "max_allocated": megabytes}


def _optimum_latency(values: list[float]) -> dict[str, Any]:
    mean = float(np.mean(values))
    spread = float(np.std(values))
    marks = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 95, 99)}
    return {
        "unit": "s", "values": values, "count": len(values), "total": sum(values), "mean": mean, **marks,
        "stdev": spread, "stdev_": 100 * spread / mean if mean else 0.0,
    }  # fmt: skip


def huggingface(study: StudyResult, folder: Path) -> list[Path]:
    """A dataset folder: `data/records.parquet` and its card, `README.md`."""
    data, card = folder / "data" / "records.parquet", folder / "README.md"
    data.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(data, records_parquet(study))
    models = sorted({result.model for result in study.cells.values()})
    name = json.dumps(printable(study.plan.study))  # JSON's strings are YAML's
    lines = [
        "---",
        f"pretty_name: {name}",
        "tags: [benchmark, rankwise]",
        "configs:",
        "  - config_name: default",
        "    data_files: [{split: train, path: data/records.parquet}]",
        "---",
        "",
        "# Measurements of a scaling study",
        "",
        "A row for each record: one attempt at one repeat of one cell, in SI units; empty is unknown. Each repeat is a "
        "launch of its own.",
        "",
        f"- Study: `{printable(study.plan.study)}`",
        *(f"- Model: `{printable(model).replace('`', chr(39))}`" for model in models),
        f"- Cells: {len(study.cells)}",
    ]
    write_atomically(card, "\n".join(lines) + "\n")
    return [data, card]


EXPORTS: dict[str, Callable[[StudyResult, Path], list[Path]]] = {
    "parquet": parquet,
    "prometheus": prometheus,
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "wandb": wandb,
    "optimum": optimum,
    "huggingface": huggingface,
}
"""Format -> its writer."""
