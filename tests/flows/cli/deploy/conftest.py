"""A user's folder of deployments."""

from pathlib import Path

import pytest

from flows.cli.deploy import deploying, listing
from tasks.deployment.store import Store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store(data=tmp_path / "data", rented=tmp_path / "data" / "rented", cache=tmp_path / "cache")
    monkeypatch.setattr(deploying, "store_of_user", lambda: made)
    monkeypatch.setattr(listing, "store_of_user", lambda: made)
    return made
