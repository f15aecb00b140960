"""Workloads of prompts on other engines at their fastest settings: what ours is measured against.

transformers with a static cache, compiled, tensor parallel and in stages; DeepSpeed's automatic tensor parallelism;
ONNX Runtime. Passes, columns and figures are those of `engine.generate`, `engine.seq2seq` and `engine.encode`, which
call

    outcome = run(visit, context)

for cells of these engines (transformers' plain model on one rank is `engine.reference`). A process runs one of
them only, in a launch of its own. What this machine, or the engine, cannot run is a NotImplementedError that says why.
"""

from configs.job import Visit
from engine.context import Context, Outcome


def run(visit: Visit, context: Context) -> Outcome:
    """Measure one visit. Raises ValueError for a model or prompts that cannot be used, NotImplementedError."""
    # Only here: these import transformers or onnxruntime, which nothing that lists this package should.
    if visit.cell.engine == "onnxruntime":
        from engine.peers.onnx_peer import run_onnx

        return run_onnx(visit, context)
    from engine.peers.loading import load_peer
    from engine.peers.measuring import measure_peer
    from engine.peers.starting import starter

    peer = load_peer(context, starter(visit.cell, context))
    return measure_peer(visit, context, peer)
