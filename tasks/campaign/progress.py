"""Run progress, read by the live table and the progress artifact.

One object per study in this process, written by the flow's thread. Every update replaces whole values,
so readers never see a partial one.
"""

import time
from dataclasses import dataclass, field

from configs.common.dollars import dollars
from configs.common.printable import plural
from configs.records.record import MeasuringPass


@dataclass
class ProgressRow:
    """One launch, as shown."""

    label: str
    measurements: int
    block: int
    blocks: int
    measuring_pass: MeasuringPass = "timed"
    attempt: int = 1
    work: str = ""
    """What its cells do, batches included: `batch 8 and 3 more`."""
    done: int = 0
    failed: int = 0
    state: str = "waiting"
    note: str = ""
    reason: str = ""
    """Why a scheduler lets it wait, or does not take it, in the scheduler's words."""
    waited_seconds: float = 0.0
    speed: str = ""
    """What was measured, of several cells from the slowest to the fastest: `48.1 to 412 tokens/s`."""

    @property
    def title(self) -> str:
        """The launch in one line: model, precision, layout, work, block or pass, and which attempt it is."""
        attempt = f"attempt {self.attempt}" if self.attempt > 1 else ""
        return ", ".join(filter(None, (" ".join(self.label.split()), self.work, self.block_title, attempt)))

    @property
    def block_title(self) -> str:
        """The block of a timed launch, of another one its pass."""
        return (
            f"block {self.block} of {self.blocks}" if self.measuring_pass == "timed" else f"{self.measuring_pass} pass"
        )


@dataclass
class RunProgress:
    """Counts and rows of one run. `left_behind`: jobs that a scheduler did not end when it was asked to."""

    study: str = ""
    total: int = 0
    already: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    """Measurements that somebody ended: they say nothing against what was measured."""
    started: float = field(default_factory=time.monotonic)
    rows: list[ProgressRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stage: str = ""
    left_behind: str = ""
    ended: bool = False
    outcome: str = ""
    """How the run ended: completed, failed, cancelled, suspended, interrupted; empty while it goes on."""
    spent_usd: float | None = None
    """By this run so far; None where a target has no price."""
    spent_seconds: float = 0.0
    """Of the study's budget of time, by this run so far."""
    expected_seconds: float | None = None
    """Predicted time of everything that this run measures; None where that is not known."""
    expected_since: float = 0.0

    def expect(self, seconds: float | None) -> None:
        """Note how long everything that is to be measured from now on is predicted to take."""
        self.expected_since, self.expected_seconds = time.monotonic(), seconds

    def under_way(self) -> list[dict[str, str]]:
        """What waits in a scheduler's queue or runs, for a table; nothing once the run has ended."""
        if self.outcome:
            return []
        return [
            {
                "launch": row.label,
                "block": f"{row.block} of {row.blocks}" if row.measuring_pass == "timed" else row.measuring_pass,
                "cells": f"{row.done} of {row.measurements}",
                "state": row.state,
                "job": row.note,
            }
            for row in list(self.rows)
            if row.state in ("queued", "running", "starting", "suspended")
        ]

    @property
    def waiting_for(self) -> str:
        """What the next launch waits for (`for another launch on this machine: ...`); empty where nothing waits."""
        return next((row.note for row in list(self.rows) if row.state == "waiting" and row.note), "")

    @property
    def description(self) -> str:
        """What the progress is of, and what it waits for now or how it ended."""
        text = f"Study {self.study}: {', '.join((self.outcome or self.stage or 'starting', *self._counts()))}"
        return f"{text}; waiting {self.waiting_for}" if self.waiting_for and not self.outcome else text

    def _counts(self) -> list[str]:
        """How far it is, and what is left, each as a part of a sentence."""
        counts = [f"{self.done} of {plural(self.total, 'measurement')} done"] if self.total else []
        if self.failed:
            counts.append(f"{self.failed} failed")
        if self.cancelled:
            counts.append(f"{self.cancelled} cancelled")
        retried = sum(1 for row in list(self.rows) if row.attempt > 1)
        if retried:
            counts.append(f"{plural(retried, 'launch')} tried again")
        seconds, usd = self.remaining_seconds, self.remaining_usd
        if seconds is not None and self.done < self.total and not self.outcome:
            # In steps: each new text is one more request to the API.
            counts.append(f"about {_rounded(seconds)} to go" + (f" and {dollars(usd)} USD" if usd else ""))
        return counts

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def remaining_seconds(self) -> float | None:
        """By the pace so far; before the first measurement is done by prediction, None without one, or after it."""
        made = self.done - self.already
        if made > 0 and self.rows:
            return self.elapsed_seconds / made * (self.total - self.done)
        if self.expected_seconds is None:
            return None
        left = self.expected_seconds - (time.monotonic() - self.expected_since)
        return left if left > 0 else None

    @property
    def remaining_usd(self) -> float | None:
        """By the pace so far; None before the first measurement is done, and where a price is not known."""
        made = self.done - self.already
        if made <= 0 or self.spent_usd is None:
            return None
        return self.spent_usd / made * (self.total - self.done)

    @property
    def percent(self) -> float:
        return 100.0 * self.done / self.total if self.total else 0.0


def _rounded(seconds: float) -> str:
    """A time for people, in steps of ten seconds or of minutes."""
    if seconds < 95:
        return f"{max(10, 10 * round(seconds / 10))} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


_current = RunProgress()


def current_progress() -> RunProgress:
    """The board of the study that runs now."""
    return _current


def new_progress() -> RunProgress:
    """Begin a fresh board."""
    global _current
    _current = RunProgress()
    return _current
