"""Talks to the outside: model hubs and clouds. Imports no Prefect."""

from typing import Literal

Provider = Literal["azure", "aws"]
"""Clouds whose price lists can be fetched."""
