"""Inference servers that a launch can start, and the environments that they run in.

engines:
  vllm:      {python: /opt/vllm/bin/python}
  llama.cpp: {program: /opt/llama.cpp/llama-server, model: model-bf16.gguf}
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.common.base import Frozen
from configs.common.execution import Engine, Layout

OtherServer = Literal["vllm", "sglang", "llama.cpp", "transformers"]
"""Servers of other projects. They run in environments of their own and never share Rankwise's."""

AXES: dict[Engine, tuple[str, ...]] = {
    "rankwise": ("dp", "tp", "pp"),
    "vllm": ("dp", "tp", "pp"),
    "sglang": ("dp", "tp", "pp"),
    "llama.cpp": (),
    "transformers": (),
    "endpoint": (),
}
"""Degrees of a layout that each server can have above 1."""


TEXT_ONLY: tuple[Engine, ...] = ("transformers",)
"""Servers that refuse token ids, which random prompts are."""


class EngineEnvironment(Frozen):
    """Where an engine is installed. None of the fields: the environment made by `rankwise engine add`."""

    python: str | None = Field(None, min_length=1, description="interpreter of the engine's own environment")
    program: str | None = Field(None, min_length=1, description="llama.cpp: path of llama-server")
    model: str | None = Field(None, min_length=1, description="llama.cpp: GGUF file of the study's model")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.python is not None and self.program is not None:
            raise ValueError("program: python is given too. Leave one of the two out")
        return self


def check_engine_layout(engine: Engine, layout: Layout) -> None:
    """Raise ValueError for a layout that the server does not have."""
    axes = AXES.get(engine)
    wrong = [axis for axis in ("dp", "tp", "pp") if getattr(layout, axis) > 1 and axis not in (axes or ())]
    if axes is not None and wrong:
        allowed = ", ".join(axes) or "one rank"
        raise ValueError(f"layout: a server of {engine} supports {allowed} only, got {layout}. Use `engine: rankwise`")


def check_engine_prompts(engine: Engine, prompts: str | None) -> None:
    """Raise ValueError for random prompts to a server that takes texts only."""
    if engine in TEXT_ONLY and prompts is None:
        raise ValueError(
            f"prompts: a server of {engine} takes texts only, and random prompts are token ids. "
            "Give a file, `workload.prompts: FILE.jsonl`, or use `engine: rankwise`"
        )
