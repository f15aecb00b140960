"""What a ZeRO run leaves and takes up again: its own checkpoints; and its weights in one piece.

    save(engine, folder)
    restore(engine, folder)
    weights = whole_model(model, keep=rank == 0)

Checkpoints are the library's: each rank writes what it holds, and as many ranks read it again, bit for bit.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_TAG = "zero"
_PARTS = "*_optim_states.pt"


def save(engine: Any, folder: Path) -> None:
    """Write this rank's part; returns when all ranks have written theirs."""
    engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)
    dist.barrier()


def restore(engine: Any, folder: Path) -> None:
    """Read this rank's part. Raises ValueError where there is none, or as many as of another world size."""
    written, ranks = len(list((folder / _TAG).glob(_PARTS))), dist.get_world_size()
    if written == 0:
        raise ValueError(f"{folder}: no checkpoint of ZeRO lies here")
    if written != ranks:
        raise ValueError(
            f"{folder}: the checkpoint was written by {written} ranks and ZeRO's own can be read by as many only, "
            f"not by {ranks}; resume with {written}"
        )
    found, _ = engine.load_checkpoint(str(folder), tag=_TAG, load_lr_scheduler_states=False)
    if found is None:
        raise ValueError(f"{folder}: DeepSpeed could not read the checkpoint")


def whole_model(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Float32 weights and buffers by the plain model's names, on the CPU; {} where they are not to be kept."""
    from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-untyped]

    found: dict[str, Tensor] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.get(id(tensor))
        if first is not None and first != name:  # tied: it was gathered under its first name
            whole = found.get(first)
        else:
            whole = tensor if first is None else safe_get_full_fp32_param(tensor)
        if keep:
            assert whole is not None
            found[name] = whole.detach().to("cpu", torch.float32, copy=True)
    return found
