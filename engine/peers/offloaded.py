"""The reference where its float32 weights exceed the memory: layers that do not fit are read when they are needed.

    placement = place(folder, files, device, positions=2048, twin=True)
    model = placement.load(folder, "generate", torch.float32, scratch)

accelerate fills the device, then the host's memory, and leaves the rest on disk, from where a hook reads each layer
before its forward pass and drops it after. The operations and their order are unchanged, and so are the answers; only
time is lost. On a CPU there are memory and disk alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.common.system.memory import host_memory_available
from engine.loading import tensor_locations
from engine.peers.folder_model import WorkKind, from_folder
from engine.planner.memory.reference import USED_SHARE, ReferenceMemory, reference_memory

_TWIN_SHARE = 1 / 3
_GIB = 2**30


@dataclass(frozen=True)
class Placement:
    """Where a model's layers go. budget: bytes of weights by place, the fastest first; None: all on the device."""

    device: torch.device
    need: ReferenceMemory
    budget: dict[int | str, int] | None = None

    @property
    def offloaded(self) -> bool:
        """Whether layers are read from the host's memory or from disk while the model runs."""
        return self.budget is not None

    @property
    def text(self) -> str:
        """Where the weights are, for the log and the report."""
        if self.budget is None:
            return "in memory"
        places = ", ".join(
            f"{size / _GIB:.3g} GiB {'in host memory' if where == 'cpu' else f'on {self.device}'}"
            for where, size in self.budget.items()
        )
        weights = (self.need.weights + self.need.twin) / _GIB
        return f"{weights:.3g} GiB of weights, at most {places}; other layers are read from disk when they are used"

    def load(self, folder: Path, work: WorkKind, dtype: torch.dtype, scratch: Path | None = None) -> Any:
        """Return transformers' model of the folder, ready to run on the device.

        scratch: a folder of this load's own, from which layers are read as long as the model is used. Safetensors are
        read in place, but weights whose form transformers changes (a layer's experts become one tensor) are written
        there first, by names that are the same in each precision. None: where no such weights are, or nothing is read
        from disk.
        """
        if self.budget is None:
            return from_folder(folder, work, dtype).to(self.device)
        share = 1.0
        if self.need.twin:
            share = 1 - _TWIN_SHARE if dtype == torch.float32 else _TWIN_SHARE
        limits = {where: max(1, int(share * size)) for where, size in self.budget.items()}
        place = None if scratch is None else str(scratch)
        return from_folder(folder, work, dtype, device_map="auto", max_memory=limits, offload_folder=place)


def place(folder: Path, files: list[Path], device: torch.device, positions: int, twin: bool) -> Placement:
    """Return where the weights in `files` of a folder fit.

    positions: of the longest sequence; twin: a copy in 16 bits is made.

    Raises MemoryError, with the need, where not even one layer at a time fits.
    """
    from transformers import AutoConfig

    stored = tensor_locations(files)
    text = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    sizes = {name: getattr(text, name, None) or 0 for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    need = reference_memory(
        sum(_elements(tensor.shape) for tensor in stored.values()),
        sizes["vocab_size"],
        sizes["hidden_size"],
        sizes["num_hidden_layers"],
        positions,
        twin,
    )
    free = available_bytes(device)
    if need.total <= USED_SHARE * free:
        return Placement(device, need)
    largest = 4 * max((_elements(tensor.shape) for tensor in stored.values()), default=0)
    room = int(USED_SHARE * free) - need.working - 2 * largest
    if room < 0:
        raise MemoryError(
            f"reference: {need.total / _GIB:.1f} GiB needed in float32 for sequences of {positions} tokens, "
            f"{free / _GIB:.1f} GiB available on {device}, and layers read one at a time need "
            f"{(need.working + 2 * largest) / USED_SHARE / _GIB:.1f} GiB. Use shorter sequences (positions), or save "
            "the reference on a larger machine and name it (reference)"
        )
    if device.type == "cpu":
        return Placement(device, need, {"cpu": room})
    return Placement(device, need, {device.index or 0: room, "cpu": int(USED_SHARE * host_memory_available())})


def available_bytes(device: torch.device) -> int:
    """Return the memory of a device that is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_memory_available()


def _elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
