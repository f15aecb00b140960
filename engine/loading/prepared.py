"""The state of a model's files before a load, as the cell asks for it.

figures = prepare_files(weight_files(manifest), context)      # then load
"""

from collections.abc import Sequence
from pathlib import Path

from configs.cell import PageCache
from configs.record import Figure
from engine.agreement import together
from engine.context import Context
from engine.loading.page_cache import evict, raw_read_seconds, state_of, warm


def prepare_files(files: Sequence[Path], context: Context) -> dict[str, Figure]:
    """Bring the page cache into the state that the cell names; every rank calls it, one of each node works, and all
    return when that is done, or raise.

    Figures of that rank, empty on others: `load_page_cache_share` (of the files, before the load) and, where they
    are to be cold, `raw_read_seconds`: one plain cold read of all files, the yardstick of a cold load. Raises
    ValueError where the files cannot be put out of the cache (on a tmpfs, or mapped by somebody).
    """
    wanted = context.job.cell.page_cache
    if wanted is None or not files:
        return {}
    # Together: a rank that went on alone would wait for the others in a collective that they never call.
    return together(lambda: _prepare(files, wanted) if context.local_rank == 0 else {}, context)


def _prepare(files: Sequence[Path], wanted: PageCache) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    if wanted == "cold":
        evict(files)
        figures["raw_read_seconds"] = raw_read_seconds(files)
        share = evict(files)
    else:
        share = warm(files)
    figures["load_page_cache_share"] = share
    if state_of(share) not in (wanted, None):
        raise ValueError(
            f"page_cache: {wanted} is asked for, but {share:.0%} of {files[0].parent} is in the page cache"
        )
    return figures
