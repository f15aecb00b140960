"""The rate of the next run of a search, from the runs so far: `python -m reports.load.next_rate FOLDER`.

A launch that searches asks again after each run, because it may not import how a report judges one. Prints
{"rate": 4.0}, or {"rate": null} where the search has ended.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from configs.common.files.reading import read_model
from configs.common.printable import significant
from configs.load.objectives import RequestObjectives
from configs.load.samples import RequestOutcome
from configs.load.search import SEARCH_FILE, SearchRequest
from reports.load.metrics import cut_conversations, scores_after_warm_up, serving_metrics
from reports.load.samples import LoadRun, read_load_run
from reports.load.search import ProbedRate, RateSearch, SearchGoal
from reports.load.verdict import Verdict, judged
from reports.numbers.percentiles import quantiles

_SERVED = (RequestOutcome.COMPLETED, RequestOutcome.TIMEOUT)


def goal_of(request: SearchRequest) -> SearchGoal:
    """The goal of a search that a launch makes."""
    fields = request.model_dump(exclude={"objectives"})
    return SearchGoal(share=request.objectives.share, **fields)


def taken(search: RateSearch, run: LoadRun, rate: float, objectives: RequestObjectives) -> ProbedRate | None:
    """Give a search one run; None where the run ends it.

    That is a run whose generator was the bottleneck, one that a cap ended, or one in which the server answered nothing,
    not even late: a wrong name of the model or a server that is gone says nothing about a rate. Nor does a run that
    meets the objectives at a lower rate than it was to have, because it is too short for its conversations.
    """
    judgement = judged(run, serving_metrics(run))
    if judgement.verdict is Verdict.CLIENT_BOUND:
        search.stop(f"the generator was the bottleneck at {significant(rate, 4)} requests/s ({judgement.reason})")
    elif run.facts.capped is not None:
        search.stop(run.facts.capped)
    elif len(run) and not np.isin(run.columns["outcome"], _SERVED).any():
        search.stop(
            f"the server answered none of {len(run):,} requests at {significant(rate, 4)} requests/s "
            f"({judgement.reason})"
        )
    else:
        scores, cut = scores_after_warm_up(run, objectives), cut_conversations(run)
        if cut is None or quantiles(scores, (objectives.share,))[0] > 1:
            return search.add(rate, scores)
        search.stop(f"at {rate:.4g} requests/s {cut}; use a longer duration")
    return None


def search_after(goal: SearchGoal, objectives: RequestObjectives, runs: Iterable[LoadRun]) -> RateSearch:
    """A search after these runs, in their order."""
    search = RateSearch(goal)
    for run in runs:
        rate = run.facts.job.requested_rate
        assert rate is not None, "a search is for open loops"
        taken(search, run, search.next_rate() or rate, objectives)
    return search


def main(arguments: list[str]) -> int:
    """Print the next rate of the search in a folder."""
    folder = Path(arguments[0])
    request = read_model(folder / SEARCH_FILE, SearchRequest)
    runs = (read_load_run(one) for one in sorted(folder.glob("run-*")))  # one at a time: each has all its chunks
    print(json.dumps({"rate": search_after(goal_of(request), request.objectives, runs).next_rate()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
