"""Folders of the user that outlive a run."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where models are kept: $RANKWISE_CACHE, else `rankwise` in the user's cache folder."""
    named = os.environ.get("RANKWISE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rankwise"
    return Path(named).absolute() if named else base
