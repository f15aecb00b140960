"""Checkpoint loading: each rank reads only the byte ranges of its shard.

files = weight_files(manifest)
report = LoadReport.before(files)                  # state of the page cache; then a barrier
for piece, tensor in read_pieces(files, pieces, local_rank=0, local_ranks=2, report=report):
    ...                                            # convert, pack: reading continues meanwhile
report.asked_bytes, report.device_bytes, report.seconds
"""

from engine.loading.access import network_file_system
from engine.loading.header import TensorLocation, tensor_locations
from engine.loading.page_cache import cached_share, evict, raw_read_seconds, warm
from engine.loading.pieces import TensorSlice
from engine.loading.reader import read_pieces
from engine.loading.report import LoadReport

__all__ = [
    "LoadReport",
    "TensorLocation",
    "TensorSlice",
    "cached_share",
    "evict",
    "network_file_system",
    "raw_read_seconds",
    "read_pieces",
    "tensor_locations",
    "warm",
]
