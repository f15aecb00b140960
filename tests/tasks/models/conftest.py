"""Folders of models, and the addresses that are connected to."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.hub_server import watched_connections


@pytest.fixture
def watched() -> Iterator[list[Any]]:
    with watched_connections() as addresses:
        yield addresses


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "base"
