"""What the report says of answers under load that end elsewhere than alone."""

import numpy as np
import pytest

from engine.workloads.servers.probes import Answered, compared
from reports.experiments.load.experiment import answers_of

SHORT, LONG = Answered(["a", "b"], [1.0, 1.0]), Answered(["a", "b", "c"], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(("alone", "loaded"), [(SHORT, LONG), (LONG, SHORT), (Answered([], [1.0]), SHORT)])
def test_an_answer_that_ends_elsewhere_is_not_the_same(alone: Answered, loaded: Answered) -> None:
    found = answers_of(np.array([compared(alone, loaded)]), "float32")
    assert found is not None and (found.equal, found.different) == (0, 1)


def test_without_log_probabilities_it_is_not_told_why() -> None:
    found = answers_of(np.array([compared(Answered(["a"], []), Answered(["a", "b"], []))]), "float32")
    assert found is not None and (found.equal, found.untold, found.different) == (0, 1, 0)


def test_two_answers_without_a_token_are_the_same() -> None:
    found = answers_of(np.array([compared(Answered([], []), Answered([], []))]), "float32")
    assert found is not None and found.equal == 1
