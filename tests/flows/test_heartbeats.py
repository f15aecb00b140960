"""Every flow of this project beats as often as the automation for lost flow runs wants, whoever deployed it."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from flows import scaling_study
from flows.registration.automations import HEARTBEATS_MISSED_SECONDS


def test_a_study_beats_from_its_first_line_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    @contextmanager
    def beating(seconds: float) -> Any:
        told.append(seconds)
        yield
        told.append("ended")

    monkeypatch.setattr(scaling_study, "heartbeats", beating)
    monkeypatch.setattr(scaling_study, "_measured", lambda *_: told.append("measured"))
    scaling_study.measure_study(cast(Any, None), Path("runs"), Path(), False, False)
    assert told[0] * 2 < HEARTBEATS_MISSED_SECONDS and told[1:] == ["measured", "ended"]
