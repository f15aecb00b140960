"""Folders of the user that outlive a run."""

import os
from pathlib import Path

from configs.common.base import expanded
from flows.server.settings import data_folder, user_folder


def cache_folder() -> Path:
    """Where models are kept: $RANKWISE_CACHE, else `rankwise` in the user's cache folder. Always absolute."""
    if named := os.environ.get("RANKWISE_CACHE"):
        return expanded(named).absolute()
    return user_folder("XDG_CACHE_HOME", ".cache") / "rankwise"


def rented_folder() -> Path:
    """Where the ledgers and keys of everything lie that this user rents: below Rankwise's data folder."""
    return data_folder().parent / "rented"
