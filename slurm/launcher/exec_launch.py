"""What submitit runs on a node: it makes its own process the launcher.

Where Slurm tracks processes by cgroups it sends SIGTERM to the tasks that srun started, and to nothing below them
(`proctrack_p_signal` in src/plugins/proctrack/cgroup/proctrack_cgroup.c); submitit's wrapper only says that it was
asked. So the launcher must be the task itself, or it would first hear of a cancelled job by SIGKILL.
"""

import os
import sys


def exec_launch(command: list[str]) -> None:
    """Replace this process by the command, which keeps its pid. Raises OSError where there is no such program."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command[0], command)
