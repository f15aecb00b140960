"""From a checkpoint, or a seed, to this rank's shard: read what it keeps, convert, pack, and drop the rest.

    shard = load_shard(context, torch.bfloat16)     # once per launch, kept in the context: ready
    settle_shard(context)                           # and fast
    figures = shard_figures(context)                # load_seconds only in the visit that loaded

A product (queries, keys and values; gate and up) is packed as soon as its parts are there, so that no second copy of
the weights is ever held. Of files that are in the page cache already, in the wanted dtype, nothing is copied at all:
products work on the page cache's own pages until `settle_shard` packs them. A checkpoint that does not fit is refused
with the tensor and the file at fault, by every rank alike, before anything is read.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from configs.model import Manifest
from configs.record import Figure
from engine.context import Context
from engine.inference.model import Layer, Shard, Weights
from engine.inference.sharding import check_degrees, pieces
from engine.inference.stages import own_layers
from engine.kernels.linear import PackedLinear, pack_linear
from engine.loading import LoadReport, Piece, network_file_system, read_pieces, stored_tensors
from engine.loading.prepared import prepare_files
from engine.measure import take_peak
from engine.models.config import ModelConfig
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from engine.weights import HashedWeights, check_tensors, synthetic_tensor, the_manifest, weight_files

_KEPT = "shard"


@dataclass
class LoadedShard:
    """The shard of a launch, and what loading it took; `reported` once a visit has told so.

    file_bytes and report are None for a synthetic model, which is read from no file. prepared: figures of the page
    cache's preparation.
    """

    shard: Shard
    seconds: float
    hash_seconds: float
    digest: str
    weights_bytes: int
    file_bytes: int | None
    report: LoadReport | None
    peak_bytes: int | None = None
    reported: bool = False
    settle_seconds: float | None = None
    prepared: dict[str, Figure] = field(default_factory=dict)


def load_shard(context: Context, dtype: torch.dtype) -> Shard:
    """This rank's shard on its device; loaded by the first call, kept for the others. All ranks call it together.

    Raises ValueError for a model that cannot be loaded, or not split so.
    """
    if _KEPT not in context.kept:
        manifest = the_manifest(context)
        check_degrees(ModelConfig.parse(manifest.config), context.grid.tp, context.grid.pp)
        prepared = {} if manifest.synthetic_seed is not None else prepare_files(weight_files(manifest), context)
        loaded = read_shard(
            manifest,
            context.grid,
            context.communicators.tensor,
            dtype,
            context.device,
            (context.local_rank, context.job.ranks_per_node),
            context.barrier,
        )
        loaded.prepared = prepared
        context.kept[_KEPT] = loaded
    return _loaded(context).shard


def settle_shard(context: Context) -> None:
    """Bring the kept shard's weights, by the launch's first call, to where they are read fastest.

    The model is ready before this, with the same answers, and faster after it.
    """
    if is_settled(context):
        return
    loaded = _loaded(context)
    began = time.perf_counter()
    loaded.shard.settle()
    loaded.settle_seconds = time.perf_counter() - began
    if context.memory_pass:
        # Loading may need more for a moment than the work: told apart, or it would hide the work's peak.
        loaded.peak_bytes = take_peak(context.device)


def is_settled(context: Context) -> bool:
    """Whether the kept shard has been settled."""
    return _loaded(context).settle_seconds is not None


def _loaded(context: Context) -> LoadedShard:
    kept = context.kept[_KEPT]
    assert isinstance(kept, LoadedShard)
    return kept


def read_shard(
    manifest: Manifest,
    grid: Grid,
    group: Communicator,
    dtype: torch.dtype,
    device: torch.device,
    local: tuple[int, int] = (0, 1),
    barrier: Callable[[], None] = lambda: None,
) -> LoadedShard:
    """A shard as the manifest says.

    local: this rank's number among those of its node, and how many they are; they share the reading. barrier: waited
    at before the first read, when all have looked at the page cache.
    """
    config = ModelConfig.parse(manifest.config)
    wanted = pieces(config, grid)
    pack_linear(torch.ones((1, 1), dtype=dtype))  # compiles the kernels where nobody has yet, before the clock runs
    report, file_bytes, lend = None, None, False
    if manifest.synthetic_seed is not None:
        began = time.perf_counter()
        parts = _made(config, manifest.synthetic_seed, wanted)
    else:
        files = weight_files(manifest)
        stored = stored_tensors(files)
        file_bytes = check_tensors(config, stored)
        report = LoadReport.before(files)
        # What has to be converted is copied anyway; on a network file system each page may be asked for again.
        lend = (
            (report.page_cache, device.type) == ("warm", "cpu")
            and all(stored[name].dtype is dtype for name in wanted)
            and not any(network_file_system(file) for file in files)
        )
        barrier()
        began = time.perf_counter()
        parts = _read(config, grid, files, wanted, local, report, lend)
    assembly = Assembly(config, grid, wanted, dtype, device, lend)
    for piece, tensor in parts:
        assembly.put(piece, tensor)
    shard = Shard(config, grid, group, assembly.weights())
    hash_seconds = assembly.hash_seconds
    seconds = time.perf_counter() - began - hash_seconds
    return LoadedShard(shard, seconds, hash_seconds, assembly.digest(), assembly.nbytes, file_bytes, report)


def shard_figures(context: Context) -> dict[str, Figure]:
    """Figures of the kept shard; those of the load are None but in the first call.

    load_seconds: from the first read to the model's readiness, without the hash_seconds that hashing took meanwhile
    (a cold load reads ahead in them); settle_seconds: packing what is not packed yet, into huge pages, after that.
    load_bytes: all tensors as they lie in the files; load_asked_bytes: what this rank read of them;
    load_device_bytes: what the device gave for that; load_page_cache_share: how much of the files was in memory
    before. All None for a synthetic model. weights_bytes are this rank's, model_parameters the whole model's; tied
    ones count once.
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
        "settle_seconds": loaded.settle_seconds if first else None,
        **{name: value if first else None for name, value in loaded.prepared.items()},
        **({"load_peak_memory_bytes": loaded.peak_bytes} if context.memory_pass else {}),
        "weights_hash": loaded.digest,
        "weights_bytes": loaded.weights_bytes,
        "model_parameters": sum(prod(shape) for shape in loaded.shard.config.tensor_shapes().values()),
    }


def _read(
    config: ModelConfig,
    grid: Grid,
    files: list[Path],
    wanted: dict[str, Piece],
    local: tuple[int, int],
    report: LoadReport,
    lend: bool,
) -> Iterator[tuple[Piece, Tensor]]:
    place, ranks = local
    neighbours = [replace(grid, rank=grid.rank - place + other) for other in range(ranks)]
    return read_pieces(
        files,
        wanted.values(),
        local_rank=place,
        local_ranks=ranks,
        host_pieces=[piece for neighbour in neighbours for piece in pieces(config, neighbour).values()],
        lend=lend,
        report=report,
    )


def _made(config: ModelConfig, seed: int, wanted: dict[str, Piece]) -> Iterator[tuple[Piece, Tensor]]:
    """Each tensor is made whole, so that it is the same for every layout, and cut."""
    shapes = config.tensor_shapes()
    for name, piece in wanted.items():
        whole = synthetic_tensor(name, shapes[name], seed, config.initializer_range)
        # A copy: a view would keep the whole alive where it is not packed.
        yield piece, whole if piece == Piece(name) else cut(whole, piece).clone()


def cut(whole: Tensor, piece: Piece) -> Tensor:
    """The piece of a tensor, as a view."""
    part = whole if piece.rows is None else whole[slice(*piece.rows)]
    return part if piece.columns is None else part[:, slice(*piece.columns)]


def shard_of(config: ModelConfig, grid: Grid, group: Communicator, tensors: dict[str, Tensor]) -> Shard:
    """A shard from the tensors of a whole model, which keep their dtype and device."""
    wanted = pieces(config, grid)
    some = next(iter(tensors.values()))
    assembly = Assembly(config, grid, wanted, some.dtype, some.device)
    for name, piece in wanted.items():
        assembly.put(piece, cut(tensors[name], piece))
    return Shard(config, grid, group, assembly.weights())


class Assembly:
    """Takes a rank's pieces in any order; packs each product when the last of its parts has come.

    `lent`: the tensors that come may be used until the weights are settled, and need not be copied before.
    """

    def __init__(
        self,
        config: ModelConfig,
        grid: Grid,
        wanted: Iterable[str],
        dtype: torch.dtype,
        device: torch.device,
        lent: bool = False,
    ) -> None:
        self._config, self._grid, self._dtype, self._device, self._lent = config, grid, dtype, device, lent
        self._products = _products(config, grid, set(wanted))
        self._product_of = {name: product for product, names in self._products.items() for name in names}
        self._waiting: dict[str, Tensor] = {}
        self._plain: dict[str, Tensor] = {}
        self._packed: dict[str, PackedLinear] = {}
        self._hashed = HashedWeights()
        self.nbytes = 0

    def put(self, piece: Piece, tensor: Tensor) -> None:
        """Take one piece, in whatever dtype."""
        name = piece.name
        tensor = tensor.to(self._device, self._dtype)
        self.nbytes += tensor.nbytes
        self._hashed.add(name, tensor, "" if piece == Piece(name) else f"{piece.rows}{piece.columns}")
        product = self._product_of.get(name)
        if product is None or (product == _HEAD and self._keeps_table(name)):
            # A copy of what is small: a page of the file would stay mapped for it.
            self._plain[name] = tensor.clone() if self._lent and tensor.dim() == 1 else tensor
        if product is None:
            return
        self._waiting[name] = tensor
        names = self._products[product]
        if all(one in self._waiting for one in names):
            parts = [self._waiting.pop(one) for one in names]
            self._packed[product] = self._pack(parts)

    def weights(self) -> Weights:
        """All of the rank's weights; every wanted piece must have come."""
        assert not self._waiting, f"parts without the rest: {sorted(self._waiting)}"
        grid, layers = self._grid, own_layers(self._config, self._grid)
        return Weights(
            layers=[self._layer(f"model.layers.{layer}.") for layer in layers],
            embedding=self._plain["model.embed_tokens.weight"] if grid.is_first_stage else None,
            norm=self._plain["model.norm.weight"] if grid.is_last_stage else None,
            head=self._packed[_HEAD] if grid.is_last_stage else None,
            lent=self._lent,
        )

    @property
    def hash_seconds(self) -> float:
        """What hashing took while the pieces came."""
        return self._hashed.seconds

    def digest(self) -> str:
        """16 hexadecimal digits over all pieces: on one rank those of `engine.weights.weights_hash`."""
        return self._hashed.digest()

    def _pack(self, parts: list[Tensor]) -> PackedLinear:
        """One layer from the weights and biases of several, one below the other."""
        weights = [part for part in parts if part.dim() == 2]
        biases = [part for part in parts if part.dim() == 1]
        bias = torch.cat(biases) if biases else None
        return pack_linear(weights, bias, packing="lent" if self._lent else "quick")

    def _keeps_table(self, name: str) -> bool:
        return name == "model.embed_tokens.weight" and self._grid.is_first_stage

    def _layer(self, prefix: str) -> Layer:
        return Layer(
            input_norm=self._plain[f"{prefix}input_layernorm.weight"],
            qkv=self._packed[f"{prefix}qkv"],
            query_norm=self._plain.get(f"{prefix}self_attn.q_norm.weight"),
            key_norm=self._plain.get(f"{prefix}self_attn.k_norm.weight"),
            output=self._packed[f"{prefix}output"],
            post_norm=self._plain[f"{prefix}post_attention_layernorm.weight"],
            gate_up=self._packed[f"{prefix}gate_up"],
            down=self._packed[f"{prefix}down"],
        )


_HEAD = "head"
_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def _products(config: ModelConfig, grid: Grid, wanted: set[str]) -> dict[str, list[str]]:
    """The tensors of each packed product in their order: weights first, then those biases that this rank has."""
    products: dict[str, list[str]] = {}
    for layer in own_layers(config, grid):
        prefix = f"model.layers.{layer}."
        for product, parts in _PARTS.items():
            names = [f"{prefix}{part}.{kind}" for kind in ("weight", "bias") for part in parts]
            products[prefix + product] = [name for name in names if name in wanted]
    if grid.is_last_stage:
        products[_HEAD] = ["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    return products
