"""Other engines at their fastest settings: what ours is measured against.

transformers with a static cache, compiled, tensor parallel and in stages; DeepSpeed's automatic tensor parallelism;
ONNX Runtime. `engine.workloads.other_engines` measures what

    loaded = load_peer_work(measurement, context)

returns (transformers' plain model on one rank is `engine.peers.reference`). A process runs one of them only, in a
launch of its own. What this machine, or the engine, cannot run is a NotImplementedError that says why.
"""

from configs.plans.job import Measurement
from engine.context import Context
from engine.peers.work import LoadedWork, model_work


def load_peer_work(measurement: Measurement, context: Context) -> LoadedWork:
    """Load a cell's engine and model. Raises ValueError for a model that cannot be used, NotImplementedError."""
    # Only here: these import transformers or onnxruntime, which nothing that lists this package should.
    if measurement.cell.engine == "onnxruntime":
        from engine.peers.onnx.peer import load_onnx

        return load_onnx(measurement, context)
    from engine.peers.loading import load_peer
    from engine.peers.starting import starter

    return model_work(
        load_peer(context, starter(measurement.cell, context)), measurement.cell.workload.kind, context.device
    )
