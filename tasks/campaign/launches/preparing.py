"""Prepare the first launch on this machine while the run still begins. Does not import Prefect.

    prepare_first(launches, plan, run, cache)

Importing torch takes as long as Prefect's import and the start of its server.
"""

import contextlib
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from configs.plans.packing import Launch
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.targets.target import LocalTarget
from slurm.forking.parents import start_parent
from tasks.campaign.launches.jobs import job_of


def prepare_first(launches: Sequence[Launch], plan: Plan, run: RunPaths, cache: Path) -> None:
    """Import what the first launch needs, in a process from which it will be forked; returns at once.

    Not for a run that is resumed: what it lacks is known only when its folder is locked.
    """
    if not launches or run.records.exists() or any(not isinstance(target, LocalTarget) for target in plan.targets):
        return
    job = job_of(launches[0], plan, run, cache)

    def prepare_parent() -> None:
        # Whatever fails here fails again, and is told, when the launch is submitted.
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as folder:
            job_json = Path(folder) / "job.json"
            job_json.write_text(job.model_dump_json(), encoding="utf-8")
            start_parent(job, job_json)

    threading.Thread(target=prepare_parent, name="prepare", daemon=True).start()
