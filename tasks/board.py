"""What is going on, for whoever wants to show it: the live table and the progress artifact read it.

One board for each study that runs in this process. Written by the flow's thread, read by others;
every update replaces whole values, so a reader never sees half of one.
"""

import time
from dataclasses import dataclass, field

from configs.record import MeasuringPass


@dataclass
class Row:
    """One launch, as shown."""

    label: str
    visits: int
    block: int
    blocks: int
    measuring_pass: MeasuringPass = "timed"
    done: int = 0
    failed: int = 0
    state: str = "waiting"
    note: str = ""
    waited_seconds: float = 0.0


@dataclass
class Board:
    """Counts and rows of one run. `left_behind`: jobs that a scheduler did not end when it was asked to."""

    study: str = ""
    total: int = 0
    already: int = 0
    done: int = 0
    failed: int = 0
    started: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stage: str = ""
    left_behind: str = ""
    ended: bool = False

    def under_way(self) -> list[dict[str, str]]:
        """What waits in a scheduler's queue or runs, for a table."""
        return [
            {
                "launch": row.label,
                "block": f"{row.block} of {row.blocks}" if row.measuring_pass == "timed" else row.measuring_pass,
                "cells": f"{row.done} of {row.visits}",
                "state": row.state,
                "job": row.note,
            }
            for row in list(self.rows)
            if row.state in ("queued", "running", "starting")
        ]

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def remaining_seconds(self) -> float | None:
        """By the pace so far; None before the first visit is done."""
        made = self.done - self.already
        if made <= 0 or not self.rows:
            return None
        return self.elapsed_seconds / made * (self.total - self.done)

    @property
    def percent(self) -> float:
        return 100.0 * self.done / self.total if self.total else 0.0


_current = Board()


def current_board() -> Board:
    """The board of the study that runs now."""
    return _current


def new_board() -> Board:
    """Begin a fresh board."""
    global _current
    _current = Board()
    return _current
