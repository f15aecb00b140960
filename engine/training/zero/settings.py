"""DeepSpeed's configuration for a training run, with explicit values for surprising defaults.

    config = zero_config(options, elements=model_elements, swap_folder=None)

Buckets are the library's default sizes (as in the planner's memory model), but never longer than the model: a
bucket of 5e8 elements would take 2 GB beside a model of a million.
"""

import re
from pathlib import Path
from typing import Any

from engine.planner.memory.framework import DEFAULT
from engine.training.strategies.tensor import COLUMN_PARALLEL, ROWS
from engine.training.trainer import TrainerOptions

FIRST_LOSS_SCALE_POWER = 16
LOSS_SCALE_WINDOW = 2000
"""Steps without overflow after which float16's scale is doubled, as in torch's GradScaler."""


def zero_config(options: TrainerOptions, elements: int, swap_folder: Path | None = None) -> dict[str, Any]:
    """Return the `config` of deepspeed.initialize for a model of this many elements.

    Clipping is always set, because this version of DeepSpeed clips to 1 by default. Gradients of bfloat16 and float16
    are kept and summed in that type over the micro-batches, the library's default.
    """
    config = {
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": options.gradient_clipping or 0.0,
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "fp16": {
            "enabled": options.dtype == "float16",
            "loss_scale": 0,
            "initial_scale_power": FIRST_LOSS_SCALE_POWER,
            "loss_scale_window": LOSS_SCALE_WINDOW,
            "hysteresis": 1,
        },
        "zero_optimization": _zero_optimization(options, elements, swap_folder),
        # Our optimizer is passed in: the library supports torch's AdamW, but not SGD; on the CPU torch's fused one
        # needs no compiler, unlike DeepSpeedCPUAdam.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if options.tp > 1:
        config["tensor_parallel"] = {"autotp_size": options.tp, "partition_config": _partition()}
    return config


def _partition() -> dict[str, Any]:
    """Return the products of our Llama to split by its tensor parallelism; otherwise it guesses by name."""
    parts = {"column": COLUMN_PARALLEL, "row": ROWS}
    patterns = {kind: [rf".*\.{re.escape(name)}\.weight$" for name in names] for kind, names in parts.items()}
    specs = [{"patterns": found, "partition_type": kind} for kind, found in patterns.items()]
    return {"use_default_specs": False, "layer_specs": specs}


def _zero_optimization(options: TrainerOptions, elements: int, swap_folder: Path | None) -> dict[str, Any]:
    stage = int(options.strategy[-1])
    # The library asserts that it is even, which the elements of a model need not be.
    bucket = min(DEFAULT.reduce_bucket_size, elements + elements % 2)
    found: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        found |= {
            "stage3_prefetch_bucket_size": min(DEFAULT.prefetch_bucket_size, elements),
            "stage3_param_persistence_threshold": DEFAULT.param_persistence_threshold,
            "stage3_max_live_parameters": DEFAULT.max_live_parameters,
            "stage3_max_reuse_distance": DEFAULT.max_reuse_distance,
            "sub_group_size": DEFAULT.sub_group_size,
        }
    if options.offload != "none":
        place: dict[str, Any] = {"device": options.offload, "pin_memory": True}
        if swap_folder is not None:
            place["nvme_path"] = str(swap_folder)
        found["offload_optimizer"] = place
        if stage == 3:
            found["offload_param"] = dict(place)
            if swap_folder is not None:
                found["offload_param"]["buffer_size"] = DEFAULT.swap_buffer_elements // 5
    return found
