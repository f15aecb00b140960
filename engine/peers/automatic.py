"""DeepSpeed's automatic tensor parallelism: on GPUs through NCCL, on CPUs through shared memory or, across hosts, gloo.

Its operator for shared memory is compiled once, into the cache of the nodes (`engine.rank.deepspeed_operators`). Three
problems are worked around here: it crashes without LOCAL_SIZE, it leaves 69 MB a rank in /dev/shm, and it is called,
uninitialised, where the ranks are on several hosts. Seen in version 0.19 (csrc/cpu/comm).
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from engine.context import Context
from engine.peers.compiled import need_compiler
from engine.peers.loading import Start, load_model
from engine.rank.deepspeed_operators import compile_operator

_OPERATOR = "deepspeed_shm_comm"
_BUFFERS = "deepspeed_allreduce_buffer_{user}_{address}_{port}_{rank}"
_SHARED_MEMORY = Path("/dev/shm")
_BUFFER_BYTES = 69_206_016
"""Of a rank: two small and two large messages, of 1 and 32 MiB (csrc/cpu/comm/shm.cpp, `allreduce_workspace`)."""


def automatic_start(context: Context) -> Start:
    """Return the start of DeepSpeed. Raises NotImplementedError if it, or what its operator is compiled with, is
    missing.
    """
    os.environ["DS_ACCELERATOR"] = context.device.type  # it takes a GPU that it sees, even if the ranks do not use it
    try:
        import deepspeed  # type: ignore[import-untyped]
    except ImportError as error:
        raise NotImplementedError(f"engine: deepspeed is not installed ({error}); pip install deepspeed") from None
    shares_memory = context.device.type == "cpu" and context.world_size <= context.job.ranks_per_node
    if shares_memory:
        need_compiler("engine: deepspeed", os.environ.get("CXX", "c++"))
        if shutil.which("ninja") is None:
            raise NotImplementedError(
                "engine: deepspeed compiles its operator with ninja, and there is none; install it"
            )
        _need_shared_memory(context.world_size)

    def before() -> None:
        os.environ["LOCAL_SIZE"] = str(min(context.world_size, context.job.ranks_per_node))
        if shares_memory:
            from deepspeed.ops.op_builder import ShareMemCommBuilder  # type: ignore[import-untyped]

            compile_operator(ShareMemCommBuilder(), Path(context.job.cache) / "torch_extensions", context.job_cores)
            _remove_buffer(context.rank)  # left by a killed run: its state would be taken for this run's
        elif context.device.type == "cpu":
            deepspeed.ops.__compatible_ops__[_OPERATOR] = False  # else it is compiled and called between hosts too
        context.barrier()

    def load(folder: Path, dtype: torch.dtype) -> Any:
        engine = deepspeed.init_inference(
            load_model(folder, dtype, context),
            tensor_parallel={"tp_size": context.world_size},
            dtype=dtype,
            replace_with_kernel_inject=False,
        )
        if shares_memory:
            _remove_buffer(context.rank)  # all ranks have mapped it by now, so the name is no longer needed
        return engine.module

    return Start(load, before=before)


def _need_shared_memory(ranks: int) -> None:
    """Raise NotImplementedError where the buffers of all ranks do not fit: DeepSpeed crashes there (SIGSEGV)."""
    needed, free = ranks * _BUFFER_BYTES, shutil.disk_usage(_SHARED_MEMORY).free
    if free < needed:
        raise NotImplementedError(
            f"engine: deepspeed needs {needed / 1e6:.0f} MB of shared memory for {ranks} ranks, and {free / 1e6:.0f} "
            f"MB are free in {_SHARED_MEMORY}; give a container more (docker run --shm-size)"
        )


def _remove_buffer(rank: int) -> None:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = _BUFFERS.format(user=os.getuid(), address=address, port=port, rank=rank)
    (_SHARED_MEMORY / name).unlink(missing_ok=True)
