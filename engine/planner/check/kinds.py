"""Kinds of files of measurements: the columns that tell them apart, those that describe a run, and those measured.

KINDS       # each with the module whose `predict(rows, fit)` predicts its rows
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from engine.planner.check.rows import PublishedRow, RowPrediction

RowPredictor = Callable[[Sequence[PublishedRow], Sequence[PublishedRow]], list[RowPrediction]]


@dataclass(frozen=True)
class FileKind:
    """Columns of a file kind.

    telling: columns that only this kind has. required: columns needed for a prediction. numbers: required columns that
    hold a number. optional: known but not needed. measured: the first is the one predicted.
    shown: columns that identify a row in a table, words first.
    """

    title: str
    module: str
    telling: frozenset[str]
    required: tuple[str, ...]
    numbers: tuple[str, ...]
    optional: tuple[str, ...]
    measured: tuple[str, ...]
    shown: tuple[str, ...]
    completes: bool = False  # the module has `complete(row)`, which fills the measured column from another measurement

    @property
    def predictor(self) -> RowPredictor:
        """The `predict` function of the kind's module."""
        found: RowPredictor = import_module(self.module).predict
        return found

    def completed(self, row: PublishedRow) -> PublishedRow:
        """Return a row with the measured column filled from another measured one, if the kind's module can."""
        complete = getattr(import_module(self.module), "complete", None) if self.completes else None
        return complete(row) if complete else row

    @property
    def columns(self) -> tuple[str, ...]:
        """All known columns."""
        return (*self.required, *self.optional, *self.measured)


KINDS = (
    FileKind(
        title="training throughput",
        module="engine.planner.check.throughput",
        telling=frozenset(
            {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "sharding", "precision"}
        ),
        required=("model", "sequence_length", "num_gpus", "gpu", "micro_batch_size"),
        numbers=("sequence_length", "num_gpus", "micro_batch_size"),
        optional=(
            "num_parameters", "gradient_accumulation_steps", "global_batch_size", "precision", "sharding",
            "activation_checkpointing",
        ),
        measured=("tokens_per_second", "tokens_per_second_per_gpu", "mfu_percent", "hfu_percent"),
        shown=("model", "gpu", "num_gpus", "sequence_length", "micro_batch_size"),
    ),
    FileKind(
        title="tensor-parallel decode",
        module="engine.planner.check.decode",
        telling=frozenset({"prompt_tokens", "dtype", "batch_size"}),
        required=("model", "num_gpus", "gpu", "dtype", "batch_size", "prompt_tokens"),
        numbers=("num_gpus", "batch_size", "prompt_tokens"),
        optional=(),
        measured=("tokens_per_second", "achieved_bandwidth_gb_per_second"),
        shown=("model", "gpu", "dtype", "num_gpus", "batch_size"),
    ),
    FileKind(
        title="training memory",
        module="engine.planner.check.memory",
        telling=frozenset({"parallelism", "local_batch_size", "compile", "float8"}),
        required=("model", "num_gpus", "gpu", "parallelism", "local_batch_size", "sequence_length"),
        numbers=("num_gpus", "local_batch_size", "sequence_length"),
        optional=("num_parameters", "activation_checkpointing", "compile", "float8"),
        measured=("peak_memory_gib", "tokens_per_second_per_gpu"),
        shown=("model", "gpu", "parallelism", "num_gpus", "local_batch_size"),
    ),
    FileKind(
        title="inference throughput",
        module="engine.planner.check.generation",
        telling=frozenset({"framework", "new_tokens", "prompt_tokens", "batch_size"}),
        required=("model", "gpu", "num_gpus", "framework", "batch_size", "prompt_tokens", "new_tokens"),
        numbers=("num_gpus", "batch_size", "prompt_tokens", "new_tokens"),
        optional=("dtype", "precision"),
        measured=("tokens_per_second", "latency_seconds"),
        shown=("model", "gpu", "framework", "num_gpus", "batch_size", "prompt_tokens", "new_tokens"),
        completes=True,
    ),
    FileKind(
        title="saturated serving",
        module="engine.planner.check.serving",
        telling=frozenset({"layout", "precision", "prompt_tokens", "new_tokens"}),
        required=("model", "gpu", "layout", "precision", "prompt_tokens", "new_tokens"),
        numbers=("prompt_tokens", "new_tokens"),
        optional=("framework",),
        measured=("output_tokens_per_second_per_gpu",),
        shown=("model", "gpu", "layout", "precision", "prompt_tokens", "new_tokens"),
    ),
    FileKind(
        title="large-scale training",
        module="engine.planner.check.pretraining",
        telling=frozenset(
            {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "precision", "tp", "pp", "cp",
             "vp", "ep", "fsdp"}
        ),
        required=("model", "gpu", "num_gpus", "precision", "sequence_length", "micro_batch_size", "tp", "pp"),
        numbers=("num_gpus", "sequence_length", "micro_batch_size", "tp", "pp"),
        optional=("global_batch_size", "fsdp", "cp", "vp", "ep", "gradient_accumulation_steps"),
        measured=("tokens_per_second_per_gpu", "model_tflops_per_gpu"),
        shown=("model", "gpu", "precision", "num_gpus", "tp", "pp", "ep"),
    ),
    FileKind(
        title="tensor parallelism over a slow link",
        module="engine.planner.check.slow_link",
        telling=frozenset({"num_devices", "device", "link", "weights", "sync"}),
        required=("model", "num_devices", "device", "link", "weights", "sync"),
        numbers=("num_devices",),
        optional=(),
        measured=(
            "token_milliseconds", "inference_milliseconds", "synchronization_milliseconds", "sync_kilobytes_per_token",
        ),
        shown=("model", "device", "link", "num_devices"),
    ),
)  # fmt: skip
