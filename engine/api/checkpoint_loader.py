"""Load this rank's part of a checkpoint, for scripts: tensors by name, already split.

    loader = DistributedCheckpointLoader("/models/llama", rank=0, world_size=2)
    tensors = loader.load(torch.bfloat16)       # or: for name, tensor in loader: ...
    loader.report.asked_bytes                   # about half of the checkpoint's

The folder has Hugging Face's format: config.json and safetensors, in one file or several, of a family without fused
tensors. Names are the file's; tensors are split (`engine.models.slots`) and read (`engine.loading`) as in the engine.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from configs.common.files.reading import read_json_object
from configs.families.checkpoint import check_tensors, with_stored_head
from configs.families.config import ModelConfig
from configs.families.tensors import names_in_file, stored_weights
from configs.plans.model_manifest import ModelManifest
from engine.loading import LoadReport, TensorSlice, read_pieces, tensor_locations
from engine.models.sharding import check_degrees
from engine.models.slots import wanted_pieces
from engine.models.weights import weight_files
from engine.parallel.grid import Grid
from engine.rank.processes import place_from_environment


class DistributedCheckpointLoader:
    """Reads the tensor-parallel part of rank `rank` of `world_size`.

    A bias that is added after the sum over ranks (of `o_proj` and `down_proj`, whatever a family calls them) is the
    first rank's alone, so that it is added once: the others have no tensor of its name.

    use_memory_map: copy columns out of a mapping, which reads only the bytes needed; else whole rows are read in large
    blocks and cut, which suits network file systems. enable_prefetch: kernel read-ahead, shared among the ranks of this
    host that torchrun started together. Raises ValueError for a checkpoint that cannot be read, or not be split this
    way, naming the file or valid degrees.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        rank: int = 0,
        world_size: int = 1,
        use_memory_map: bool = True,
        enable_prefetch: bool = True,
    ) -> None:
        folder = Path(checkpoint_dir).absolute()
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank: {rank} is not one of world_size={world_size}; ranks are numbered from 0")
        try:
            found = read_json_object(folder / "config.json")
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder / 'config.json'}: cannot be read ({error}); name a model's folder") from error
        self.config = ModelConfig.parse(found)
        if any(len(weight.held) > 1 for weight in stored_weights(self.config)):
            raise ValueError(
                f"{folder / 'config.json'}: a {self.config.family} checkpoint holds queries, keys and values in one "
                "tensor, of which a rank keeps several parts; name a model whose tensors are cut in one place"
            )
        check_degrees(self.config, world_size, pp=1)
        self.grid = Grid(dp=1, tp=world_size, pp=1, rank=rank)
        manifest = ModelManifest(identity="folder:unknown", source="folder", folder=str(folder), files={}, config=found)
        self.files = weight_files(manifest)
        stored = tensor_locations(self.files)
        self.config = with_stored_head(self.config, stored)
        check_tensors(self.config, stored)
        self._names = names_in_file(self.config, stored)
        self.report: LoadReport | None = None
        self._mapped, self._read_ahead = use_memory_map, enable_prefetch

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors in file order and stored dtype; `report` is of this pass."""
        place = place_from_environment()
        # Only ranks of one tensor-parallel group started by torchrun on this host share the reading.
        together = place.world_size == self.grid.world_size and place.rank == self.grid.rank
        local_rank, local_ranks = (place.local_rank, place.local_world_size) if together else (0, 1)
        first = self.grid.rank - local_rank
        self.report = LoadReport.before(self.files)
        for piece, tensor in read_pieces(
            self.files,
            self._pieces_of(self.grid.rank),
            local_rank=local_rank,
            local_ranks=local_ranks,
            host_pieces=[piece for rank in range(first, first + local_ranks) for piece in self._pieces_of(rank)],
            read_ahead=self._read_ahead,
            mapped=self._mapped,
            report=self.report,
        ):
            yield piece.name, tensor

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return all of this rank's tensors, on the device and in `dtype` (None: as stored)."""
        return {name: tensor.to(device, dtype or tensor.dtype) for name, tensor in self}

    def _pieces_of(self, rank: int) -> list[TensorSlice]:
        pieces = wanted_pieces(self.config, Grid(dp=1, tp=self.grid.tp, pp=1, rank=rank))
        return [replace(piece, name=self._names[piece.name]) for piece in pieces]
