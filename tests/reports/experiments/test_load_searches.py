"""Which run of a search stands for what it found."""

from typing import Any

from configs.load.arrivals import PoissonArrivals
from configs.load.job import Contents
from reports.experiments.load.experiment import _nearest
from reports.load.search import FoundRate
from tests.support.run_folders.load_runs import made_run


def test_the_run_at_the_highest_rate_that_passes_is_found_for_conversations_too() -> None:
    """A rate is divided by the turns and multiplied again: 1.1 requests/s come back as 1.1000000000000003."""
    low, turns = next((rate / 10, turns) for turns in (3, 5, 7) for rate in range(1, 99) if differs(rate / 10, turns))

    def at(rate: float) -> Any:
        run = made_run([0.0, 1.0], ttft=0.1)
        fields = {"arrivals": PoissonArrivals(rate=rate / turns), "contents": Contents(turns=turns)}
        object.__setattr__(run, "facts", run.facts.model_copy(update={"job": run.facts.job.model_copy(update=fields)}))
        return run

    runs = [at(low), at(2 * low)]
    found = FoundRate(low, low, 2 * low, True, "", ())
    assert _nearest(runs, found) is runs[0]
    assert _nearest(runs, FoundRate(None, None, 2 * low, False, "", ())) is runs[1]


def differs(rate: float, turns: int) -> bool:
    return rate / turns * turns != rate
