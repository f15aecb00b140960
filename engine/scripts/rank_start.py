"""Started by torchrun, DeepSpeed and the others in the place of the script: starts the script and reports its end.

    python -I rank_start.py COMMAND...                      (RANKWISE_SCRIPT: folder of the node's pipes and reports)
    python -I rank_start.py --nodes FOLDER RANKS_PER_NODE   (srun, mpirun: FOLDER has a folder for each node)

In the second form, command and variables are those that the agent of the rank's own node has written.

The rank's output goes to the agent's pipes, whichever launcher started it. Its exit code, processor time and peak
memory become `exit_<rank>.json`. The script dies with this process, and this process ends as the script ended. Standard
library alone: it runs by any Python, and imports nothing of Rankwise.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time

LOCAL_RANK = "__LOCAL_RANK__"
NODES = "--nodes"
START_FILE = "start.json"
_LAUNCHERS = ("SLURM", "OMPI_", "PMI", "MPI", "HYDRA", "PRTE", "PRRTE", "UCX_")
"""Prefixes of variables by which a launcher tells a rank its place."""
_AGENT_SECONDS = 120.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_NOT_STARTED = 127
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def first_of(names, default):
    """The first variable that is set, as a text."""
    return next((os.environ[name] for name in names if os.environ.get(name)), default)


def start_of_node(folder, ranks_per_node):
    """The command of this rank, with the variables and in the folder of its node. Waits for the node's agent."""
    path = os.path.join(folder, str(int(first_of(_RANKS, "0")) // int(ranks_per_node)), START_FILE)
    deadline = time.monotonic() + _AGENT_SECONDS
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            sys.exit(f"{path}: not written within {_AGENT_SECONDS:.0f} s by the agent of this node")
        time.sleep(0.05)
    with open(path) as file:
        found = json.load(file)
    given = {name: value for name, value in os.environ.items() if name.startswith(_LAUNCHERS)}
    os.environ.update(found["environment"])
    os.environ.update(given)
    os.chdir(found["folder"])
    return found["command"]


def main(command):
    """Run the command; returns its exit code, negative for a signal."""
    if command[0] == NODES:
        command = start_of_node(command[1], command[2])
    rank, local_rank = first_of(_RANKS, "0"), first_of(_LOCAL_RANKS, "0")
    os.environ.update(RANK=rank, LOCAL_RANK=local_rank, WORLD_SIZE=first_of(_SIZES, "1"))
    folder = os.environ["RANKWISE_SCRIPT"]
    command = [word.replace(LOCAL_RANK, local_rank) for word in command]
    parent, began = os.getpid(), time.monotonic()
    child = os.fork()
    if child == 0:
        run(command, folder, rank, parent)
    for number in _FORWARDED:
        signal.signal(number, lambda got, _: forward(child, got))
    keep(folder, f"rank_{rank}.json", {"rank": int(rank), "pid": child, "wrapper": parent, "began": began})
    while True:
        try:
            _, status, usage = os.wait4(child, 0)
            break
        except InterruptedError:
            continue
    code, end = os.waitstatus_to_exitcode(status), time.monotonic()
    seconds = usage.ru_utime + usage.ru_stime
    ended = {"rank": int(rank), "exit_code": code, "cpu_seconds": seconds, "peak_memory_bytes": usage.ru_maxrss * 1024}
    keep(folder, f"exit_{rank}.json", ended | {"ended_at": time.time(), "ended": end})
    return code


def run(command, folder, rank, parent):
    """Become the script: its output to the pipes, its end tied to the parent's."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_NOT_STARTED)
        for name, number in (("out", 1), ("err", 2)):
            descriptor = os.open(os.path.join(folder, f"{name}_{rank}"), os.O_WRONLY)
            os.dup2(descriptor, number)
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode("utf-8", "replace"))
    os._exit(_NOT_STARTED)


def forward(child, number):
    """Pass a signal on; the script decides what it does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def keep(folder, name, data):
    """Write a report under a temporary name, then rename it."""
    path = os.path.join(folder, name)
    with open(path + ".tmp", "w") as file:
        file.write(json.dumps(data))
    os.replace(path + ".tmp", path)


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    if ended < 0 and -ended in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        signal.signal(-ended, signal.SIG_DFL) if -ended != signal.SIGKILL else None
        os.kill(os.getpid(), -ended)
    sys.exit(ended if ended >= 0 else 128 - ended)
