"""What a search for the highest rate looks for: a file beside the runs, from which each next rate follows."""

from pydantic import PositiveFloat, PositiveInt

from configs.common.base import Frozen
from configs.load.objectives import RequestObjectives

SEARCH_FILE = "search.json"


class SearchRequest(Frozen):
    """Objectives, where to begin, and when to end. The samples of the runs lie beside it, in `run-001`, `run-002`..."""

    objectives: RequestObjectives
    first_rate: PositiveFloat
    tolerance: PositiveFloat
    min_rate: PositiveFloat
    max_rate: PositiveFloat
    max_runs: PositiveInt
