"""Shell setup of a node before its ranks: environment modules and the target's `setup` lines.

They run on every node, outside the container, in the shell that then executes the command.

    prepared(["python3", "-m", "slurm.launch", "/runs/s/jobs/0001/job.json"], target)
"""

import shlex
from collections.abc import Sequence

from configs.targets.resources import ClusterTarget


def setup_lines(target: ClusterTarget) -> list[str]:
    """Lines of bash; none where the target asks for nothing."""
    lines = [f"module load {shlex.quote(module)}" for module in target.modules]
    if lines:  # a function of login shells; what sbatch was called from need not have been one
        lines.insert(0, "command -v module > /dev/null || . /etc/profile")
    return [*lines, *target.setup]


def prepared(command: Sequence[str], target: ClusterTarget) -> list[str]:
    """The command after the target's lines; the first line that fails ends the job on that node."""
    lines = setup_lines(target)
    if not lines:
        return list(command)
    # A profile may use variables that are not set and commands that fail: -e begins after it.
    first = [lines.pop(0)] if target.modules else []
    script = "\n".join([*first, "set -e", *lines, 'exec "$@"'])
    return ["bash", "-c", script, "bash", *command]
