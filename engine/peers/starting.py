"""Each engine's fastest settings, by cell.

- static: transformers' own static cache, not compiled.
- compiled: `engine.peers.compiled`.
- tp: transformers' own tensor parallelism, or DeepSpeed's (`engine.peers.automatic`).
- pp: transformers' own stages, which work one after the other.
"""

from pathlib import Path
from typing import Any

import torch

from configs.cell import Cell, Layout
from engine.context import Context
from engine.peers.folder_model import from_folder
from engine.peers.loading import Start, work_kind


def starter(cell: Cell, context: Context) -> Start:
    """How a cell's engine is started. Raises NotImplementedError where this machine or installation lacks something."""
    if cell.engine == "deepspeed":
        from engine.peers.automatic import automatic_start

        return automatic_start(context)
    assert cell.engine == "transformers", cell.engine
    if context.world_size > 1:
        # Its sums between ranks take the short way where there are no gradients.
        return Start(lambda folder, dtype: load_model(folder, dtype, context, cell.layout), inference_mode=False)
    if cell.engine_mode != "eager" and cell.workload.kind == "encode":
        raise NotImplementedError(f"engine_mode: {cell.engine_mode} is about a cache; an encoder has none, use eager")
    if cell.engine_mode == "compiled" and cell.workload.kind == "seq2seq":
        raise NotImplementedError("engine_mode: compiled is measured for decoders by this version; use static here")
    if cell.engine_mode == "compiled":
        from engine.peers.compiled import compiled_start

        return compiled_start(context)
    static = {"cache_implementation": "static", "disable_compile": True}
    chosen = static if cell.engine_mode == "static" else {}
    return Start(lambda folder, dtype: load_model(folder, dtype, context), lambda model, rows, capacity: dict(chosen))


def load_model(folder: Path, dtype: torch.dtype, context: Context, layout: Layout | None = None) -> Any:
    """transformers' model of a folder on this rank's device; with a layout, this rank's share by its own plan."""
    from transformers.distributed.configuration_utils import DistributedConfig

    if layout is None:
        return from_folder(folder, work_kind(context), dtype).to(context.device)
    shared = DistributedConfig(tp_size=layout.tp) if layout.tp > 1 else DistributedConfig(pp_size=layout.pp)
    return from_folder(folder, work_kind(context), dtype, distributed_config=shared)
