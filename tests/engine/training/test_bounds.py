"""When a run ends: by steps, time, loss or the measuring rules; and ranks whose clocks differ end together."""

from typing import Any

import pytest

from configs.workloads.train import TrainWorkload
from engine.training.bounds import MEMORY_STEPS, PROFILE_WARMUP_STEPS
from tests.support.rank_pool import RankPool
from tests.support.training.bounds_on_ranks import context_of, steps_until, stop_together


def test_exactly_so_many_steps_those_of_earlier_attempts_included() -> None:
    work = TrainWorkload(steps=7)
    assert steps_until(context_of(work), work, 100.0) == 7
    assert steps_until(context_of(work), work, 100.0, earlier=5) == 2
    assert steps_until(context_of(work), work, 100.0, earlier=7) == 0


def test_a_target_loss_ends_it_earlier() -> None:
    work = TrainWorkload(steps=50, target_loss=1.0)
    assert steps_until(context_of(work), work, 1.0, losses=[3.0, 2.0, 1.0, 0.5]) == 3
    assert steps_until(context_of(work), work, 1.0, losses=[3.0, 2.0, 1.5]) == 50


@pytest.mark.parametrize(
    ("periods", "losses", "steps"),
    [
        ({"min_period_seconds": "3s"}, None, 6),
        ({"max_period_seconds": "0.1m"}, None, 12),
        ({"min_period_seconds": 3, "max_period_seconds": 6}, None, 12),
        ({"min_period_seconds": 3, "max_period_seconds": 6, "target_loss": 1.0}, [0.5] * 20, 6),
        ({"min_period_seconds": 3, "max_period_seconds": 6, "target_loss": 1.0}, [2.0] * 7 + [0.9], 8),
        ({"min_period_seconds": 3, "max_period_seconds": 6, "target_loss": 1.0}, [2.0] * 20, 12),
        ({"max_period_seconds": 6, "target_loss": 1.0}, [2.0, 1.0], 2),
    ],
)
def test_periods_of_half_second_steps(periods: dict[str, object], losses: list[float] | None, steps: int) -> None:
    work = TrainWorkload.model_validate(periods)
    assert steps_until(context_of(work), work, 0.5, losses) == steps


def test_without_a_bound_the_measuring_rules_decide() -> None:
    work = TrainWorkload()
    rules: dict[str, Any] = {"warmup": 2, "min_passes": 3, "min_seconds": 4.0}
    assert steps_until(context_of(work, **rules), work, 0.5) == 2 + 8
    assert steps_until(context_of(work, **rules), work, 9.0) == 2 + 3
    assert steps_until(context_of(work, measuring_pass="memory", **rules), work, 0.5) == MEMORY_STEPS
    assert steps_until(context_of(work, measuring_pass="profile", **rules), work, 0.5) == PROFILE_WARMUP_STEPS + 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_loss": 2.0}, "target_loss: may never be reached. Set steps or max_period_seconds"),
        ({"target_loss": 2.0, "min_period_seconds": 9}, "target_loss: may never be reached"),
        (
            {"task": "text_classification", "validation_data": "held.jsonl"},
            "validation_data: not evaluated on by text_classification without data",
        ),
        ({"target_loss": 2.0, "steps": 9, "heldout_share": 0.1}, "evaluate_every: required, because target_loss"),
        ({"min_period_seconds": "2m", "max_period_seconds": "30s"}, "min_period_seconds: got 120, more than"),
    ],
)
def test_bounds_that_do_not_fit_together_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainWorkload.model_validate(fields)


def test_ranks_with_clocks_of_their_own_stop_together_and_seldom_ask() -> None:
    with RankPool(2) as pool:
        by_rules = pool.run(stop_together, TrainWorkload(), [0.01, 0.02], 8.0)
        by_time = pool.run(stop_together, TrainWorkload(max_period_seconds=8.0), [0.02, 0.01], 1.0)
    # The slowest rank's seconds count, after two steps of warm-up.
    assert [steps for steps, _ in by_rules] == [402, 402]
    assert [steps for steps, _ in by_time] == [400, 400]
    assert all(asked <= 15 for _, asked in [*by_rules, *by_time])
