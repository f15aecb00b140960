"""Making a model's files cold or warm: what one rank cannot do ends the cell on all of them, at once."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.loading.prepared import prepare_files
from tests.support.rank_pool import RankPool


def prepared(rank: int, file: str, wanted: str, ranks: int = 2) -> str:
    """What came of it on a rank: the names of the figures, or the error."""
    job = SimpleNamespace(cell=SimpleNamespace(page_cache=wanted))
    context: Any = SimpleNamespace(job=job, local_rank=rank, world_size=ranks)
    try:
        return ", ".join(prepare_files([Path(file)], context))
    except ValueError as error:
        return str(error)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs, whose files cannot leave memory")
def test_files_that_cannot_be_made_cold_are_refused_on_every_rank() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file, RankPool(2, timeout_seconds=30) as pool:
        file.write(bytes(1 << 16))
        file.flush()
        assert pool.run(prepared, file.name, "warm") == ["load_page_cache_share", ""]
        refused = pool.run(prepared, file.name, "cold")
        assert refused[0] == refused[1]
        assert refused[0].startswith("page_cache: cold is asked for, but 100% of /dev/shm is")
