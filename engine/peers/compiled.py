"""transformers' compiled decode step, at its fastest settings for the device.

On a CPU: Inductor with frozen, packed weights and autotuned matrix kernels (`max_autotune`): for 200M parameters in
bfloat16 on one core 19 ms a token against 31 frozen only, 45 to 50 compiled with transformers' own settings, and 47 to
55 not compiled. Compiling takes most of a minute in each launch, because a graph with packed weights cannot be cached
across processes. On a GPU transformers' default settings are used.
"""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from engine.context import Context
from engine.peers.loading import Start, load_model


def compiled_start(context: Context) -> Start:
    """Return the start of transformers with a compiled decode step. Raises NotImplementedError without a compiler."""
    on_cpu = context.device.type == "cpu"
    if on_cpu:
        need_compiler("engine_mode: compiled", os.environ.get("CXX", "g++"))
        _prepare(context)

    caches: dict[tuple[int, int], Any] = {}

    def settings(model: Any, rows: int, capacity: int) -> dict[str, Any]:
        if (rows, capacity) not in caches:
            caches[rows, capacity] = static_cache(model, rows, capacity)
        caches[rows, capacity].reset()
        return {"past_key_values": caches[rows, capacity], "compile_config": _compile_config(on_cpu)}

    # Frozen weights are constants of the graph, which inference-mode tensors cannot be.
    return Start(lambda folder, dtype: load_model(folder, dtype, context), settings, inference_mode=not on_cpu)


def need_compiler(what: str, compiler: str) -> None:
    """Raise NotImplementedError if the compiler for PyTorch's extensions is missing."""
    if shutil.which(compiler) is None:
        raise NotImplementedError(f"{what} needs a C++ compiler, and there is no {compiler}; install one or set CXX")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise NotImplementedError(f"{what} needs Python's headers, and there is no {header}")


def _prepare(context: Context) -> None:
    import torch._inductor.config as inductor

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(context.job.cache) / "inductor")
    # More than one would start a process pool on this rank's few cores.
    inductor.compile_threads = 1
    # A choice made by a trial on a busy machine would be cached, and could be half as fast as the best.
    inductor.autotune_local_cache = False
    # Set for the whole process: as options of the compilation alone they had no effect.
    inductor.freezing = True
    inductor.max_autotune = True


def _compile_config(on_cpu: bool) -> Any:
    from transformers import CompileConfig

    if not on_cpu:
        return CompileConfig(fullgraph=True, dynamic=False)
    options = {"freezing": True, "max_autotune": True}
    config = CompileConfig(fullgraph=True, dynamic=False, mode=None, options=options)
    config._compile_all_devices = True
    return config


def static_cache(model: Any, rows: int, capacity: int) -> Any:
    """Return a static cache of this size that works with a graph with frozen weights.

    transformers marks the cache's tensors as having a fixed address. Inductor then freezes them as weights, and treats
    the length of the cache as a constant.
    """
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=capacity)
    # Heads and widths as the model makes them: a config has them by several names (Falcon's `multi_query`), and those
    # of latent attention are others.
    with torch.no_grad():
        token = torch.zeros((rows, 1), dtype=torch.int64, device=model.device)
        seen = model(input_ids=token, use_cache=True).past_key_values
    for layer, known in zip(cache.layers, seen.layers, strict=True):
        if getattr(layer, "supports_early_init", True):  # older versions do not say
            layer.lazy_initialization(known.keys, known.values)
    if model.device.type == "cpu":
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values, layer.cumulative_length):
                vars(tensor).pop("_dynamo_static_input_type", None)
    return cache
