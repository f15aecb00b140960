"""Records: the results of one (cell, repeat, attempt).

Each rank writes its own part when a cell ends; `tasks.collect` merges the parts into a record. Raw
samples lie beside in a NumPy archive of one-dimensional columns named `<rank>/<column>`. Nothing
derived is stored: rates and statistics are computed from the samples on read.
"""

import re
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, Field, field_validator

from configs.common.base import SCHEMA_VERSION, Frozen
from configs.common.files.reading import as_model, brief, read_json_object
from configs.common.printable import printable
from configs.common.secrets import redacted
from configs.spec.cell import Cell

MAX_RECORD_BYTES = 8192
"""Without the cell, which the plan has whole, and without what is listed by rank, which grows with the job."""

FILE_NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$"
"""Of jobs and environments, which name files of the run folder."""


def _moment(text: str) -> str:
    if not 1970 <= datetime.fromisoformat(text).year <= 2999:
        raise ValueError("expected a time between the years 1970 and 2999")
    return text


Timestamp = Annotated[str, AfterValidator(_moment)]
"""A time as `configs.common.base.utc_now` writes it."""

MAX_AMOUNT = 1e15
Amount = Annotated[float, Field(ge=-MAX_AMOUNT, le=MAX_AMOUNT)]
"""Seconds or joules: so many that sums of them stay numbers."""

HostName = Annotated[str, AfterValidator(partial(printable, max_characters=255))]
"""A host's name, whatever its owner called it, as one line of text."""

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

    @field_validator("message")
    @classmethod
    def _without_secrets(cls, message: str) -> str:
        return redacted(message)


class Accounting(Frozen):
    """What the scheduler says of a job. Unknown is None: a cluster may keep no accounts, or no energy."""

    job_id: str
    state: str = Field(description="the scheduler's own word: COMPLETED, NODE_FAIL, ...")
    nodes: tuple[str, ...] = ()
    queued_seconds: Amount | None = Field(None, description="from submission to start")
    elapsed_seconds: Amount | None = None
    cpu_seconds: Amount | None = Field(None, description="of all processes on all nodes")
    max_rss_bytes: int | None = Field(None, description="of the largest task, as the scheduler samples it")
    energy_joules: Amount | None = None


class RankPart(Frozen):
    """What one rank says of one measurement. Figures are numbers with their unit in the name."""

    schema_version: int = SCHEMA_VERSION
    measurement: str
    rank: int
    host: HostName
    status: Status
    started_at: Timestamp
    finished_at: Timestamp
    failure: Failure | None = None
    environment: dict[str, Any] = Field({}, description="given by rank 0")
    figures: dict[str, Figure] = {}


class Record(Frozen):
    """One repeat of one cell, merged over its ranks."""

    schema_version: int = SCHEMA_VERSION
    key: str
    cell: Cell
    measuring_pass: MeasuringPass = "timed"
    repeat: int = Field(ge=0)
    attempt: int = Field(ge=1)
    status: Status
    job: str = Field(pattern=FILE_NAME_PATTERN)
    position: int = Field(ge=0, description="place of the measurement in its launch, from 0")
    started_at: Timestamp | None
    finished_at: Timestamp | None
    failure: Failure | None = None
    environment: str | None = Field(
        None, pattern=FILE_NAME_PATTERN, description="hash; the text is in environments/<hash>.json"
    )
    hosts: list[HostName] = []
    accounting: Accounting | None = Field(None, description="of the job; every measurement of a job carries the same")
    figures: dict[str, Figure] = Field({}, description="of rank 0, and those that are of the whole job")
    rank_figures: dict[str, list[Figure]] = Field({}, description="figure -> value by rank, where ranks differ")
    num_columns: int = Field(0, ge=0, description="columns of raw samples in the archive beside; 0: there is none")


class SchemaError(ValueError):
    """The file was written with another schema version."""


def check_schema(data: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return a file's content unchanged. Raises SchemaError for another version and ValueError for none."""
    version = data.get("schema_version")
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"{source}: schema_version: got {brief(version)}, expected {SCHEMA_VERSION}")
    if version != SCHEMA_VERSION:
        raise SchemaError(
            f"{source}: schema_version: got {version}, expected {SCHEMA_VERSION}. "
            "Use the version of Rankwise that wrote the file, or another run folder"
        )
    return data


def record_name(measuring_pass: MeasuringPass, repeat: int, attempt: int) -> str:
    """Name of a record's file in the folder of its cell."""
    kind = "" if measuring_pass == "timed" else f"{measuring_pass}-"
    return f"{kind}r{repeat}-a{attempt}.json"


_UNTIMED = "|".join(name for name in get_args(MeasuringPass) if name != "timed")
_NAME_SET_ASIDE = re.compile(rf"([0-9a-f]{{16}})--(?:({_UNTIMED})-)?r(\d{{1,9}})-a(\d{{1,9}})\.json(?:\.\d+)?")


def place_set_aside(name: str) -> tuple[str, MeasuringPass, int, int] | None:
    """Key, pass, repeat and attempt of a record, by the name `<key>--<file>` that it has in `set_aside/`."""
    match = _NAME_SET_ASIDE.fullmatch(name)
    if match is None:
        return None
    key, measuring_pass, repeat, attempt = match.groups()
    return key, cast(MeasuringPass, measuring_pass or "timed"), int(repeat), int(attempt)


def read_record(path: Path) -> Record:
    """Load one record. Raises OSError, SchemaError, or ValueError for a file that is not the record of its name."""
    record = as_model(check_schema(read_json_object(path), path), Record, str(path))
    check_place(record, path)
    check_key(record, path)
    return record


def check_place(record: Record, path: Path) -> None:
    """Raises ValueError where a record does not say of itself what the name of its file says."""
    name = record_name(record.measuring_pass, record.repeat, record.attempt)
    if path.name != name or path.parent.name != record.key:
        raise ValueError(f"{path}: holds the record {printable(record.key, 40)}/{name}")


def check_key(record: Record, path: Path) -> None:
    """Raises ValueError where the cell of a record is not that of its key."""
    if record.cell.key != record.key:
        raise ValueError(f"{path}: cell: has the key {record.cell.key}, expected {printable(record.key, 40)}")


def read_part(path: Path) -> RankPart:
    """Load one rank's part. Raises as `read_record`."""
    return as_model(check_schema(read_json_object(path), path), RankPart, str(path))
