"""Each engine's fastest settings, by cell.

- static: transformers' own static cache, not compiled.
- compiled: `engine.peers.compiled`.
- tp: transformers' own tensor parallelism, or DeepSpeed's (`engine.peers.automatic`).
"""

import os
from pathlib import Path
from typing import Any

import torch

from configs.cell import Cell
from engine.context import Context
from engine.peers.loading import Start


def starter(cell: Cell, context: Context) -> Start:
    """How a cell's engine is started. Raises NotImplementedError where this machine or installation lacks something."""
    if cell.engine == "deepspeed":
        from engine.peers.automatic import automatic_start

        return automatic_start(context)
    assert cell.engine == "transformers", cell.engine
    if context.world_size > 1:
        # Its sums between ranks take the short way where there are no gradients.
        parts = cell.layout.tp
        return Start(lambda folder, dtype: from_folder(folder, dtype, context, parts), inference_mode=False)
    if cell.engine_mode == "compiled":
        from engine.peers.compiled import compiled_start

        return compiled_start(context)
    static = {"cache_implementation": "static", "disable_compile": True}
    chosen = static if cell.engine_mode == "static" else {}
    return Start(lambda folder, dtype: from_folder(folder, dtype, context), lambda model, rows, capacity: dict(chosen))


def from_folder(folder: Path, dtype: torch.dtype, context: Context, parts: int = 1) -> Any:
    """transformers' model of a folder on this rank's device; with `parts`, this rank's share by its own plan."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    shared = {"distributed_config": DistributedConfig(tp_size=parts)} if parts > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True, **shared
    )
    if parts == 1:
        model = model.to(context.device)
    # Plain greedy decoding: a repository's sampling and penalty settings are no part of the model.
    model.generation_config = GenerationConfig()
    return model.eval()
