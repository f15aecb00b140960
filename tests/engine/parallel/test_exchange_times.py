"""What an exchange adds to the work that it follows, on a clock that only the work and the exchanges move."""

import pytest
import torch

from engine.parallel.exchange_times import cold_products, message_seconds, sum_seconds

WORK, SUM, MESSAGE = 1e-4, 3e-5, 2e-5


class Clock:
    """A transport whose operations take known times."""

    name = "made-up"

    def __init__(self) -> None:
        self.now = 0.0
        self.messages = 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.now += SUM

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self.messages += 1

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self.messages += 1
        self.now += 2 * MESSAGE + WORK  # until the other's answer is there: both messages, and its work

    def work(self) -> None:
        self.now += WORK

    def barrier(self) -> None:
        self.now += 1.0  # between windows; not counted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("engine.parallel.exchange_times.time.perf_counter", lambda: made.now)
    return made


def test_the_work_before_a_sum_is_not_counted(clock: Clock) -> None:
    assert sum_seconds(clock, torch.zeros(4), clock.work) == pytest.approx(SUM)  # type: ignore[arg-type]


def test_a_message_is_half_of_there_and_back_without_the_work_of_both(clock: Clock) -> None:
    took = message_seconds(clock, torch.zeros(4), clock.work, (0, 1), 0)  # type: ignore[arg-type]
    assert took == pytest.approx(MESSAGE) and clock.messages > 0


def test_a_rank_between_the_ends_only_waits(clock: Clock) -> None:
    assert message_seconds(clock, torch.zeros(4), clock.work, (0, 2), 1) > 0  # type: ignore[arg-type]
    assert clock.messages == 0


def test_work_multiplies_by_weights_in_turn() -> None:
    work = cold_products()
    first, second = work(), work()
    assert isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    assert first.shape == (1024,) and torch.equal(first, second)
