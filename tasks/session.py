"""What the stages of one run share. No Prefect here."""

from pathlib import Path

from configs.paths import RunPaths
from configs.plan import Plan
from tasks.board import Board
from tasks.cancellation import ApiWatcher
from tasks.slot import MachineSlot


class Session:
    """A run that is going on: its folder, plan, model cache, board, ear for cancellation and slot.

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
