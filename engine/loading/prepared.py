"""Set the page-cache state of a model's files before a load, as the cell requests.

figures = prepare_files(weight_files(manifest), context)      # then load
"""

from collections.abc import Sequence
from pathlib import Path

from configs.common.execution import PageCache
from configs.records.record import Figure
from engine.context import Context
from engine.loading.page_cache import evict, raw_read_seconds, state_of, warm
from engine.rank.agreement import raise_on_all_ranks


def prepare_files(files: Sequence[Path], context: Context) -> dict[str, Figure]:
    """Set the page cache to the cell's state.

    Every rank calls it, one rank per node works, and all return when it is done, or raise.

    Returns that rank's figures, empty on others: `load_page_cache_share` (of the files, before the load) and, for a
    cold load, `raw_read_seconds`: one plain cold read of all files, for reference. Raises ValueError if the files
    cannot be evicted (on a tmpfs, or mapped by a process).
    """
    wanted = context.job.cell.page_cache
    if wanted is None or not files:
        return {}
    # Raised on all ranks: a rank that continued alone would block in a collective.
    return raise_on_all_ranks(lambda: _prepare(files, wanted) if context.local_rank == 0 else {}, context)


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
