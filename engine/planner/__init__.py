"""What will fit, how fast, at what price, in which layout: predicted without running. Never imports torch.

from engine.planner import HardwareSelector
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.planner.choice.selector import HardwareSelector

__all__ = ["HardwareSelector"]


def __getattr__(name: str) -> Any:
    """The selector, when it is asked for: a part of the planner must not load all of it."""
    if name == "HardwareSelector":
        from engine.planner.choice.selector import HardwareSelector

        return HardwareSelector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
