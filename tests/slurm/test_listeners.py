"""Every socket on which a process of a local run listens is on loopback: nobody else on the network reaches it."""

import os
import subprocess
import uuid
from pathlib import Path

import pytest

from configs.common.system.ports import free_port
from configs.plans.job import Job
from configs.targets.target import SlurmTarget
from slurm.launcher.node_registration import Rendezvous
from slurm.launcher.starting import rank_environment, start_argv
from tests.support.cluster.launches import noop_measurement, write_job
from tests.support.listeners import MARK, listening
from tests.support.run_folders.studies import RANKWISE, write_study
from tests.support.servers.migrated_database import put_database


@pytest.mark.slow
def test_of_a_local_run(tmp_path: Path) -> None:
    """torchrun's store, gloo's pairs, the fork parents and Prefect's server."""
    strong = {"kind": "strong", "grow": "dp", "to": 2, "base": {"items": 2}}
    study = write_study(tmp_path, workload={"kind": "noop", "seconds": 3.0}, experiments={"strong": strong})
    mark = str(uuid.uuid4())
    environment = os.environ | {MARK: mark, "RANKWISE_DATA": str(tmp_path / "data")}
    environment.pop("PREFECT_API_URL", None)
    put_database(tmp_path / "data" / "prefect" / "prefect.db")
    with listening(mark) as found:
        command = [RANKWISE, "run", str(study), "--no-calibrate"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found.beyond_loopback() == set()
    assert found.of("torchrun's agent") and found.of("rank") and found.of("Prefect server"), found.seen
    assert {"fork parent", "launcher"} <= found.roles


@pytest.mark.nightly
def test_of_ranks_under_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    paths = write_job(tmp_path, [noop_measurement("a", ranks=2, seconds=0.5)])
    job = Job.model_validate_json(paths.job.read_bytes())
    job = job.model_copy(update={"target": SlurmTarget(launcher="deepspeed")})
    argv = start_argv(job, paths.job, 0, Rendezvous(free_port()), tmp_path, None)
    mark = str(uuid.uuid4())
    environment = rank_environment(job, os.environ, launcher_pid=os.getpid()) | {MARK: mark}
    with listening(mark) as found:
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found.beyond_loopback() == set()
    assert found.of("DeepSpeed's agent") and found.of("rank"), found.seen
