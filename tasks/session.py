"""What the stages of one run share. No Prefect here."""

from pathlib import Path

from configs.paths import RunPaths
from configs.plan import Plan
from configs.target import Target
from tasks.board import Board
from tasks.cancellation import ApiWatcher
from tasks.slot import MachineSlot


class Session:
    """A run that is going on: its folder, plan, model cache, board, ear for cancellation and slot.

    excluded: by target, nodes that a test before measuring found slow or broken. adopted: jobs of an earlier
    run that a scheduler still has, by name.

    A plain class on purpose: Prefect walks through dataclasses and models that a task is given, which
    for a plan of a thousand cells costs more than the task.
    """

    def __init__(
        self, run: RunPaths, plan: Plan, cache: Path, board: Board, watcher: ApiWatcher, slot: MachineSlot
    ) -> None:
        self.run = run
        self.plan = plan
        self.cache = cache
        self.board = board
        self.watcher = watcher
        self.slot = slot
        self.excluded: dict[str, frozenset[str]] = {}
        self.adopted: list[str] = []

    def target(self, name: str) -> Target:
        """The target of this name, which the plan is sure to have."""
        return next(target for target in self.plan.targets if target.name == name)
