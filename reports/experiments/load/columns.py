"""What `cells.csv` says of a served cell: the figures of its load experiment, over the repeats that are results.

    served_values(load_point(study, result))    # {"served_tokens_per_second": Estimate, ...}
    SERVED                                      # the names of all of them

Requests and tokens are those of the steady part of a run, seconds those of single requests in it.
"""

from reports.experiments.load.experiment import LoadPoint
from reports.numbers.statistics import Estimate

_RATES = {
    "served_offered_requests_per_second": "offered",
    "served_achieved_requests_per_second": "achieved",
    "served_tokens_per_second": "tokens",
    "served_goodput_requests_per_second": "goodput",
    "served_goodput_share": "goodput_share",
    "served_highest_requests_per_second": "limit",
}
_LATENCIES = {
    f"served_{kind}_{which}_seconds": f"{kind}_{which}"
    for kind in ("ttft", "tpot", "itl", "e2e")
    for which in ("p50", "p90", "p99")
}
_FIGURES = _RATES | _LATENCIES
SERVED = tuple(_FIGURES)
RESULTS, STEADY = "served_results", "served_steady"
"""How many repeats are results, and whether all of them were steady."""


def served_values(point: LoadPoint) -> dict[str, Estimate | None]:
    """Each figure's median, range and 95 % interval over the repeats that are results; None: not known."""
    return {name: point.value(figure) for name, figure in _FIGURES.items()}
