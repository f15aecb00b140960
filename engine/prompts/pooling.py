"""A check of the workload's pooling against the model's.

    check_pooling(context, workload)

A workload that differs from the model's `1_Pooling/config.json` is rejected.
"""

from configs.plans.pooling import pooling_of
from configs.workloads.encode import EncodeWorkload
from engine.context import Context
from engine.models.weights import required_manifest


def check_pooling(context: Context, workload: EncodeWorkload) -> None:
    """Raise ValueError if the model's folder names another pooling than the workload's, or an unsupported one."""
    manifest = required_manifest(context)
    wanted = pooling_of(manifest)
    if wanted is not None and workload.pooling != wanted:
        raise ValueError(
            f"workload.pooling: {workload.pooling} contradicts {manifest.identity}, whose 1_Pooling/config.json wants "
            f"{wanted}; use pooling: {wanted}"
        )
