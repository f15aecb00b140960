"""Set up DeepSpeed in this process: environment, logging, and compilation.

    deepspeed = start_deepspeed(context)
    need_supported(options, context)          # NotImplementedError, by name, before anything is built

It uses the existing process group and creates none; a single rank gets a group of one.
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

from configs.common.system.collector import imported_for_good
from engine.context import Context
from engine.rank.deepspeed_operators import compile_operator
from engine.training.trainer import TrainerOptions


def preload_deepspeed() -> None:
    """Import the library before a process forks, so that its 200 MB are not attributed to a cell; on CPUs only, because
    it queries GPUs, which must not be touched before a fork.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        with contextlib.suppress(NotImplementedError):  # the child reports it
            _import("cpu")


def _import(kind: str) -> Any:
    """Import the library. Raises NotImplementedError if it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", kind)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        with imported_for_good("deepspeed"):
            deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise NotImplementedError(
            f"layout.strategy: zero needs DeepSpeed, which is not installed ({error}); pip install deepspeed"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # its import sets its own level
    # It calls torch's collectives by names that torch will change.
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    return deepspeed


def start_deepspeed(context: Context) -> Any:
    """Return the library, imported and in this launch's process group. Raises NotImplementedError if it is missing."""
    kind = context.device.type
    # LOCAL_SIZE: without it parts of the library crash under torchrun. Existing values are kept.
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
    # Its shared-memory collectives, unused in training, would be compiled first, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    return deepspeed


def set_groups(tensor: dist.ProcessGroup | None, data: dist.ProcessGroup | None) -> None:
    """Set the library's groups for tensor and data parallelism, or reset them.

    It would create its own mesh, which on gloo may abort a process at exit, and keep it for all later measurements.
    There is no public API: `tp_model_init` accepts only one of the groups.
    """
    from deepspeed.utils import groups  # type: ignore[import-untyped]

    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = tensor
    groups._DATA_PARALLEL_GROUP = data
    groups.mpu = None  # the last engine's; one with tensor parallelism sets it


def need_supported(options: TrainerOptions, context: Context) -> None:
    """Raise NotImplementedError for features that this machine or installation lacks."""
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
    """Check asynchronous I/O: DeepSpeed's NVMe operator is compiled against libaio at first use."""
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-untyped]

    builder = AsyncIOBuilder()
    missing = [tool for tool in ("c++", "ninja") if shutil.which(tool) is None]
    if not missing and not builder.is_compatible(verbose=False):
        missing = ["the headers of libaio (Debian: libaio-dev)"]
    try:
        if not missing:
            compile_operator(builder, Path(context.job.cache) / "torch_extensions", context.job_cores)
    except RuntimeError as error:
        missing = [f"something ({str(error).splitlines()[0]})"]
    if missing:
        raise NotImplementedError(
            "workload.offload: nvme needs DeepSpeed's async_io operator, which cannot be compiled here for want of "
            f"{' and '.join(missing)}; install it, or use offload cpu"
        )
