"""Each engine's fastest settings, by cell.

- static: transformers' static cache, not compiled.
- compiled: `engine.peers.compiled`.
- tp: transformers' tensor parallelism, or DeepSpeed's (`engine.peers.automatic`).
- pp: transformers' stages, which run one after the other.
"""

from configs.spec.cell import Cell
from engine.context import Context
from engine.peers.loading import Start, load_model


def starter(cell: Cell, context: Context) -> Start:
    """Return the start of a cell's engine. Raises NotImplementedError if something is missing."""
    if cell.engine == "deepspeed":
        from engine.peers.automatic import automatic_start

        return automatic_start(context)
    assert cell.engine == "transformers", cell.engine
    if context.world_size > 1:
        # Without gradients, its all-reduces use a shorter path.
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
