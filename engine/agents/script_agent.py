"""Agent of a node for scripts of the user's: measures the launch's cells one after the other and writes their parts.

Started by the node's launcher in the place of torchrun; the script's own launcher is its child. It reports progress for
each of its ranks, so that time limits, the end of other nodes and cancellation are treated as for our own ranks.

    python -m engine.agents.script_agent PLACE_JSON JOB_JSON
"""

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.printable import printable
from configs.common.system.proc import become_subreaper, end_with_parent
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from engine.planner.accelerators import local_accelerators
from engine.rank.processes import LAUNCHER_VARIABLE, ProgressFile, leave, redirect_output
from engine.scripts.commands import NodePlace
from engine.worker import write_part
from engine.workloads.script import run


def main(arguments: list[str]) -> int:
    """Measure all cells of the job on this node. Returns the exit code."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    end_with_parent(signal.SIGKILL, int(launcher) if launcher else None)
    become_subreaper()
    told, path = json.loads(arguments[0]), Path(arguments[1]).resolve()
    paths = JobPaths(path.parent)
    job = read_model(path, Job, PLAN_BYTES).located(paths.folder)
    paths.parts.mkdir(exist_ok=True)
    gpus = job.target.device != "cpu" and len(local_accelerators()) >= job.ranks_per_node
    place = NodePlace(
        **{**told, "hosts": tuple(told["hosts"])},
        ranks_per_node=job.ranks_per_node,
        cores_per_rank=job.cell.cores_per_rank,
        gpus=gpus,
    )
    redirect_output(paths.folder / f"agent_{place.node_rank}.log")
    progress = {rank: ProgressFile(paths.progress(rank), rank) for rank in place.ranks}
    for measurement in job.measurements:
        if code := _measure(measurement, job, paths, place, progress):
            return code
    for each in progress.values():
        each.say("finished")
    return 0


def _measure(
    measurement: Measurement, job: Job, paths: JobPaths, place: NodePlace, progress: dict[int, ProgressFile]
) -> int:
    for each in progress.values():
        each.say("measurement", measurement.name)
    first = place.ranks[0]
    try:
        written = run(measurement, job, paths, place, sorted(os.sched_getaffinity(0)), write_part)
    except Exception as error:
        traceback.print_exc()
        message = printable(f"{socket.gethostname()}: {error}", 600)
        progress[first].say("failed", measurement.name, kind=type(error).__name__, message=message)
        return 1
    if written.failure is not None:
        rank = first if written.rank is None else written.rank
        kind, message = written.failure.kind, written.failure.message[:600]
        progress[rank].say("failed", measurement.name, kind=kind, message=message)
        return 1
    for each in progress.values():
        each.say("ready")
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
