"""ZeRO checkpoints in DeepSpeed's format, and unsharded weights.

    save(engine, folder)
    restore(engine, folder, tp)
    weights = whole_model(model, tp, keep=rank == 0)

Checkpoints are the library's: each rank writes its part, and the same number of ranks restores it bit-identically.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.common.printable import plural
from engine.rank.failures import one_line
from engine.training.strategies.optimizers import own_settings
from engine.training.strategies.tensor import COLUMN_PARALLEL, ROWS

_TAG = "zero"
_PARTS = "*_optim_states.pt"


def save(engine: Any, folder: Path) -> None:
    """Write this rank's part; returns when all ranks have written theirs.

    Raises OSError, on all ranks, if one of them could not write its part.
    """
    problems: list[str] = []
    with contextlib.ExitStack() as noted:
        # copytree: of what is offloaded to a disk.
        for owner, name in (
            (engine.checkpoint_engine, "save"),
            (engine, "_copy_recovery_script"),
            (shutil, "copytree"),
        ):
            noted.enter_context(_noted(owner, name, problems))
        engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)
    of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, problems)
    failed = [f"rank {rank} could not write its part ({told[0]})" for rank, told in enumerate(of_ranks) if told]
    if failed:
        raise OSError(failed[0])


@contextlib.contextmanager
def _noted(owner: Any, name: str, problems: list[str]) -> Iterator[None]:
    """Note what a function of the library raises, because the other ranks wait for this one in a barrier of its own."""
    function, own = getattr(owner, name), name in vars(owner)

    def noted(*given: Any, **named: Any) -> None:
        try:
            function(*given, **named)
        except Exception as error:
            problems.append(one_line(error.__context__ or error))  # torch says last that the file is too short

    setattr(owner, name, noted)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, function)
        else:
            delattr(owner, name)  # the class's is visible again


def restore(engine: Any, folder: Path, tp: int) -> None:
    """Read this rank's part. Raises ValueError if there is none, or for another number of ranks or `tp`."""
    parts = [path.name for path in (folder / _TAG).glob(_PARTS)]
    written, ranks = len(parts), dist.get_world_size()
    if written == 0:
        raise ValueError(f"{folder}: no checkpoint of ZeRO lies here")
    if written != ranks:
        raise ValueError(
            f"{folder}: the checkpoint was written by {plural(written, 'rank')} and ZeRO's own can be read by as many "
            f"only, not by {ranks}; resume with {written}"
        )
    shards = len({name.partition("_mp_rank_")[2] for name in parts})
    if shards != tp:
        raise ValueError(f"{folder}: the checkpoint was written with tp={shards}, not {tp}; resume with that")
    with own_settings(engine.optimizer):
        found, _ = engine.load_checkpoint(str(folder), tag=_TAG, load_lr_scheduler_states=False)
    if found is None:
        raise ValueError(f"{folder}: DeepSpeed could not read the checkpoint")


def whole_model(model: nn.Module, tp: int, keep: bool) -> dict[str, Tensor]:
    """Return float32 weights and buffers by the plain model's names, on the CPU; {} unless `keep`.

    All ranks call it.
    """
    found: dict[str, Tensor] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.get(id(tensor))
        if first is not None and first != name:  # tied: already gathered under its first name
            whole = found.get(first)
        else:
            whole = tensor if first is None else _joined(name, _gathered(tensor), tp)
        if keep:
            assert whole is not None
            dtype = torch.float32 if whole.is_floating_point() else whole.dtype  # a buffer may count
            found[name] = whole.detach().to("cpu", dtype, copy=True)
    return found


def _gathered(parameter: Tensor) -> Tensor:
    """Return a weight gathered from the data-parallel ranks: its master, or itself where it is frozen and has none."""
    import deepspeed  # type: ignore[import-untyped]
    from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-untyped]

    if parameter.requires_grad:
        master: Tensor = safe_get_full_fp32_param(parameter)
        return master
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def _joined(name: str, part: Tensor, tp: int) -> Tensor:
    """Return a whole weight from the tensor-parallel ranks' `part`s; or the part, if it is not split."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    dimension = 0 if module.endswith(COLUMN_PARALLEL) else 1
    if tp == 1 or not module.endswith(COLUMN_PARALLEL + ROWS) or (dimension == 1 and part.dim() == 1):
        return part
    from deepspeed.utils import groups

    parts = [torch.empty_like(part) for _ in range(tp)]
    dist.all_gather(parts, part.contiguous(), group=groups.get_tensor_model_parallel_group())
    return torch.cat(parts, dimension)
