"""Shared state of the stages of one run. Does not import Prefect."""

from pathlib import Path
from typing import Protocol

from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.spec.target import Target
from tasks.campaign.graph import RunGraph
from tasks.campaign.progress import RunProgress


class Cancellation(Protocol):
    """Whether the run was cancelled (`tasks.prefect_api.cancellation.ApiWatcher`)."""

    def check(self) -> None:
        """Raise an exception that ends the run if it was cancelled."""


class Session:
    """An active run: its folder, plan, model cache, progress and cancellation watcher.

    excluded: by target, nodes that a test before measuring found slow or broken. adopted: jobs of an earlier
    run that a scheduler still has, by name.

    A plain class on purpose: Prefect walks through dataclasses and models that a task is given, which
    for a plan of a thousand cells costs more than the task.
    """

    def __init__(
        self, run: RunPaths, plan: Plan, cache: Path, run_progress: RunProgress, watcher: Cancellation
    ) -> None:
        self.run = run
        self.plan = plan
        self.cache = cache
        self.run_progress = run_progress
        self.watcher = watcher
        self.excluded: dict[str, frozenset[str]] = {}
        self.adopted: list[str] = []
        self.graph = RunGraph()

    def target(self, name: str) -> Target:
        """The target of this name, which the plan is sure to have."""
        return next(target for target in self.plan.targets if target.name == name)
