"""Variables by which torchrun takes options that its command line leaves out, such as PET_RDZV_ENDPOINT.

    environment = without_torchrun_options(os.environ)      # of a torchrun whose options are all chosen here

A pod of an elastic PyTorchJob (Kubeflow) has them for the training that it was made for. Source: the options with
`action=env` or `check_env` of torch/distributed/run.py.
"""

from collections.abc import Mapping

_OPTIONS = (
    *("DUPLICATE_STDERR_FILTERS", "DUPLICATE_STDOUT_FILTERS", "EVENT_LOG_HANDLER", "LOCAL_ADDR", "LOCAL_RANKS_FILTER"),
    *("LOG_DIR", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS", "MODULE", "MONITOR_INTERVAL", "NNODES", "NO_PYTHON"),
    *("NODE_RANK", "NPROC_PER_NODE", "RDZV_BACKEND", "RDZV_CONF", "RDZV_ENDPOINT", "RDZV_ID", "REDIRECTS", "ROLE"),
    *("RUN_PATH", "SHUTDOWN_TIMEOUT", "SIGNALS_TO_HANDLE", "STANDALONE", "START_METHOD", "TEE", "VIRTUAL_LOCAL_RANK"),
)
TORCHRUN_VARIABLES = frozenset(f"PET_{option}" for option in _OPTIONS)
"""Not all that begin with PET_: a script may have others of its own, of pets or of tomographs."""


def without_torchrun_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of torchrun's options."""
    return {name: value for name, value in environment.items() if name not in TORCHRUN_VARIABLES}
