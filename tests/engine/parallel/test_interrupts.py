"""A signal that comes while a rank waits in shared memory ends the wait, and no other rank is blamed for it."""

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from engine.parallel.shared_memory import TOKEN_BYTES, SharedMemory, WaitError, create_segment, library

pytestmark = [
    pytest.mark.skipif(library() is None, reason="needs a C compiler"),
    # What a handler raises in a callback of C is printed.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt where C asks whether a rank is gone, and nowhere else."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name == "look":
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def alone(is_gone: bool) -> SharedMemory:
    """One of two ranks, the other of which never comes."""
    descriptor = create_segment(2, b"t" * TOKEN_BYTES)
    try:
        return SharedMemory(descriptor, 2, 0, 30.0, lambda peer: is_gone)
    finally:
        os.close(descriptor)


def test_an_interrupt_is_no_lost_rank(interrupts: None) -> None:
    group = alone(is_gone=False)
    try:
        with pytest.raises(KeyboardInterrupt):
            group.all_reduce(torch.ones(4))
    finally:
        group.close()


def test_a_lost_rank_is_one() -> None:
    group = alone(is_gone=True)
    try:
        with pytest.raises(WaitError) as caught:
            group.barrier()
        assert (caught.value.index, caught.value.silent) == (1, False)
    finally:
        group.close()
