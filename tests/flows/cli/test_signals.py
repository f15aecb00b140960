"""Signals that end a command in the foreground, and one that nohup keeps from it."""

import signal
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flows.cli import entry
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


@pytest.mark.parametrize(
    ("before", "meanwhile"), [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)]
)
def test_ctrl_c_while_the_command_line_is_imported_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, before: Any, meanwhile: Any
) -> None:
    handlers: list[Any] = []

    class Imported(ModuleType):
        @property
        def app(self) -> Callable[[], None]:
            handlers.append(signal.getsignal(signal.SIGINT))
            return lambda: handlers.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setitem(sys.modules, "flows.cli.main", Imported("flows.cli.main"))
    kept = signal.signal(signal.SIGINT, before)
    try:
        entry.main()
    finally:
        signal.signal(signal.SIGINT, kept)
    assert handlers == [meanwhile, before]


def test_the_program_begins_there() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["rankwise"] == "flows.cli.entry:main"
