"""DeepSpeed made ready in this process: its environment, its silence, and what it may not compile.

    deepspeed = start_deepspeed(context)
    need_supported(options, context)          # NotImplementedError, by name, before anything is built

It takes the process group that exists and makes none of its own; one rank alone gets a group of one.
"""

import contextlib
import importlib
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.context import Context
from engine.deepspeed_operators import compile_operator
from engine.training.trainer import Options


def preload() -> None:
    """Import the library before a process forks, so that its 200 MB are not taken for a cell's; on CPUs alone, as it
    looks for GPUs meanwhile, which must not be touched before a fork."""
    if torch.version.cuda is None:
        with contextlib.suppress(NotImplementedError):  # the child says so
            _import("cpu")


def _import(kind: str) -> Any:
    """Raises NotImplementedError where it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", kind)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise NotImplementedError(
            f"layout.strategy: zero needs DeepSpeed, which is not installed ({error}); pip install deepspeed"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # its import sets its own level
    # It calls torch's collectives by names that torch is about to change.
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    return deepspeed


def start_deepspeed(context: Context) -> Any:
    """The library, imported and in this launch's process group. Raises NotImplementedError where it is missing."""
    kind = context.device.type
    # LOCAL_SIZE: without it parts of the library crash under torchrun. What is set already stays.
    for name, value in (
        ("RANK", context.rank),
        ("WORLD_SIZE", context.world_size),
        ("LOCAL_RANK", context.local_rank),
        ("LOCAL_SIZE", context.job.ranks_per_node),
        ("TORCH_EXTENSIONS_DIR", Path(context.job.cache) / "torch_extensions"),
    ):
        os.environ.setdefault(name, str(value))
    deepspeed = _import(kind)
    if not dist.is_initialized():
        assert context.world_size == 1
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # not in __all__
    # Its sums over shared memory, which training does not use, would be compiled first, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    return deepspeed


def set_groups(tensor: dist.ProcessGroup | None, data: dist.ProcessGroup | None) -> None:
    """Have the library use these groups for tensor and data parallelism, or, without, forget them.

    It would make a mesh of its own, which on gloo may abort a process at its end, and keep it for all visits to come.
    There is no public way: `tp_model_init` takes the one group and not the other.
    """
    from deepspeed.utils import groups  # type: ignore[import-untyped]

    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = tensor
    groups._DATA_PARALLEL_GROUP = data
    groups.mpu = None  # the last engine's; one with tensor parallelism sets it


def need_supported(options: Options, context: Context) -> None:
    """Raise NotImplementedError for what this machine or installation cannot do."""
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-untyped]

    accelerator = get_accelerator()
    if options.dtype == "float16" and not accelerator.is_fp16_supported():
        raise NotImplementedError(
            "dtype: float16 is not computed by DeepSpeed on this device; use bfloat16, or strategy ddp or fsdp"
        )
    if options.dtype == "bfloat16" and not accelerator.is_bf16_supported():
        raise NotImplementedError("dtype: bfloat16 is not computed by DeepSpeed on this device; use float32")
    if options.offload == "nvme":
        _need_async_io(context)


def _need_async_io(context: Context) -> None:
    """DeepSpeed reads and writes NVMe through an operator of its own, compiled against libaio when first used."""
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-untyped]

    builder = AsyncIOBuilder()
    missing = [tool for tool in ("c++", "ninja") if shutil.which(tool) is None]
    if not missing and not builder.is_compatible(verbose=False):
        missing = ["the headers of libaio (Debian: libaio-dev)"]
    try:
        if not missing:
            compile_operator(builder, Path(context.job.cache) / "torch_extensions")
    except RuntimeError as error:
        missing = [f"something ({str(error).splitlines()[0]})"]
    if missing:
        raise NotImplementedError(
            "workload.offload: nvme needs DeepSpeed's async_io operator, which cannot be compiled here for want of "
            f"{' and '.join(missing)}; install it, or use offload cpu"
        )


def swap_folder(context: Context) -> Path:
    """A folder of this rank's own for what it swaps out, below the node's cache; an earlier visit's is removed."""
    folder = Path(context.job.cache) / "swap" / context.job.name / f"rank{context.rank}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
