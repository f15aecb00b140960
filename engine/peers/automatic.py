"""DeepSpeed's automatic tensor parallelism, whose ranks of one host sum through shared memory.

Its operator for that is compiled once, into the cache of the nodes, which takes a minute or more. Three habits of it
are dealt with here: it crashes where LOCAL_SIZE is not set; a compilation that was killed leaves a lock that all later
ones wait for without end; and it leaves 69 MB a rank in /dev/shm. Seen in version 0.19 (csrc/cpu/comm).
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.context import Context
from engine.peers.compiled import need_compiler
from engine.peers.loading import Start

_OPERATOR = "deepspeed_shm_comm"
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

    from engine.peers.starting import load_model

    def before() -> None:
        os.environ["LOCAL_SIZE"] = str(context.world_size)
        _compile(Path(context.job.cache) / "torch_extensions")
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


def _compile(folder: Path) -> None:
    """Compile the shared-memory operator, or find it compiled; one process of this host at a time."""
    from deepspeed.ops.op_builder import ShareMemCommBuilder  # type: ignore[import-untyped]

    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / f"{_OPERATOR}.turn"):
        (folder / _OPERATOR / "lock").unlink(missing_ok=True)
        ShareMemCommBuilder().load(verbose=False)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a file's lock, which ends with its holder, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_buffer(rank: int) -> None:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = _BUFFERS.format(user=os.getuid(), address=address, port=port, rank=rank)
    (Path("/dev/shm") / name).unlink(missing_ok=True)
