"""Running means and variances of batch norms: each replica computes them of its own rows.

    agree_on_running_means(module, ranks)       # before they are used or saved; all ranks call it

They do not affect a step, which normalises by its micro-batch, but evaluations, checkpoints and exports.
"""

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def agree_on_running_means(module: nn.Module, ranks: int) -> None:
    """Average them over the ranks, in place; nothing to do without batch norms."""
    if ranks == 1:
        return
    for norm in module.modules():
        if isinstance(norm, _BatchNorm):
            for buffer in (norm.running_mean, norm.running_var):
                if buffer is not None:
                    dist.all_reduce(buffer)
                    buffer /= ranks
