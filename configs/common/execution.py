"""How a cell is executed, whatever its work: layout, precision, engine, and passes over the weights."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.common.base import Frozen

Dtype = Literal["float32", "bfloat16", "float16"]
Engine = Literal["rankwise", "transformers", "deepspeed", "onnxruntime", "vllm", "sglang", "llama.cpp", "endpoint"]
"""`endpoint`: whatever serves at the address that the cell's target names."""
EngineMode = Literal["eager", "static", "compiled"]
PageCache = Literal["cold", "warm"]
Strategy = Literal["none", "ddp", "fsdp", "zero1", "zero2", "zero3"]
StageBalance = Literal["memory", "speed"]

Compression = Annotated[
    str, Field(pattern=r"^(int8|int8_dynamic|int4|float8|prune_2_4|prune_[1-9][0-9]|balanced|aggressive)$")
]
"""A pass over the weights after loading; `docs/reference/compression.md` defines each. The last two are lists of passes
that follow what the hardware can do (`engine.compression.passes`)."""
LEVELS = ("balanced", "aggressive")


MAX_DEGREE = 65_536
Degree = Annotated[int, Field(gt=0, le=MAX_DEGREE)]
"""Of parallelism along one axis, or a number of ranks or nodes."""


class Layout(Frozen):
    """Data (`dp`), tensor (`tp`) and pipeline (`pp`) parallel degrees.

    `strategy` synchronises the replicas in data-parallel training; `none` for one rank or inference.
    `stage_balance` applies only to inference with `pp` above 1.
    """

    dp: Degree = 1
    tp: Degree = 1
    pp: Degree = 1
    strategy: Strategy = "none"
    stage_balance: StageBalance = Field(
        "memory",
        description="balance stages by bytes held (memory) or by bytes read in a decode step (speed)",
    )

    @model_validator(mode="after")
    def _one_stage_is_balanced(self) -> "Layout":
        """Normalise `stage_balance`, so that a sweep over `pp` measures a single stage once."""
        if self.pp == 1 and self.stage_balance != "memory":
            object.__setattr__(self, "stage_balance", "memory")
        return self

    @property
    def ranks(self) -> int:
        """Number of processes in the group."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        degrees = [f"{axis}={n}" for axis, n in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)) if n > 1]
        return (" x ".join(degrees) or "1 rank") + (" by speed" if self.stage_balance == "speed" else "")
