"""Folders of deployments."""

from pathlib import Path

import pytest

from tasks.deployment.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(data=tmp_path / "data", rented=tmp_path / "data" / "rented", cache=tmp_path / "cache")
