"""Predict peak memory of published torchtitan training runs; no constant is fitted to a row.

    predict(rows, fit) -> list[RowPrediction]            # GiB, as torch.cuda.max_memory_reserved() counts

Reads model, GPUs, parallelism, batch, sequence, checkpointing and compilation; never the measured columns. `fit` is not
needed. Properties of torchtitan (December 2024, torchtitan/parallelisms and train.py): FSDP2 around each block, the
last one not resharded after the forward pass, none with pipelines; float32 shards, bfloat16 products, gradients reduced
in float32; sequence-parallel norms and a loss on shards of the vocabulary wherever there is
tensor parallelism; logits freed before the backward pass; keys and values repeated for each query head; "selective" is
the policy by operator; a float8 product keeps its inputs in bfloat16; a pipeline splits a local batch into as many
micro-batches as it has stages.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from configs.common.execution import Layout
from configs.hardware.hardware import Accelerator, Machine
from engine.planner.catalog import find_model
from engine.planner.check.rows import PublishedRow, RowPrediction, factor_interval, positive_integer
from engine.planner.memory.framework import Framework
from engine.planner.memory.training import training_memory
from engine.planner.setup import Checkpointing, Precision, TrainingSetup

_GIB = 2**30
_FACTOR = 1.12  # either way: the worst of 160 cells counted to the byte, docs/measurements/planner.md
_TORCHTITAN = Framework(
    holds_logits=False, expands_heads=True, stays_gathered="last", loss_parallel=True, sequence_parallel=True,
    context_bytes=0,  # max_memory_reserved excludes the CUDA context
)  # fmt: skip
_CHECKPOINTING: dict[str, Checkpointing] = {
    "none": "none", "false": "none", "": "none", "selective": "selective", "full": "full", "true": "full",
}  # fmt: skip
_PART = re.compile(r"(fsdp|hsdp|dp|ddp|tp|cp|pp)(\d+(?:x\d+)?)?$")
_IGNORED = {"async", "asynctp", "sp", "interleaved", "1f1b"}


@dataclass(frozen=True)
class Degrees:
    """Ranks by axis; `sharded`: ranks that share the weights, `copies`: groups that hold all of them."""

    sharded: int
    copies: int
    tp: int
    cp: int
    pp: int
    ddp: bool


def degrees(parallelism: str, ranks: int) -> Degrees:
    """Parse `fsdp`, `fsdp32_tp8`, `fsdp8_tp8_pp8`, `hsdp4x8`; an axis without a number takes the remaining ranks.

    `none` is one rank.

    Raises ValueError for an unknown word, or numbers whose product is not `ranks`.
    """
    found: dict[str, str | None] = {}
    plain = parallelism.strip().lower()
    for word in re.split(r"[_+,/ -]+", "fsdp1" if plain == "none" else plain):
        part = _PART.match(word)
        if part:
            found[part[1]] = part[2]
        elif word not in _IGNORED:
            known = "fsdp, hsdp, ddp, dp, tp, cp, pp, or none on one GPU"
            raise ValueError(f"parallelism {parallelism!r}: {word!r} is not one of {known}")
    numbers = {axis: 1 for axis in ("tp", "cp", "pp")}
    free = [axis for axis in found if found[axis] is None]
    for axis in numbers:
        if found.get(axis):
            numbers[axis] = _number(found[axis], parallelism)
    rest = ranks // (numbers["tp"] * numbers["cp"] * numbers["pp"])
    copies = 1
    if found.get("hsdp"):
        first, _, second = str(found["hsdp"]).partition("x")
        if not second:
            raise ValueError(f"parallelism {parallelism!r}: hsdp needs copies x shards, such as hsdp4x8")
        copies, data = int(first), int(second)
    else:
        if "hsdp" in found:
            raise ValueError(f"parallelism {parallelism!r}: hsdp needs copies x shards, such as hsdp4x8")
        if found.get("dp") and "fsdp" in found:
            copies = _number(found["dp"], parallelism)
        named = found.get("fsdp") or found.get("ddp") or (found.get("dp") if "fsdp" not in found else None)
        data = _number(named, parallelism) if named else rest // copies
        if free and free[0] in numbers and not set(found) & {"fsdp", "ddp", "dp"}:
            numbers[free[0]], data = rest, 1  # `tp` alone: over all ranks
    if copies * data * numbers["tp"] * numbers["cp"] * numbers["pp"] != ranks:
        raise ValueError(f"parallelism {parallelism!r} does not make {ranks} ranks")
    return Degrees(data, copies, numbers["tp"], numbers["cp"], numbers["pp"], "ddp" in found or set(found) == {"dp"})


def _number(text: str | None, parallelism: str) -> int:
    if text is None or not text.isdigit() or int(text) < 1:
        raise ValueError(f"parallelism {parallelism!r}: {text!r} is not a number of ranks")
    return int(text)


def predict(rows: Sequence[PublishedRow], fit: Sequence[PublishedRow]) -> list[RowPrediction]:
    """GiB reserved at the peak, or why it is not known."""
    del fit  # there is nothing to be learnt from measured rows
    return [_predict(row) for row in rows]


def _predict(row: PublishedRow) -> RowPrediction:
    try:
        setup, framework = setup_of(row)
    except (ValueError, KeyError) as error:
        return RowPrediction(None, str(error).strip("'\""))
    peak = training_memory(setup, framework).total / _GIB
    return RowPrediction(peak, interval=factor_interval(peak, _FACTOR), support="formulas alone; none is fitted")


def setup_of(row: PublishedRow) -> tuple[TrainingSetup, Framework]:
    """What a row trained. Raises ValueError naming the column that cannot be read."""
    numbers = {name: positive_integer(row, name) for name in ("num_gpus", "local_batch_size", "sequence_length")}
    axes = degrees(row["parallelism"], numbers["num_gpus"])
    checkpointing = (row.get("activation_checkpointing") or "").strip().lower()
    if checkpointing not in _CHECKPOINTING:
        raise ValueError(f"activation_checkpointing {checkpointing!r} is not one of none, selective, full")
    batch, framework = numbers["local_batch_size"], _TORCHTITAN
    micro_batches = min(axes.pp, batch)
    if axes.pp > 1:
        framework = replace(framework, stays_gathered="all")
    # Ranks of the sequence axis shard the weights too. On one GPU torchtitan applies no wrapper, whatever the row
    # names.
    strategy = "none" if numbers["num_gpus"] == 1 else "ddp" if axes.ddp else "fsdp"
    layout = Layout(dp=axes.sharded * axes.cp, tp=axes.tp, pp=axes.pp, strategy=strategy)
    # Products are in 16 bits through FSDP's mixed precision, and through autocast without FSDP (`maybe_enable_amp`).
    half: Precision = "bfloat16_mixed" if strategy == "fsdp" else "bfloat16_autocast"
    setup = TrainingSetup(
        architecture=find_model(row["model"]),
        machine=_machine(row.get("gpu") or "gpu"),
        layout=layout,
        micro_batch=max(1, batch // micro_batches),
        sequence_length=-(-numbers["sequence_length"] // axes.cp),
        accumulation=micro_batches,
        precision="float8_mixed" if _yes(row, "float8") else half,
        checkpointing=_CHECKPOINTING[checkpointing],
        compiled=_yes(row, "compile"),
    )
    return setup, framework


def _yes(row: PublishedRow, name: str) -> bool:
    text = (row.get(name) or "false").strip().lower()
    if text not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError(f"{name} {text!r} is not true or false")
    return text in ("true", "yes", "1")


@lru_cache
def _machine(name: str) -> Machine:
    """Return a generic GPU: the device type is the only field that matters here."""
    accelerator = Accelerator(
        name=name, kind="cuda", memory_bytes=80 * _GIB, bytes_per_second=1.0, peak_flops={"bfloat16": 1.0},
        title="", source="only the kind is used",
    )  # fmt: skip
    return Machine(name=name, accelerator=accelerator)
