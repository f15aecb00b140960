"""No test touches the user's folders, talks to a Prefect server of theirs, or inherits their settings."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

_FOREIGN = ("PREFECT_", "RANKWISE_", "HF_", "HUGGING", "XDG_", "SLURM_", "MASTER_")
for _name in list(os.environ):
    if _name.startswith(_FOREIGN):
        del os.environ[_name]

# A shell that starts the tests in the background has them ignore Ctrl-C, and so all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Data and cache folders of this test session only."""
    base = tmp_path_factory.mktemp("user")
    os.environ["RANKWISE_DATA"] = str(base / "data")
    os.environ["RANKWISE_CACHE"] = str(base / "cache")
    yield base
