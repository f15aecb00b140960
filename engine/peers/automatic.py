"""DeepSpeed's automatic tensor parallelism, whose ranks of one host sum through shared memory.

Its operator for that is compiled once, into the cache of the nodes (`engine.deepspeed_operators`). Two habits of it are
dealt with here: it crashes where LOCAL_SIZE is not set; and it leaves 69 MB a rank in /dev/shm. Seen in version 0.19
(csrc/cpu/comm).
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from engine.context import Context
from engine.deepspeed_operators import compile_operator
from engine.peers.compiled import need_compiler
from engine.peers.loading import Start

_BUFFERS = "deepspeed_allreduce_buffer_{user}_{address}_{port}_{rank}"


def automatic_start(context: Context) -> Start:
    """How DeepSpeed is started. Raises NotImplementedError where it, a compiler or the one host is missing."""
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

    from engine.peers.starting import load_model

    def before() -> None:
        os.environ["LOCAL_SIZE"] = str(context.world_size)
        compile_operator(ShareMemCommBuilder(), Path(context.job.cache) / "torch_extensions")
        _remove_buffer(context.rank)  # of a run that was killed: its state would be taken for this one's
        context.barrier()

    def load(folder: Path, dtype: torch.dtype) -> Any:
        engine = deepspeed.init_inference(
            load_model(folder, dtype, context),
            tensor_parallel={"tp_size": context.world_size},
            dtype=dtype,
            replace_with_kernel_inject=False,
        )
        # All ranks have mapped it by now: the name is needed no more.
        _remove_buffer(context.rank)
        return engine.module

    return Start(load, before=before)


def _remove_buffer(rank: int) -> None:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = _BUFFERS.format(user=os.getuid(), address=address, port=port, rank=rank)
    (Path("/dev/shm") / name).unlink(missing_ok=True)
