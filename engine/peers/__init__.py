"""The `generate` workload on other engines at their fastest settings: what ours is measured against.

transformers with a static cache, compiled, and tensor parallel; DeepSpeed's automatic tensor parallelism. Passes,
columns and figures are those of `engine.generate`, which calls

    outcome = run(visit, context)

for cells of these engines (transformers' plain `generate` on one rank is `engine.reference`). A process runs one of
them only, in a launch of its own. What this machine cannot run is a NotImplementedError that says why.
"""

from configs.job import Visit
from engine.context import Context, Outcome


def run(visit: Visit, context: Context) -> Outcome:
    """Measure one visit. Raises ValueError for a model or prompts that cannot be used, NotImplementedError."""
    # Only here: these import transformers, which nothing that lists this package should.
    from engine.peers.loading import load_peer
    from engine.peers.measuring import measure_peer
    from engine.peers.starting import starter

    peer = load_peer(context, starter(visit.cell, context))
    return measure_peer(visit, context, peer)
