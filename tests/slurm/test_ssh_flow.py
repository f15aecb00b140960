"""Studies through Prefect to hosts with SSH servers and networks of their own: measured, adopted, cancelled, faulty."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.records.record import Record, read_record
from flows.server.local import ApiLease, lease_server
from tests.support.cluster.ssh_hosts import SshTestHosts, ssh_hosts
from tests.support.run_folders.studies import (
    job_count,
    rankwise,
    start,
    status,
    under_measurement,
    wait_until,
    write_study,
)

pytestmark = pytest.mark.slurm

START_SECONDS = 200.0
LONG = {"kind": "noop", "seconds": 12.0}
ONE_CELL = {"grid": {"kind": "sweep", "over": {"label": ["a"]}}}
GANG = {"pair": {"kind": "sweep", "over": {"label": ["a"]}, "base": {"dp": 2, "items": 2}}}


@pytest.fixture(scope="module", autouse=True)
def api() -> Iterator[ApiLease]:
    """One local server for all runs of this file."""
    with lease_server() as lease:
        lease.wait_until_healthy()
        yield lease


@pytest.fixture(scope="module")
def all_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTestHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts") / "h") as made:
        yield made


@pytest.fixture
def hosts(all_hosts: SshTestHosts) -> Iterator[SshTestHosts]:
    """Two hosts that are up, and on which nothing is left when a test is over."""
    yield all_hosts
    left = [line for host in all_hosts.hosts for line in host.job_processes()]
    all_hosts.restore()
    assert left == []


def records(run: Path) -> list[Record]:
    """All attempts, oldest first."""
    found = [read_record(path) for path in run.glob("records/*/*.json")]
    return sorted(found, key=lambda record: (record.job, record.position))


def measured(folder: Path, hosts: SshTestHosts, **changes: Any) -> tuple[Path, Path]:
    """A study of these hosts, and its run folder."""
    target = hosts.target(**changes.pop("target", {}))
    return write_study(folder, targets=[target], **changes), folder / "runs" / "s"


def ended(process: "Any", seconds: float = 200) -> str:
    """What a run said that came to its end."""
    process.wait(timeout=seconds)
    return Path(process.args[2]).parent.joinpath("out.log").read_text()


def test_generating_and_training_over_two_hosts_is_reported(hosts: SshTestHosts, tmp_path: Path) -> None:
    """Tensor parallel over the hosts' network, and data-parallel training; each cell on both, and nothing left."""
    generate = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4, "num_prompts": 2, "batch_size": 2}
    train = {"kind": "train", "global_batch_size": 4, "sequence_length": 32, "steps": 3}
    experiments = {
        "tensors": {"kind": "optimization", "baseline": {}, "variants": {"tp=2": {"tp": 2}}},
        "training": {"kind": "strong", "grow": "dp", "to": 2, "base": {"workload": train}},
    }
    study, run = measured(
        tmp_path, hosts, models=[{"id": "synthetic:llama-1m@7"}], workload=generate, experiments=experiments,
        measuring={"warmup": 1, "min_seconds": 0.1, "min_passes": 2, "cell_timeout_seconds": 120},
    )  # fmt: skip
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["status"], row["attempts"]) for row in status(run)] == [("completed", 1)] * 4
    pairs = [record for record in records(run) if record.cell.nodes == 2]
    assert {record.cell.workload.kind for record in pairs} == {"generate", "train"}
    assert all(sorted(record.hosts) == ["gpu-a", "gpu-b"] for record in pairs)
    report = run / "report.md"
    assert "tp=2 on 2 nodes" in report.read_text() and "lab" in report.with_name("appendix.md").read_text()
    assert not [path for host in hosts.hosts for path in host.disk.glob("runs/*/jobs/*")], "job folders are removed"


def test_a_killed_run_is_adopted_and_nothing_is_measured_again(hosts: SshTestHosts, tmp_path: Path) -> None:
    study, run = measured(tmp_path, hosts, workload=LONG, experiments=GANG)
    first = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement", seconds=START_SECONDS)
    first.kill()
    first.wait()
    jobs = job_count(run)
    assert all(host.job_processes() for host in hosts.hosts), "the hosts go on by themselves"
    said = ended(second := start("run", study, cwd=tmp_path))
    assert second.returncode == 0 and "adopted 0001" in said, said
    assert [(row["status"], row["attempts"]) for row in status(run)] == [("completed", 1)]
    assert job_count(run) == jobs


def test_ctrl_c_ends_everything_on_the_hosts(hosts: SshTestHosts, tmp_path: Path) -> None:
    study, run = measured(tmp_path, hosts, workload=LONG | {"seconds": 60.0}, experiments=GANG)
    process = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement", seconds=START_SECONDS)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=600)
    assert [host.job_processes() for host in hosts.hosts] == [[], []]
    assert [record.status for record in records(run)] == ["cancelled"]


def test_a_job_that_could_not_be_ended_is_found_by_the_next_run(hosts: SshTestHosts, tmp_path: Path) -> None:
    """Ctrl-C while one host cannot be reached: that is told; the next run finds how it ended, and nothing is left."""
    study, run = measured(tmp_path, hosts, workload=LONG | {"seconds": 40.0}, experiments=GANG)
    first = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement", seconds=START_SECONDS)
    hosts["b"].kill_sshd()
    first.send_signal(signal.SIGINT)
    said = " ".join(ended(first).split())
    assert "may still run" in said and "gpu-b" in said, said
    assert not list(run.glob("jobs/*/end.json"))
    hosts["b"].start_sshd()
    said = ended(start("run", study, cwd=tmp_path))
    assert "adopted 0001" in said
    assert [row["status"] for row in status(run)] == ["cancelled"], said
    assert [host.job_processes() for host in hosts.hosts] == [[], []]


def test_a_wrong_or_unknown_host_key_is_refused_by_name(hosts: SshTestHosts, tmp_path: Path) -> None:
    keys = hosts.known_hosts.read_text().splitlines()
    hosts.known_hosts.write_text(f"{keys[0]}\n{keys[1].split()[0]} {hosts['a'].host_key}\n")
    study, run = measured(tmp_path, hosts)
    done = rankwise("run", study, cwd=tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "targets[0].hosts: gpu-b: host key not accepted" in said, said
    assert "gpu-a:" not in said and not list(run.glob("jobs/*"))
    hosts.known_hosts.write_text(f"{keys[0]}\n")
    done = rankwise("run", study, cwd=tmp_path)
    assert "gpu-b: host key not accepted" in " ".join((done.stdout + done.stderr).split())


def test_a_host_that_is_away_is_named_before_anything_is_measured(hosts: SshTestHosts, tmp_path: Path) -> None:
    hosts["b"].kill_sshd()
    study, run = measured(tmp_path, hosts)
    done = rankwise("run", study, cwd=tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "targets[0].hosts: gpu-b: not reached" in said, said
    assert not list(run.glob("jobs/*"))


def test_a_dropped_connection_loses_nothing(hosts: SshTestHosts, tmp_path: Path) -> None:
    """The SSH server of one host is killed for 30 s in mid-measurement, with all that serves connections."""
    study, run = measured(tmp_path, hosts, workload=LONG | {"seconds": 20.0}, experiments=GANG)
    process = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement", seconds=START_SECONDS)
    hosts["b"].kill_sshd()
    time.sleep(30.0)
    hosts["b"].start_sshd()
    said = ended(process)
    assert process.returncode == 0, said
    assert [(row["status"], row["attempts"]) for row in status(run)] == [("completed", 1)]


def test_a_host_that_stays_away_is_named_and_the_others_are_ended(hosts: SshTestHosts, tmp_path: Path) -> None:
    study, run = measured(
        tmp_path, hosts, workload=LONG | {"seconds": 60.0}, experiments=GANG,
        target={"lost_after_seconds": 6.0, "retries": 0},
    )  # fmt: skip
    process = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement", seconds=START_SECONDS)
    hosts["b"].kill_sshd()
    said = ended(process)
    (record,) = records(run)
    assert record.status == "node_failed" and record.failure is not None
    assert "host gpu-b could not be reached" in record.failure.message, said
    assert hosts["a"].job_processes() == []
    hosts["b"].start_sshd()  # what nobody can reach ends when its peers are gone
    wait_until(lambda: hosts["b"].job_processes() == [], what="the end of the job on gpu-b", seconds=60)


def test_a_host_that_crashes_is_named_and_the_measurement_tried_again(hosts: SshTestHosts, tmp_path: Path) -> None:
    study, run = measured(tmp_path, hosts, workload=LONG, experiments=GANG, target={"lost_after_seconds": 60.0})
    process = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement", seconds=START_SECONDS)
    hosts["b"].crash()
    wait_until(lambda: job_count(run) == 2, what="another attempt", seconds=120)
    hosts["b"].boot()
    said = ended(process)
    assert process.returncode == 0, said
    first, second = records(run)
    assert (first.status, second.status) == ("node_failed", "completed")
    assert first.failure is not None and "gpu-b" in first.failure.message


def test_two_runs_never_measure_beside_each_other(hosts: SshTestHosts, tmp_path: Path) -> None:
    """Of two runs on the same hosts, one that names them the other way round: neither waits for ever, none overlaps."""
    spans, running = [], []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        target = {"hosts": hosts.target()["hosts"][:: 1 if name == "one" else -1]}
        study, run = measured(folder, hosts, workload=LONG | {"seconds": 4.0}, experiments=GANG, target=target)
        running.append((start("run", study, cwd=folder), run))
    for process, run in running:
        said = ended(process)
        assert process.returncode == 0, said
        (record,) = records(run)
        assert record.status == "completed" and record.attempt == 1
        spans.append((record.started_at, record.finished_at))
    (_, first_end), (second_start, _) = sorted(spans, key=str)
    assert first_end is not None and second_start is not None and first_end <= second_start


def test_a_shared_folder_is_used_and_nodes_are_tested_before(hosts: SshTestHosts, tmp_path: Path) -> None:
    """Jobs and code lie in a folder that hosts and this machine see; the preflight's job goes the same way."""
    shared = tmp_path / "shared"
    shared.mkdir()
    study, run = measured(tmp_path, hosts, experiments=GANG, target={"shared": str(shared), "preflight": True})
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record.status for record in records(run)] == ["completed"]
    (tested,) = json.loads((run / "preflight.json").read_text())["targets"]
    assert {node["node"] for node in tested["nodes"]} == {"gpu-a", "gpu-b"} and len(tested["pairs"]) == 1
    assert list((shared / "rankwise" / "envs").iterdir()) and not list(hosts["a"].disk.glob("runs/*/jobs/*"))


def test_a_full_disk_is_told_before_and_while_measuring(hosts: SshTestHosts, tmp_path: Path) -> None:
    """Too small a disk is named before anything is measured; one that is filled later, by the host and the error."""
    hosts["b"].crash()
    hosts["b"].disk_bytes = 32 << 20
    hosts["b"].boot()
    study, run = measured(tmp_path, hosts, experiments=GANG)
    done = rankwise("run", study, cwd=tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert "targets[0].hosts: gpu-b: 0.0 GiB free" in said and not list(run.glob("jobs/*")), said
    hosts["b"].crash()
    hosts["b"].disk_bytes = 300 << 20
    hosts["b"].boot()
    study, run = measured(tmp_path, hosts, experiments=GANG, workload=LONG, target={"retries": 0})
    process = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement", seconds=START_SECONDS)
    filled = ["sh", "-c", f"cat /dev/zero > {hosts.base}/node/ballast; true"]
    assert psutil.Popen(hosts["b"].inside(*filled), stderr=-3).wait(600) == 0
    said = ended(process)
    (record,) = records(run)
    assert record.status == "failed" and record.failure is not None
    assert "No space left on device" in json.dumps(record.model_dump(mode="json")), said
