"""Which stage of a run waited for which: the edges of its graph in Prefect's UI. Does not import Prefect.

    graph = RunGraph(provisioned)
    refusal, done = submit_launches.after(*graph.before_submit())(...)
    graph.submitted([name], done)

Launches on this machine make a chain, since each waits for the one before it. Those on clusters are side by side; what
waits for them is one stage for all, which waits for the stage of its kind before it and for what was submitted since.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageEnd:
    """That a stage ended. `state`: of its task run, in Prefect's terms; None without a flow run."""

    state: object | None = None


class RunGraph:
    """The stages that further ones wait for. A plain class: Prefect would walk through a dataclass.

    Args:
        ready: what the first launches wait for.
    """

    def __init__(self, *ready: StageEnd) -> None:
        self._ready = ready
        self._last: dict[str, StageEnd] = {}
        self._unwaited: list[StageEnd] = []
        self._side_by_side: list[StageEnd] = []

    def before_submit(self) -> tuple[StageEnd, ...]:
        """What a submission waits for."""
        return self._ready

    def submitted(self, names: Sequence[str], done: StageEnd) -> None:
        """These jobs were handed over together."""
        self._last |= dict.fromkeys(names, done)
        self._unwaited.append(done)

    def before_wait(self) -> tuple[StageEnd, ...]:
        """What the wait for all jobs in flight waits for; asked once for each wait."""
        upstream, self._unwaited = tuple(self._unwaited), []
        return upstream

    def waited(self, names: Sequence[str], done: StageEnd) -> None:
        """A wait has ended, and with it these jobs."""
        self._last |= dict.fromkeys(names, done)
        self._unwaited.append(done)

    def before_collect(self, name: str) -> tuple[StageEnd, ...]:
        """What the records of a job wait for."""
        return (self._last.pop(name),) if name in self._last else self._ready

    def collected(self, done: StageEnd, in_turn: bool) -> None:
        """Records of a job are there. in_turn: the next launch waits for them, as on this machine."""
        if in_turn:
            self._ready, self._unwaited = (done,), []
        else:
            self._side_by_side.append(done)

    def before_analysis(self) -> tuple[StageEnd, ...]:
        """What the analysis waits for: the last stages of all launches."""
        return (*self._side_by_side, *self._ready)
