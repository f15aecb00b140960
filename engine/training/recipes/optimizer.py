"""Optimizers by their name in torch.optim, for parameters selected by name patterns.

    OptimizerSpec("Adam", patterns=["*"], lr=0.001)
    [OptimizerSpec("SGD", patterns=["head.*"], lr=0.1, momentum=0.9), OptimizerSpec("SGD", patterns=["*"], lr=0.01)]

Of several, the first that matches takes a parameter; they are groups of one optimizer, so that their names are equal.
Patterns are those of shells (fnmatch), on names as `model.named_parameters()` has them. Parameters without a match are
not trained.
"""

import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from configs.common.printable import some_of


class OptimizerSpec:
    """name: of a class of torch.optim. lr: learning rate. settings: further arguments of that class."""

    def __init__(self, name: str, patterns: Sequence[str] = ("*",), lr: float = 1e-3, **settings: Any) -> None:
        found = getattr(torch.optim, name, None)
        if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
            raise ValueError(f"optimizer.name: torch.optim has no {name!r}; it has {', '.join(_names())}")
        if name == "LBFGS":
            raise ValueError("optimizer.name: LBFGS evaluates the loss several times a step, which no strategy does")
        if not lr > 0:
            raise ValueError(f"optimizer.lr: {lr} is not above 0")
        known = inspect.signature(found).parameters
        unknown = [setting for setting in settings if setting not in known]
        if unknown:
            raise ValueError(f"optimizer.{unknown[0]}: {name} has no such setting; it has {', '.join(known)}")
        self.kind: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = found
        self.name, self.patterns, self.lr, self.settings = name, tuple(patterns), lr, settings

    def matches(self, parameter: str) -> bool:
        """Return whether a parameter's name matches."""
        return any(fnmatchcase(parameter, pattern) for pattern in self.patterns)


def _names() -> list[str]:
    return sorted(
        name
        for name, found in vars(torch.optim).items()
        if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and name != "Optimizer"
    )


def spec_by_parameter(model: nn.Module, specs: Sequence[OptimizerSpec]) -> dict[str, OptimizerSpec]:
    """Return the spec of each parameter; unmatched ones are left out.

    Raises ValueError for a pattern without a match.
    """
    if not specs:
        raise ValueError("optimizer: give at least one OptimizerSpec")
    if len({spec.name for spec in specs}) > 1:
        raise ValueError(f"optimizer: {', '.join(spec.name for spec in specs)} in one recipe; use one name for all")
    names = [name for name, _ in model.named_parameters()]
    for spec in specs:
        for pattern in spec.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"optimizer.patterns: {pattern!r} matches no parameter; there are {some_of(names)}")
    takers = {name: next((spec for spec in specs if spec.matches(name)), None) for name in names}
    return {name: spec for name, spec in takers.items() if spec is not None}


def build(model: nn.Module, specs: Sequence[OptimizerSpec], taken: dict[str, OptimizerSpec]) -> torch.optim.Optimizer:
    """Build one optimizer with a group for each spec; rates are relative to the first one's (`rate_factor`)."""
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for spec in specs:
        members = [parameters[name] for name, taker in taken.items() if taker is spec]
        if members:
            groups.append({"params": members, "lr": spec.lr, "rate_factor": spec.lr / specs[0].lr, **spec.settings})
    return specs[0].kind(groups)
