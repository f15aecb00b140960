"""Records: the results of one (cell, repeat, attempt).

Each rank writes its own part when a cell ends; `tasks.collect` merges the parts into a record. Raw
samples lie beside in a NumPy archive of one-dimensional columns named `<rank>/<column>`. Nothing
derived is stored: rates and statistics are computed from the samples on read.
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from configs.common.base import SCHEMA_VERSION, Frozen
from configs.spec.cell import Cell

MAX_RECORD_BYTES = 8192
"""Without what is listed by rank, which grows with the job."""

Figure = bool | int | float | str | None
MeasuringPass = Literal["timed", "memory", "profile", "perf", "nsys"]
PROFILING_PASSES: tuple[MeasuringPass, ...] = ("profile", "perf", "nsys")
"""Passes that record one pass of the work, after its warm-up, and time nothing."""


class Status(StrEnum):
    """How a repeat ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    NODE_FAILED = "node_failed"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    LOST = "lost"
    UNSUPPORTED = "unsupported"
    DOES_NOT_FIT = "does_not_fit"
    OVER_BUDGET = "over_budget"


class Failure(Frozen):
    """Why there is no figure: one line for a person, and where to read more."""

    message: str
    rank: int | None = None
    kind: str | None = Field(None, description="class of the exception, or the signal")
    log: str | None = Field(None, description="path relative to the run folder")


class Accounting(Frozen):
    """What the scheduler says of a job. Unknown is None: a cluster may keep no accounts, or no energy."""

    job_id: str
    state: str = Field(description="the scheduler's own word: COMPLETED, NODE_FAIL, ...")
    nodes: tuple[str, ...] = ()
    queued_seconds: float | None = Field(None, description="from submission to start")
    elapsed_seconds: float | None = None
    cpu_seconds: float | None = Field(None, description="of all processes on all nodes")
    max_rss_bytes: int | None = Field(None, description="of the largest task, as the scheduler samples it")
    energy_joules: float | None = None


class RankPart(Frozen):
    """What one rank says of one measurement. Figures are numbers with their unit in the name."""

    schema_version: int = SCHEMA_VERSION
    measurement: str
    rank: int
    host: str
    status: Status
    started_at: str
    finished_at: str
    failure: Failure | None = None
    environment: dict[str, Any] = Field({}, description="given by rank 0")
    figures: dict[str, Figure] = {}


class Record(Frozen):
    """One repeat of one cell, merged over its ranks."""

    schema_version: int = SCHEMA_VERSION
    key: str
    cell: Cell
    measuring_pass: MeasuringPass = "timed"
    repeat: int
    attempt: int
    status: Status
    job: str
    position: int = Field(description="place of the measurement in its launch, from 0")
    started_at: str | None
    finished_at: str | None
    failure: Failure | None = None
    environment: str | None = Field(None, description="hash; the text is in environments/<hash>.json")
    hosts: list[str] = []
    accounting: Accounting | None = Field(None, description="of the job; every measurement of a job carries the same")
    figures: dict[str, Figure] = Field({}, description="of rank 0, and those that are of the whole job")
    rank_figures: dict[str, list[Figure]] = Field({}, description="figure -> value by rank, where ranks differ")
    num_columns: int = Field(0, description="columns of raw samples in the archive beside; 0: there is none")


class SchemaError(ValueError):
    """The file was written with another schema version."""


def check_schema(data: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return a file's content unchanged. Raises SchemaError for another version and ValueError for none."""
    version = data.get("schema_version")
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"{source}: schema_version: got {version!r}, expected {SCHEMA_VERSION}")
    if version != SCHEMA_VERSION:
        raise SchemaError(
            f"{source}: schema_version: got {version}, expected {SCHEMA_VERSION}. "
            "Use the version of Rankwise that wrote the file, or another run folder"
        )
    return data


def read_record(path: Path) -> Record:
    """Load one record. Raises SchemaError, or ValueError for a file that is not a record."""
    return Record.model_validate(check_schema(read_json_object(path), path))


def read_part(path: Path) -> RankPart:
    """Load one rank's part. Raises as `read_record`."""
    return RankPart.model_validate(check_schema(read_json_object(path), path))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file where it holds anything else."""
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: got {type(data).__name__}, expected a JSON object")
    return data
