"""Versions of installed distributions, looked up without importing them."""

import importlib.metadata


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None: it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
