"""What a process has imported that forks the ranks of `tests.support.rank_pool`: libraries, and torch with one thread.

Nothing of ours, which may look at the environment of a test.
"""

import os

from configs.common.system.collector import imported_for_good

os.environ["OMP_NUM_THREADS"] = "1"  # read once, when torch is loaded

with imported_for_good("torch"):
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.testing  # noqa: F401  # all of them for the processes that are forked
