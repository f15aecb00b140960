"""DeepSpeed's automatic tensor parallelism, with all-reduces through shared memory within one host.

Its operator for that is compiled once, into the cache of the nodes (`engine.rank.deepspeed_operators`). Two problems
are worked around here: it crashes without LOCAL_SIZE, and it leaves 69 MB a rank in /dev/shm. Seen in version 0.19
(csrc/cpu/comm).
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

_BUFFERS = "deepspeed_allreduce_buffer_{user}_{address}_{port}_{rank}"


def automatic_start(context: Context) -> Start:
    """Return the start of DeepSpeed. Raises NotImplementedError if it, a compiler or a single host is missing."""
    if context.device.type != "cpu":
        raise NotImplementedError("engine: deepspeed is measured on CPUs by this version; use engine transformers")
    if context.world_size > context.job.ranks_per_node:
        raise NotImplementedError("engine: deepspeed is measured on one host; its fast sums go no farther")
    try:
        import deepspeed  # type: ignore[import-untyped]
    except ImportError as error:
        raise NotImplementedError(f"engine: deepspeed is not installed ({error}); pip install deepspeed") from None
    need_compiler("engine: deepspeed", os.environ.get("CXX", "c++"))
    if shutil.which("ninja") is None:
        raise NotImplementedError("engine: deepspeed compiles its operator with ninja, and there is none; install it")

    from deepspeed.ops.op_builder import ShareMemCommBuilder  # type: ignore[import-untyped]

    def before() -> None:
        os.environ["LOCAL_SIZE"] = str(context.world_size)
        compile_operator(ShareMemCommBuilder(), Path(context.job.cache) / "torch_extensions")
        _remove_buffer(context.rank)  # left by a killed run: its state would be taken for this run's
        context.barrier()

    def load(folder: Path, dtype: torch.dtype) -> Any:
        engine = deepspeed.init_inference(
            load_model(folder, dtype, context),
            tensor_parallel={"tp_size": context.world_size},
            dtype=dtype,
            replace_with_kernel_inject=False,
        )
        # All ranks have mapped it by now, so the name is no longer needed.
        _remove_buffer(context.rank)
        return engine.module

    return Start(load, before=before)


def _remove_buffer(rank: int) -> None:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = _BUFFERS.format(user=os.getuid(), address=address, port=port, rank=rank)
    (Path("/dev/shm") / name).unlink(missing_ok=True)
