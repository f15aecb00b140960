"""What the ranks of a replica learn of a step: all of it, in one short broadcast where every sequence decodes."""

from typing import Any

import pytest
import torch

from engine.serving.drawing import as_draws, count_unfiltered
from engine.serving.sampling import Sampling
from engine.serving.scheduling import ScheduledStep, TokenRun
from engine.serving.step_message import StepMessage, TokenStep
from engine.serving.stepping import packed_numbers, unpacked_step

SIZES = {"max_tokens": 32, "max_sequences": 4, "max_length": 64, "block": 8, "device": torch.device("cpu")}


class Group:
    """Two ranks in one process: what the first broadcasts, the second gets in the same order."""

    size = 2

    def __init__(self, index: int, sent: list[torch.Tensor]) -> None:
        self.index, self.sent = index, sent

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        assert source == 0
        if self.index == 0:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))
        return tensor


def told(write: Any) -> tuple[StepMessage, list[int]]:
    """What the second rank has after the first wrote, and how many numbers each broadcast had."""
    first, second = StepMessage(**SIZES), StepMessage(**SIZES)
    sent: list[torch.Tensor] = []
    write(first)
    first.share(Group(0, sent))  # type: ignore[arg-type]
    sizes = [len(one) for one in sent]
    second.share(Group(1, sent))  # type: ignore[arg-type]
    assert not sent
    return second, sizes


def decoding(count: int) -> ScheduledStep:
    runs = tuple(TokenRun(str(number), number, 10 + number, 1, True) for number in range(count))
    return ScheduledStep(
        runs, tuple(range(100, 100 + count)), tuple((number, 2, 7 + number) for number in range(count))
    )


def test_a_step_in_which_all_sequences_decode_and_get_a_block_is_one_broadcast() -> None:
    message, sizes = told(lambda first: first.write(decoding(4)))
    step = message.read()
    assert sizes == [8 + 7 * 4]
    assert step is not None and not len(step.logit_rows) and not step.draws.shape[1]
    assert step.tokens.tolist() == [100, 101, 102, 103] and step.positions.tolist() == [10, 11, 12, 13]
    assert step.slots.tolist() == step.rows.tolist() == [0, 1, 2, 3]
    assert step.assigned.tolist() == [[0, 1, 2, 3], [2, 2, 2, 2], [7, 8, 9, 10]]


def test_a_long_step_is_two_and_no_longer_than_it_must_be() -> None:
    prompt = ScheduledStep((TokenRun("a", 3, 0, 30, True),), tuple(range(30)), ((3, 0, 1), (3, 1, 5)))
    message, sizes = told(lambda first: first.write(prompt, [0]))
    step = message.read()
    assert sum(sizes) == 8 + 3 * 30 + 1 + 6 + 1 and len(sizes) == 2
    assert step is not None and step.logit_rows.tolist() == [0]
    assert step.tokens.tolist() == step.positions.tolist() == list(range(30))
    assert step.rows.tolist() == [29] and step.assigned.tolist() == [[3, 3], [0, 1], [1, 5]]


def test_nothing_to_do_and_the_end_are_told_after_a_step() -> None:
    first, second = StepMessage(**SIZES), StepMessage(**SIZES)

    def share() -> None:
        sent: list[torch.Tensor] = []
        first.share(Group(0, sent))  # type: ignore[arg-type]
        second.share(Group(1, sent))  # type: ignore[arg-type]

    first.write(ScheduledStep((TokenRun("a", 0, 0, 30, True),), tuple(range(30)), ()), [0])
    share()
    first.write_idle()
    share()
    step = second.read()
    assert step is not None and not len(step.tokens) and not step.assigned.shape[1] and not len(step.logit_rows)
    first.write_end()
    share()
    assert second.read() is None


def test_draws_arrive_bit_by_bit() -> None:
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9, min_p=1e-9, seed=5)
    draws = as_draws([(0, sampling, 4), (2, Sampling(temperature=1.3, seed=6), 9)])
    message, _ = told(lambda first: first.write(decoding(3), [1], draws))
    step = message.read()
    assert step is not None and torch.equal(step.draws, draws) and step.logit_rows.tolist() == [1]
    assert step.draws[0].tolist() == [2.0, 0.0], "those without filters are first"
    assert count_unfiltered(step.draws) == 1


@pytest.mark.parametrize("assigned", [0, 2])
@pytest.mark.parametrize("drawn", [0, 3])
def test_a_step_is_the_same_after_it_was_packed(assigned: int, drawn: int) -> None:
    numbers = torch.arange(5, dtype=torch.int32)
    draws = as_draws([(row, Sampling(temperature=0.1 + row, seed=row), row) for row in range(drawn)])
    entries = torch.arange(3 * assigned, dtype=torch.int32).view(assigned, 3).T
    step = TokenStep(numbers, numbers + 1, numbers + 2, numbers[:3], entries, numbers[:2], draws)
    again = unpacked_step(*packed_numbers(step))
    for name, value in vars(step).items():
        assert torch.equal(getattr(again, name), value), name
