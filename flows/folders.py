"""Folders of the user that outlive a run."""

import os
from pathlib import Path

from flows.server.settings import data_folder


def cache_folder() -> Path:
    """Where models are kept: $RANKWISE_CACHE, else `rankwise` in the user's cache folder."""
    named = os.environ.get("RANKWISE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rankwise"
    return Path(named).absolute() if named else base


def rented_folder() -> Path:
    """Where the ledgers and keys of everything lie that this user rents: below Rankwise's data folder."""
    return data_folder().parent / "rented"
