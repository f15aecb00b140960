"""Shared state of the stages of one run. Does not import Prefect."""

from pathlib import Path
from typing import Protocol

from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.targets.target import Target
from tasks.campaign.graph import RunGraph
from tasks.campaign.progress import RunProgress
from tasks.campaign.rental_group import RentalGroup


class Cancellation(Protocol):
    """Whether the run was cancelled (`tasks.prefect_api.cancellation.ApiWatcher`)."""

    def check(self) -> None:
        """Raise an exception that ends the run if it was cancelled."""


class Session:
    """An active run: its folder, plan, model cache, progress and cancellation watcher.

    excluded: by target, nodes that a test before measuring found slow or broken. adopted: jobs of an earlier
    run that a scheduler still has, by name. rentals: of rented targets; placed: what those have become, by target.

    A plain class on purpose: Prefect walks through dataclasses and models that a task is given, which
    for a plan of a thousand cells costs more than the task.
    """

    def __init__(
        self,
        run: RunPaths,
        plan: Plan,
        cache: Path,
        run_progress: RunProgress,
        watcher: Cancellation,
        rentals: RentalGroup | None = None,
    ) -> None:
        self.run = run
        self.plan = plan
        self.cache = cache
        self.run_progress = run_progress
        self.watcher = watcher
        self.excluded: dict[str, frozenset[str]] = {}
        self.adopted: list[str] = []
        self.graph = RunGraph()
        self.rentals = rentals or RentalGroup()
        self.placed: dict[str, Target] = {}

    def target(self, name: str) -> Target:
        """The target of this name, which the plan is sure to have; a rented one as the hosts that it has become."""
        return next(target for target in self.targets if target.name == name)

    @property
    def targets(self) -> list[Target]:
        """All targets as jobs get them."""
        return [self.placed.get(target.name, target) for target in self.plan.targets]

    @property
    def placed_plan(self) -> Plan:
        """The plan with these targets, for making jobs; the one in the run folder keeps what the study says."""
        return self.plan.model_copy(update={"targets": tuple(self.targets)}) if self.placed else self.plan
