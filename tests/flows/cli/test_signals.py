"""Signals that end a command in the foreground, and one that nohup keeps from it."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from flows.cli.signals import ended_by_signals
from flows.team.up import _signals_end

WAYS = pytest.mark.parametrize("way", [ended_by_signals, _signals_end])
Way = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@WAYS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_they_interrupt(way: Way, number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), way():
        signal.raise_signal(number)


@WAYS
def test_a_command_under_nohup_outlives_its_terminal(way: Way) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with way():
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
