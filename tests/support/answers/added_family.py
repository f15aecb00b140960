"""A family that is added while a test runs: what its ranks do, and where the entry comes from."""

from pathlib import Path
from typing import Any

from configs.families.table import FAMILIES
from tests.support.answers.sharded_runs import Run, forward

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "architectures.md"


def add_family() -> None:
    """Run the entry that the page shows."""
    entry = PAGE.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(entry, str(PAGE), "exec"), {})
    assert "starcoder2" in FAMILIES


def forward_of_added(rank: int, run: Run) -> dict[str, Any] | None:
    """As `sharded_runs.forward`, on a rank that knows the family."""
    add_family()
    try:
        return forward(rank, run)
    finally:
        del FAMILIES["starcoder2"]
