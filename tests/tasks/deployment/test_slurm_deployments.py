"""A deployment in a partition of a lab: a job that serves, reached by SSH to its node, and nothing left after it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from configs.serving.deployment import ServiceState
from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.service import end_service, service_job, submit_service
from tests.support.cluster.lab import Lab
from tests.support.run_folders.studies import rankwise, wait_until

pytestmark = pytest.mark.slurm
MODEL = Path(__file__).parents[3] / "configs" / "models" / "tiny-stdlib"
CONFIG = """Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{node}.pid
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""


@dataclass
class Access:
    """SSH to the lab's nodes, as users of a cluster have it."""

    key: Path
    known_hosts: Path


@pytest.fixture(scope="module")
def access(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    public, known = " ".join((folder / "host_key.pub").read_text().split()[:2]), ""
    for node in lab.plan.node_names:
        address = lab.plan.address(node)
        config = folder / f"{node}.config"
        config.write_text(CONFIG.format(address=address, folder=folder, node=node))
        script = f"mkdir -p /run/sshd && exec /usr/sbin/sshd -f {config}"
        done = lab.on_node(node, "sh", "-c", script)
        assert done.returncode == 0, done.stderr
        known += f"{address} {public}\n"
    (folder / "known_hosts").write_text(known)
    yield Access(folder / "key", folder / "known_hosts")
    for path in folder.glob("*.pid"):
        os.kill(int(path.read_text()), signal.SIGTERM)


def deploy(folder: Path, access: Access, *more: str, target: str = "slurm:lab") -> "subprocess.CompletedProcess[str]":
    shared = folder / "shared"
    shared.mkdir(exist_ok=True)
    options = ("--folder", shared, "--python", sys.executable, "--user", "root", "--ssh-key", access.key,
               "--known-hosts", access.known_hosts, "--no-verify", "--hours", "0.2")  # fmt: skip
    return rankwise("deploy", "--model", MODEL, "--target", target, "--name", "served", *options, *more, cwd=folder,
                    RANKWISE_DATA=str(folder / "data"))  # fmt: skip


def nothing_left(lab: Lab, folder: Path) -> None:
    assert not list((folder / "shared" / "deployments").glob("*")) and not list((folder / "shared" / "runs").glob("*"))
    assert not [name for name in lab.slurm("squeue", "--noheader", "--format=%j").split() if name.startswith("rw-")]
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(folder) in line]


def test_a_partition_serves_until_it_is_taken_down(lab: Lab, access: Access, tmp_path: Path) -> None:
    """Its server is killed on the node, and is back in the same job."""
    done = deploy(tmp_path, access)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = [line.split() for line in lab.slurm("squeue", "--noheader", "--format=%i %j").splitlines()]
    (job,) = [number for number, name in jobs if name.startswith("rw-serve-")]
    limit = lab.slurm("squeue", "--noheader", f"--jobs={job}", "--format=%l").strip()
    assert limit in ("11:00", "12:00", "13:00"), limit  # 12 minutes from the command on, rounded up, and one more
    (path,) = (tmp_path / "shared" / "deployments").glob("*/servers/1/state.json")
    before = ServiceState.model_validate_json(path.read_bytes())
    deployment = json.loads((tmp_path / "data" / "deployments" / "served" / "deployment.json").read_text())
    key = Path(deployment["key_file"]).read_text().strip()

    def answer() -> str | None:
        asked = {"model": "tiny-stdlib", "prompt": "def main():", "max_tokens": 8, "temperature": 0}
        headers = {"Authorization": f"Bearer {key}"}
        try:
            found = httpx.post(f"{deployment['url']}/v1/completions", json=asked, headers=headers, timeout=600)
            return str(found.json()["choices"][0]["text"]) if found.status_code == 200 else None
        except (httpx.HTTPError, KeyError):
            return None

    first = answer()
    assert first
    listed = rankwise("deployments", cwd=tmp_path, RANKWISE_DATA=str(tmp_path / "data"))
    assert listed.returncode == 0 and "slurm:lab" in listed.stdout and "ready" in listed.stdout
    node = lab.slurm("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    lab.on_node(node, "pkill", "-KILL", "-f", f"engine.serving.http.main {path.parent}")
    wait_until(lambda: ServiceState.model_validate_json(path.read_bytes()).starts > before.starts, 60, "a second start")
    wait_until(lambda: answer() == first, 120, "the same answer again")
    down = rankwise("undeploy", "served", cwd=tmp_path, RANKWISE_DATA=str(tmp_path / "data"))
    assert down.returncode == 0, down.stdout + down.stderr
    nothing_left(lab, tmp_path)


def test_a_server_has_the_memory_of_its_node_whatever_jobs_get_unless_they_ask(lab: Lab, tmp_path: Path) -> None:
    target = SlurmTarget(partition="lab")
    lab.slurm("scontrol", "update", "PartitionName=lab", "DefMemPerNode=64")
    try:
        submit_service(target, "rw-serve-memory", ["sleep", "600"], tmp_path, minutes=2)
        wait_until(lambda: (job := service_job("rw-serve-memory", target)) and job.node, 60, "the job")
        shown = lab.slurm("scontrol", "--oneliner", "show", "job", lab.queue()[0])
    finally:
        end_service("rw-serve-memory", target)
        each = lab.plan.memory_per_node_megabytes // lab.plan.cores_per_node  # as slurm.conf has it
        lab.slurm("scontrol", "update", "PartitionName=lab", f"DefMemPerCPU={each}")
    assert re.search(rf"TRES=\S*\bmem={lab.plan.memory_per_node_megabytes}M\b", shown), shown


def test_a_partition_that_cannot_serve_is_named(lab: Lab, access: Access, tmp_path: Path) -> None:
    """An unknown partition, a folder that is none, and nodes that accept no key; nothing is left."""
    done = deploy(tmp_path, access, target="slurm:nowhere")
    assert done.returncode == 1 and "no such partition" in done.stderr and "lab" in done.stderr
    done = deploy(tmp_path, access, "--folder", "relative")
    assert done.returncode == 2 and "--folder: got relative" in done.stderr
    empty = tmp_path / "empty"
    empty.write_text("")
    done = deploy(tmp_path, Access(access.key, empty))
    assert done.returncode == 1 and "no SSH tunnel" in done.stderr and "Host key verification failed" in done.stderr
    nothing_left(lab, tmp_path)
