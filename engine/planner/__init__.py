"""Predict memory, time, price and the best layout of a workload without running it. Never imports torch.

from engine.planner import HardwareSelector
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.planner.choice.selector import HardwareSelector

__all__ = ["HardwareSelector"]


def __getattr__(name: str) -> Any:
    """Import the selector on first access, so that importing a part of the planner does not load all of it."""
    if name == "HardwareSelector":
        from engine.planner.choice.selector import HardwareSelector

        return HardwareSelector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
