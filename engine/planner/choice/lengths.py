"""How long a sequence is taken to be: what was asked for, or all that the model takes up to a usual length.

length_of(architecture, None)                 # 2,048, or the model's positions where they are fewer
length_of(architecture, 512, "inference")     # 512; ValueError where the model has no such many positions
"""

from typing import Literal

from engine.planner.architecture import Architecture

TaskType = Literal["training", "inference"]


def default_length(architecture: Architecture, task_type: TaskType = "training") -> int:
    """Tokens of a sequence where none are said: all that the model takes, up to 2,048 (prompts: up to 512)."""
    most = 2048 if task_type == "training" or architecture.kind != "decoder" else 512
    return min(architecture.max_positions or most, most)


def length_of(architecture: Architecture, said: int | None, task_type: TaskType = "training") -> int:
    """Tokens of a sequence. Raises ValueError where a model's table of positions has no such many."""
    most = architecture.max_positions
    if said is not None and architecture.positions and most is not None and said > most:
        raise ValueError(f"{architecture.name} has {most:,} positions; sequences of {said:,} tokens do not go in")
    return said or default_length(architecture, task_type)


def length_note(said: int | None, length: int) -> list[str]:
    """A remark where no length was named: time and memory hang on it."""
    return [] if said is not None else [f"no length was named; sequences of {length:,} tokens are assumed"]
