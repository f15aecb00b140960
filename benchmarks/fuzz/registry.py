"""All targets of the modules `run_*.py` beside this one.

registered()["study.file"].function
"""

import importlib
import pkgutil
from dataclasses import dataclass

import benchmarks.fuzz
from benchmarks.fuzz.oracle import Target


@dataclass(frozen=True)
class Registered:
    """A target with the valid inputs that its inputs are derived from."""

    name: str
    module: str
    function: Target
    seeds: tuple[bytes, ...]


def registered() -> dict[str, Registered]:
    """Every target by name."""
    found: dict[str, Registered] = {}
    for info in pkgutil.iter_modules(benchmarks.fuzz.__path__):
        if not info.name.startswith("run_"):
            continue
        module = importlib.import_module(f"benchmarks.fuzz.{info.name}")
        known = module.seeds() if hasattr(module, "seeds") else {}
        for name, function in module.targets().items():
            found[name] = Registered(name, info.name, function, tuple(known.get(name, ())))
    return found
