"""What `rankwise plan` was asked for, and the exit codes with which it answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PLANNED, WRONG_ARGUMENTS, NOTHING_FITS = 0, 2, 3


@dataclass(frozen=True)
class PlanRequest:
    """Arguments of the command line. words: positional arguments, including kinds of hardware."""

    words: tuple[str, ...] = ()
    model: str | None = None
    family: str | None = None
    mode: Literal["training", "inference"] = "training"
    gpus: int | None = None
    max_gpus: int | None = None
    batch_size: int = 1
    distributed: bool = False
    max_memory_gb: float | None = None
    hardware: tuple[str, ...] = ()
    accelerator: str | None = None
    sequence_length: int | None = None
    new_tokens: int = 128
    serve: bool = False
    rate: float | None = None
    engine: str | None = None
    ttft: float | None = None
    tpot: float | None = None
    spot: bool = False
    output: Path | None = None
    as_json: bool = False
    list_models: bool = False
    guide: bool = False
    benchmark_out: Path | None = None
    learn_from: str | None = None
    own_catalog: Path | None = None
    assignments: tuple[str, ...] = ()
