"""Learning-rate schedule: scaling to the global batch, warm-up, and decay.

    rate = learning_rate(workload, step)            # step: counted from 0
    scaling_factor(workload)                        # factor on `workload.learning_rate` for the global batch

A larger global batch can use a larger rate, by a rule to choose: `linear` in the batch (Goyal et al., "Accurate, Large
Minibatch SGD", arXiv 1706.02677) or as its `square_root`, which keeps the variance of an update the same (Krizhevsky,
arXiv 1404.5997; Hoffer et al., arXiv 1705.08741). The warm-up leads up to the scaled rate, as Goyal et al. do. A run
with a fixed number of steps ends at a tenth of it; one that ends by time or loss keeps it.
"""

import math

from configs.workloads.train import TrainWorkload

FINAL_RATE_SHARE = 0.1


def scaling_factor(workload: TrainWorkload) -> float:
    """Return the factor on the configured rate; 1 without a rule."""
    if workload.reference_batch_size is None:
        return 1.0
    larger = workload.global_batch_size / workload.reference_batch_size
    return math.sqrt(larger) if workload.learning_rate_scaling == "square_root" else larger


def learning_rate(workload: TrainWorkload, step: int) -> float:
    """Return the rate of a step, counted from 0: linear warm-up, then cosine to a tenth if `steps` is set."""
    highest, warmup = workload.learning_rate * scaling_factor(workload), workload.learning_rate_warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    if workload.steps is None:
        return highest
    progress = min(1.0, (step - warmup) / max(1, workload.steps - 1 - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return highest * (FINAL_RATE_SHARE + (1.0 - FINAL_RATE_SHARE) * cosine)
