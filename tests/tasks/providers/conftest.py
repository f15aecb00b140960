"""A cloud whose machines appear late."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.providers import giving_back, leases, renting
from tasks.providers.readiness import waiting
from tests.support.clouds.stand_in import LateCloud


@pytest.fixture
def late_cloud(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Any]], LateCloud]:
    def made(problems: Sequence[Any]) -> LateCloud:
        cloud = LateCloud(problems)
        stand_in = SimpleNamespace(time=lambda: cloud.now, monotonic=lambda: cloud.now)
        for module in (renting, waiting, leases, giving_back):
            monkeypatch.setattr(module, "time", stand_in)
        for name in ("make_keys", "remove_keys"):
            monkeypatch.setattr(renting, name, lambda folder: None)
        monkeypatch.setattr(renting, "user_data", lambda folder, lives_seconds: "")
        monkeypatch.setattr(waiting, "write_known_hosts", lambda folder, addresses: None)
        monkeypatch.setattr(waiting, "probe", lambda folder, user, address: "ready")
        return cloud

    return made
