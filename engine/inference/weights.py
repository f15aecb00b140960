"""Load this rank's shard from a checkpoint or a seed, and report load figures.

    shard = load_shard(context, torch.bfloat16)     # once per launch, kept in the context
    encoder, decoder = load_stacks(context, torch.bfloat16)         # of an encoder-decoder
    finalize_weights(context)                           # packs into huge pages
    figures = shard_figures(context)                # load_seconds only in the measurement that loaded

Files in the page cache with the wanted dtype are not copied: products run directly on the memory-mapped pages until
`finalize_weights` packs them. A checkpoint that does not match is rejected by every rank before anything is read,
naming the tensor and the file.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from configs.families.checkpoint import check_tensors, with_stored_head
from configs.families.config import ModelConfig
from configs.families.tensors import StackName, layer_stacks, names_in_file
from configs.plans.job import Measurement
from configs.plans.model_manifest import ModelManifest
from configs.records.record import Figure
from engine.compression import Compressor
from engine.context import Context
from engine.inference.assembly import Assembly
from engine.inference.model import Shard
from engine.kernels.linear import pack_linear
from engine.loading import LoadReport, TensorSlice, network_file_system, read_pieces, tensor_locations
from engine.loading.prepared import prepare_files
from engine.models.sharding import check_degrees
from engine.models.slots import wanted_pieces, wanted_slots
from engine.models.stages import main_stack, own_layers
from engine.models.weights import required_manifest, synthetic_tensor, weight_files
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from engine.rank.agreement import raise_on_all_ranks
from engine.rank.host_usage import take_peak

_KEPT = "shard"


@dataclass
class LoadedShard:
    """The shards of a launch by stack, and load figures; `reported` once a measurement has reported them.

    file_bytes and report are None for a synthetic model, which is read from no file. prepared: figures of the page
    cache's preparation. compression: figures of the compression.
    """

    shards: dict[StackName, Shard]
    seconds: float
    hash_seconds: float
    digest: str
    weights_bytes: int
    file_bytes: int | None
    report: LoadReport | None
    peak_bytes: int | None = None
    reported: bool = False
    finalize_seconds: float | None = None
    prepared: dict[str, Figure] = field(default_factory=dict)
    compression: dict[str, Figure] = field(default_factory=dict)

    @property
    def shard(self) -> Shard:
        """The shard of the only stack, or of the decoder."""
        return self.shards[main_stack(next(iter(self.shards.values())).config)]


def load_shard(context: Context, dtype: torch.dtype) -> Shard:
    """Return this rank's shard on its device; loaded by the first call, reused by others. All ranks call it together.

    Raises ValueError for a model that cannot be loaded, or not split this way.
    """
    return _load(context, dtype).shard


def load_stacks(context: Context, dtype: torch.dtype) -> tuple[Shard, Shard]:
    """Return this rank's shards of an encoder-decoder's encoder and decoder, as `load_shard`."""
    loaded = _load(context, dtype)
    return loaded.shards["encoder"], loaded.shards["decoder"]


def finalize_weights(context: Context) -> None:
    """Pack the loaded shard's weights into huge pages, in the launch's first call.

    The model works before this, with identical results, and is faster after it.
    """
    if is_finalized(context):
        return
    loaded = _loaded(context)
    began = time.perf_counter()
    for shard in loaded.shards.values():
        shard.finalize()
    tables = [shard.weights.embedding for shard in loaded.shards.values()]
    if tables[0] is not None and len(tables) > 1:
        # Both stacks share one table; finalizing gave each a copy.
        loaded.shard.weights.embedding = tables[0]
    loaded.finalize_seconds = time.perf_counter() - began
    if context.memory_pass:
        # Loading may need more memory temporarily than the work. Reset, so that it does not hide the work's peak.
        loaded.peak_bytes = take_peak(context.device)


def finalize_weights_after_first_answer(
    measurement: Measurement, context: Context, first_answer: Callable[[], float | None]
) -> dict[str, Figure]:
    """Settle the shard; where loading is measured, not before a first answer has come of the weights as they were.

    first_answer: makes one and returns its seconds, None on a rank that does not see it. They are returned as
    first_ttft_seconds: of a model that is ready and no more.
    """
    figures: dict[str, Figure] = {}
    if measurement.cell.page_cache is not None and context.measuring_pass == "timed" and not is_finalized(context):
        context.barrier()
        seconds = first_answer()
        if seconds is not None:
            figures["first_ttft_seconds"] = seconds
    finalize_weights(context)
    return figures


def is_finalized(context: Context) -> bool:
    """Return whether the loaded shard has been finalized."""
    return _loaded(context).finalize_seconds is not None


def _load(context: Context, dtype: torch.dtype) -> LoadedShard:
    if _KEPT not in context.kept:
        manifest = required_manifest(context)
        check_degrees(ModelConfig.parse(manifest.config), context.grid.tp, context.grid.pp)
        # Agreed on: each node may have files of its own, and ranks that read wait for each other first.
        files = raise_on_all_ranks(lambda: _checked_files(manifest), context)
        compressor = Compressor(context.job.cell.compression, dtype, context.device)
        prepared = prepare_files(files, context)
        loaded = read_shard(
            manifest,
            context.grid,
            context.communicators.tensor,
            dtype,
            context.device,
            (context.local_rank, context.job.ranks_per_node),
            context.barrier,
            compressor,
        )
        loaded.prepared = prepared
        context.kept[_KEPT] = loaded
    return _loaded(context)


def _checked_files(manifest: ModelManifest) -> list[Path]:
    """Return the files of a model; none of a synthetic one. Raises ValueError, naming the file, for one that differs
    from config.json.
    """
    if manifest.synthetic_seed is not None:
        return []
    files = weight_files(manifest)
    stored = tensor_locations(files)
    check_tensors(with_stored_head(ModelConfig.parse(manifest.config), stored), stored)
    return files


def _loaded(context: Context) -> LoadedShard:
    kept = context.kept[_KEPT]
    assert isinstance(kept, LoadedShard)
    return kept


def read_shard(
    manifest: ModelManifest,
    grid: Grid,
    group: Communicator,
    dtype: torch.dtype,
    device: torch.device,
    local: tuple[int, int] = (0, 1),
    barrier: Callable[[], None] = lambda: None,
    compressor: Compressor | None = None,
) -> LoadedShard:
    """Load a shard of the manifest's model.

    local: this rank's index in its node, and the number of ranks there; they share the reading. barrier: called before
    the first read, after all have inspected the page cache.
    """
    config = ModelConfig.parse(manifest.config)
    files, stored = [], {}
    if manifest.synthetic_seed is None:
        files = weight_files(manifest)
        stored = tensor_locations(files)
        config = with_stored_head(config, stored)
    slots = wanted_slots(config, grid)
    wanted = list(dict.fromkeys(slot.piece for slot in slots))
    pack_linear(torch.ones((1, 1), dtype=dtype))  # compiles the kernels if needed, before the clock starts
    report, file_bytes, lend = None, None, False
    if manifest.synthetic_seed is not None:
        began = time.perf_counter()
        parts = _made(config, manifest.synthetic_seed, wanted)
    else:
        file_bytes = check_tensors(config, stored)
        report = LoadReport.before(files)
        names = names_in_file(config, stored)
        # Data to be converted is copied anyway; on a network file system a page may be fetched again.
        lend = (
            report.page_cache == "warm"
            and device.type in ("cpu", "cuda")
            and not (compressor and compressor.passes)
            and all(stored[names[piece.name]].dtype is dtype for piece in wanted)
            and not any(network_file_system(file) for file in files)
        )
        barrier()
        began = time.perf_counter()
        parts = _read(config, grid, files, wanted, names, local, report, lend)
    # What is on another device is a copy already.
    assembly = Assembly(config, grid, slots, dtype, device, lend and device.type == "cpu", compressor)
    for piece, tensor in parts:
        assembly.put(piece, tensor)
    shards = _shards(config, grid, group, assembly)
    hash_seconds = assembly.hash_seconds
    seconds = time.perf_counter() - began - hash_seconds
    loaded = LoadedShard(shards, seconds, hash_seconds, assembly.digest(), assembly.nbytes, file_bytes, report)
    if compressor is not None:
        loaded.compression = compressor.figures(assembly.nbytes, assembly.plain_bytes)
    return loaded


def shard_figures(context: Context) -> dict[str, Figure]:
    """Return figures of the loaded shard; those of the load are None except in the first call.

    load_seconds: from the first read until the model is ready, without hash_seconds (hashing, during which a cold load
    reads ahead); finalize_seconds: packing the rest into huge pages, after that.
    load_bytes: all tensors as stored in the files; load_asked_bytes: bytes that this rank read of them;
    load_device_bytes: bytes read from the device; load_page_cache_share: share of the files in memory before the load.
    All None for a synthetic model. weights_bytes are this rank's, model_parameters the whole model's; tied ones count
    once.
    """
    loaded = _loaded(context)
    first, loaded.reported = not loaded.reported, True
    report = loaded.report if first else None
    return {
        "load_seconds": loaded.seconds if first else None,
        "hash_seconds": loaded.hash_seconds if first else None,
        "load_bytes": loaded.file_bytes if first else None,
        "load_asked_bytes": report.asked_bytes if report else None,
        "load_device_bytes": report.device_bytes if report else None,
        "load_page_cache_share": report.cached_share if report else None,
        "finalize_seconds": loaded.finalize_seconds if first else None,
        **{name: value if first else None for name, value in loaded.prepared.items()},
        **({"load_peak_memory_bytes": loaded.peak_bytes} if context.memory_pass else {}),
        "weights_hash": loaded.digest,
        "weights_bytes": loaded.weights_bytes,
        "model_parameters": sum(prod(shape) for shape in loaded.shard.config.tensor_shapes().values()),
        **loaded.compression,
    }


def _read(
    config: ModelConfig,
    grid: Grid,
    files: list[Path],
    wanted: Sequence[TensorSlice],
    names: dict[str, str],
    local: tuple[int, int],
    report: LoadReport,
    lend: bool,
) -> Iterator[tuple[TensorSlice, Tensor]]:
    """Read the wanted pieces by our names; the file's names may differ."""
    place, ranks = local
    neighbours = [replace(grid, rank=grid.rank - place + other) for other in range(ranks)]
    ours: defaultdict[TensorSlice, list[TensorSlice]] = defaultdict(list)
    for piece in wanted:
        ours[replace(piece, name=names[piece.name])].append(piece)
    for read, tensor in read_pieces(
        files,
        ours,
        local_rank=place,
        local_ranks=ranks,
        host_pieces=[
            replace(piece, name=names[piece.name])
            for neighbour in neighbours
            for piece in wanted_pieces(config, neighbour)
        ],
        lend=lend,
        report=report,
    ):
        for piece in ours[read]:
            yield piece, tensor


def _made(config: ModelConfig, seed: int, wanted: Sequence[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
    """Create each tensor whole, so that it is the same for every layout, and cut it."""
    shapes = config.tensor_shapes()
    for name, pieces in groupby(wanted, key=lambda piece: piece.name):
        whole = synthetic_tensor(config, name, shapes[name], seed)
        for piece in pieces:
            # A copy: a view would keep the whole tensor alive if it is not packed.
            yield piece, whole if piece == TensorSlice(name) else cut(whole, piece).clone()


def cut(whole: Tensor, piece: TensorSlice) -> Tensor:
    """Return the piece of a tensor, as a view."""
    part = whole if piece.rows is None else whole[slice(*piece.rows)]
    return part if piece.columns is None else part[:, slice(*piece.columns)]


def shard_of(config: ModelConfig, grid: Grid, group: Communicator, tensors: dict[str, Tensor]) -> Shard:
    """Return the main stack's shard from a whole model's tensors by our names, which keep dtype and device."""
    return shards_of(config, grid, group, tensors)[main_stack(config)]


def shards_of(
    config: ModelConfig, grid: Grid, group: Communicator, tensors: dict[str, Tensor]
) -> dict[StackName, Shard]:
    """Return the shard of every stack, as `shard_of`."""
    slots = wanted_slots(config, grid)
    some = next(iter(tensors.values()))
    assembly = Assembly(config, grid, slots, some.dtype, some.device)
    for piece in dict.fromkeys(slot.piece for slot in slots):
        assembly.put(piece, cut(tensors[piece.name], piece))
    return _shards(config, grid, group, assembly)


def _shards(config: ModelConfig, grid: Grid, group: Communicator, assembly: Assembly) -> dict[StackName, Shard]:
    """Return a shard for each stack, the main one last."""
    return {
        stack: Shard(config, grid, group, assembly.weights(stack), stack, own_layers(config, grid, stack))
        for stack in layer_stacks(config)
    }
