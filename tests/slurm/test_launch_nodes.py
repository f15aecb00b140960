"""The launcher on two hosts at once, as Slurm starts it: what nodes agree on, and that nothing is left on either.

Two hosts are made of namespaces on this machine (`two_hosts`); Slurm itself is met in the tests of the lab.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.common.execution import Engine, Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import JobEnd, Launcher, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.targets.target import SlurmTarget
from configs.workloads.generate import GenerateWorkload
from engine.models.weights import build_model
from engine.parallel.grid import Grid
from tests.support.cluster.launches import (
    assert_nothing_left,
    in_measurement,
    launch,
    leftovers,
    noop_measurement,
    part,
    read_job,
    wait_until,
    write_job,
)
from tests.support.cluster.two_hosts import NAMES, TwoHosts, node_ends, why_not
from tests.support.training.memory_models import save_model

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with TwoHosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def spread(measurement: Measurement) -> Measurement:
    """The same measurement of a cell that has two nodes."""
    cell = measurement.cell.model_copy(update={"nodes": 2, "target": "slurm"})
    return measurement.model_copy(update={"cell": cell})


def write_spread_job(
    folder: Path, measurements: list[Measurement], target: SlurmTarget | None = None, **rules: float
) -> JobPaths:
    """A job of two nodes for a Slurm target."""
    paths = write_job(folder, [spread(measurement) for measurement in measurements], **rules)
    job = read_job(paths.folder)
    ranks = job.cell.layout.ranks // 2
    changed = job.model_copy(update={"target": target or SlurmTarget(nodes=2), "ranks_per_node": ranks})
    paths.job.write_text(changed.model_dump_json())
    return paths


def agreed(ends: list[JobEnd]) -> JobEnd:
    """What both nodes say."""
    first, second = (end.model_copy(update={"return_code": None, "finished_at": ""}) for end in ends)
    assert first == second
    return first


def test_both_nodes_take_part(hosts: TwoHosts, tmp_path: Path) -> None:
    measurements = [noop_measurement("one", ranks=2), noop_measurement("two", ranks=2)]
    paths = write_spread_job(tmp_path, measurements)
    assert agreed(hosts.launch(paths)).status is Status.COMPLETED
    for measurement in map(spread, measurements):
        assert [part(paths, measurement, rank).host for rank in (0, 1)] == list(NAMES)
    environment = part(paths, spread(measurements[0]), 0).environment
    assert environment["hostname"] == NAMES[0]
    assert environment["variables"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert [part(paths, spread(measurements[0]), rank).figures["machine_cores"] for rank in (0, 1)] == [1, 1]
    for place, name in enumerate(NAMES):
        launcher = Launcher.model_validate_json(paths.node_launcher(place).read_bytes())
        assert (launcher.node_rank, launcher.host) == (place, name)
    assert not paths.end.exists() and not paths.launcher.exists(), "these are the adapter's"
    assert leftovers(paths.folder) == []


@pytest.mark.slow
def test_ranks_are_numbered_by_node(hosts: TwoHosts, tmp_path: Path) -> None:
    measurements = [noop_measurement("four", ranks=4)]
    paths = write_spread_job(tmp_path, measurements)
    assert agreed(hosts.launch(paths)).status is Status.COMPLETED
    assert [part(paths, spread(measurements[0]), rank).host for rank in range(4)] == [NAMES[0]] * 2 + [NAMES[1]] * 2


def test_hosts_do_not_believe_that_they_share_memory(hosts: TwoHosts) -> None:
    code = "import engine.parallel.peers as peers; print(peers.host_key())"
    keys = [hosts.run(place, sys.executable, "-c", code) for place in (0, 1, 0)]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2], "ranks of one host do"


@pytest.mark.nightly
def test_memory_pass_on_two_nodes(hosts: TwoHosts, tmp_path: Path) -> None:
    measurements = [noop_measurement("large", ranks=2, allocate_bytes=2**24), noop_measurement("small", ranks=2)]
    paths = write_spread_job(tmp_path, measurements, memory=True)
    assert agreed(hosts.launch(paths)).status is Status.COMPLETED
    assert all(
        part(paths, spread(measurement), rank).status is Status.COMPLETED
        for measurement in measurements
        for rank in (0, 1)
    )


@pytest.mark.slow
def test_a_killed_rank_ends_both_nodes(hosts: TwoHosts, tmp_path: Path) -> None:
    measurements = [noop_measurement("fine", ranks=2), noop_measurement("killed", ranks=2, fault="kill", fault_rank=1)]
    paths = write_spread_job(tmp_path, measurements)
    end = agreed(hosts.launch(paths))
    assert (end.status, end.measurement, end.rank, end.kind) == (
        Status.FAILED,
        spread(measurements[1]).name,
        1,
        "SIGKILL",
    )
    assert end.message == "rank 1 was killed by SIGKILL"
    assert end.nodes == (), "the node is not to blame"
    assert part(paths, spread(measurements[0]), 1).status is Status.COMPLETED
    assert leftovers(paths.folder) == []


@pytest.mark.nightly
def test_an_exception_on_one_node_ends_the_other(hosts: TwoHosts, tmp_path: Path) -> None:
    measurement = spread(noop_measurement("raises", ranks=2, fault="raise", fault_rank=1))
    paths = write_spread_job(tmp_path, [measurement])
    end = agreed(hosts.launch(paths))
    assert (end.status, end.measurement, end.rank, end.kind) == (Status.FAILED, measurement.name, 1, "RuntimeError")
    assert leftovers(paths.folder) == []


@pytest.mark.nightly
def test_a_hanging_rank_is_named_by_both(hosts: TwoHosts, tmp_path: Path) -> None:
    measurement = spread(noop_measurement("hangs", ranks=2, fault="hang", fault_rank=1))
    paths = write_spread_job(tmp_path, [measurement], group_timeout_seconds=10)
    end = agreed(hosts.launch(paths))
    assert (end.status, end.measurement, end.rank, end.kind) == (Status.TIMEOUT, measurement.name, 1, "PeerLost")
    assert "noop.py" in paths.rank_log(1).read_text(), "the stack says where the rank hung"


@pytest.mark.slow
def test_sigterm_on_one_node_ends_both(hosts: TwoHosts, tmp_path: Path) -> None:
    measurement = spread(noop_measurement("hangs", ranks=2, fault="hang"))
    paths = write_spread_job(tmp_path, [measurement])
    launchers = hosts.start(paths)
    wait_until(in_measurement(paths, measurement, 0), "rank 0 to hang")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        os.kill(launcher_pid(paths, 0), number)
    os.kill(launcher_pid(paths, 1), signal.SIGTERM)
    assert [launcher.wait(600) for launcher in launchers] == [0, 0]
    end = agreed(node_ends(paths))
    assert (end.status, end.measurement) == (Status.CANCELLED, measurement.name)
    assert leftovers(paths.folder) == []


def launcher_pid(paths: JobPaths, place: int) -> int:
    return Launcher.model_validate_json(paths.node_launcher(place).read_bytes()).pid


def test_a_lost_launcher_is_a_lost_node(hosts: TwoHosts, tmp_path: Path) -> None:
    measurement = spread(noop_measurement("hangs", ranks=2, fault="hang", fault_rank=1))
    paths = write_spread_job(tmp_path, [measurement])
    launchers = hosts.start(paths)
    wait_until(in_measurement(paths, measurement, 1), "rank 1 to hang")
    os.kill(launcher_pid(paths, 1), signal.SIGKILL)
    launchers[0].wait(600)
    end = JobEnd.model_validate_json(paths.node_end(0).read_bytes())
    assert (end.status, end.kind, end.nodes) == (Status.NODE_FAILED, "NodeLost", (NAMES[1],))
    assert not paths.node_end(1).exists()
    assert_nothing_left(paths.folder)


@pytest.mark.slow
def test_a_cut_link_is_noticed_on_both_nodes(hosts: TwoHosts, tmp_path: Path) -> None:
    measurement = spread(noop_measurement("hangs", ranks=2, fault="hang", fault_rank=0))
    paths = write_spread_job(tmp_path, [measurement], group_timeout_seconds=300)
    launchers = hosts.start(paths)
    wait_until(in_measurement(paths, measurement, 0), "rank 0 to hang")
    hosts.run(1, "ip", "link", "set", "eth0", "down")
    try:
        assert [launcher.wait(600) for launcher in launchers] == [0, 0]
    finally:
        hosts.run(1, "ip", "link", "set", "eth0", "up")
    ends = node_ends(paths)
    assert [end.kind for end in ends] == ["NodeLost", "HeadLost"]
    assert {end.status for end in ends} == {Status.NODE_FAILED}
    assert ends[1].nodes == (NAMES[1],), "it sees that its own link is down"
    assert "its link (eth0) is down" in (ends[1].message or "")
    assert leftovers(paths.folder) == []


@pytest.mark.nightly
def test_a_launcher_ends_with_the_process_that_started_it(hosts: TwoHosts, tmp_path: Path) -> None:
    measurement = spread(noop_measurement("hangs", ranks=2, fault="hang"))
    paths = write_spread_job(tmp_path, [measurement])
    shells = hosts.start(paths, below_a_shell=True)
    wait_until(in_measurement(paths, measurement, 0), "rank 0 to hang")
    assert os.getsid(launcher_pid(paths, 0)) == os.getsid(0), "a signal to srun's tasks reaches it"
    for shell in shells:
        shell.kill()
        shell.wait()
    wait_until(paths.node_end(0).exists, "the launcher to end", limit_seconds=15)
    wait_until(paths.node_end(1).exists, "the other launcher to end", limit_seconds=15)
    ends = node_ends(paths)
    assert [end.status for end in ends] == [Status.NODE_FAILED] * 2, "nobody asked for it"
    assert [end.nodes for end in ends] == [("east1",), ("east2",)]
    assert_nothing_left(paths.folder)


def test_wrong_number_of_nodes(hosts: TwoHosts, tmp_path: Path) -> None:
    paths = write_job(tmp_path, [noop_measurement("alone")])
    job = read_job(paths.folder).model_copy(update={"target": SlurmTarget()})
    paths.job.write_text(job.model_dump_json())
    (end,) = {agreed(hosts.launch(paths)).message}
    assert end == "the launcher failed: nodes: got 2 from Slurm (east1, east2), expected 1"


@pytest.mark.nightly
def test_a_node_that_does_not_come_is_named(hosts: TwoHosts, tmp_path: Path) -> None:
    paths = write_spread_job(tmp_path, [noop_measurement("a", ranks=2)])
    (launcher,) = hosts.start(paths, 0)
    assert launcher.wait(600) == 0
    end = JobEnd.model_validate_json(paths.node_end(0).read_bytes())
    assert (end.status, end.kind, end.nodes) == (Status.NODE_FAILED, "NodeMissing", (NAMES[1],))


def test_a_folder_that_is_not_seen_on_a_node(hosts: TwoHosts, tmp_path: Path) -> None:
    paths = JobPaths(tmp_path / "jobs" / "elsewhere")
    (launcher,) = hosts.start(paths, 0)
    assert launcher.wait(600) == 3


@pytest.mark.slow
def test_answers_across_nodes_are_those_of_one_rank(hosts: TwoHosts, tmp_path: Path) -> None:
    """Tensor and pipeline parallelism over the cable, and both with two ranks on each host; weights from files."""
    write_manifest(tmp_path)
    alone = answers(tmp_path, "alone", Layout(), None)
    for name, layout in (("tensor", Layout(tp=2)), ("pipeline", Layout(pp=2)), ("both", Layout(tp=2, pp=2))):
        spread_out = answers(tmp_path, name, layout, hosts)
        np.testing.assert_array_equal(spread_out["answer_tokens"], alone["answer_tokens"])
        np.testing.assert_allclose(spread_out["answer_nll"], alone["answer_nll"], rtol=1e-4)
        np.testing.assert_allclose(spread_out["answer_logits"], alone["answer_logits"], atol=1e-4)


@pytest.mark.slow
def test_deepspeed_answers_across_nodes_like_one_rank(hosts: TwoHosts, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    write_manifest(tmp_path)
    alone = answers(tmp_path, "alone", Layout(), None)
    spread_out = answers(tmp_path, "deepspeed", Layout(tp=2), hosts, "deepspeed")
    np.testing.assert_array_equal(spread_out["answer_tokens"], alone["answer_tokens"])
    np.testing.assert_allclose(spread_out["answer_logits"], alone["answer_logits"], atol=1e-4)


def write_manifest(folder: Path) -> None:
    """A small model with random weights in files, and its manifest."""
    config = ARCHITECTURES["llama-1m"]
    made = ModelManifest(identity="synthetic:llama-1m@7", source="synthetic", folder="", files={}, config=config)
    model = folder / "model"
    model.mkdir()
    save_model(build_model(made, torch.float32, torch.device("cpu"))[0], config, model, torch.float32)
    manifest = ModelManifest(identity="folder:0", source="folder", folder=str(model), files={}, config=config)
    (folder / "manifest.json").write_text(manifest.model_dump_json())


def answers(
    folder: Path, name: str, layout: Layout, hosts: TwoHosts | None, engine: Engine = "rankwise"
) -> dict[str, np.ndarray]:
    """What the rank that speaks for the replica answers, on two hosts or in one process here."""
    cell = Cell(
        model="folder:0",
        workload=GenerateWorkload(num_prompts=2, batch_size=2, prompt_tokens=12, new_tokens=4, answers=True),
        layout=layout,
        nodes=1 if hosts is None else 2,
        engine=engine,
    )
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    paths = write_job(folder, [measurement], name=name)
    job = read_job(paths.folder).model_copy(update={"manifest": str(folder / "manifest.json")})
    if hosts is not None:
        target = SlurmTarget(nodes=2)
        job = job.model_copy(update={"target": target, "ranks_per_node": layout.ranks // 2})
    paths.job.write_text(job.model_dump_json())
    end = launch(paths) if hosts is None else agreed(hosts.launch(paths))
    assert end.status is Status.COMPLETED, end
    parts = [part(paths, measurement, rank) for rank in range(layout.ranks)]
    assert all(each.status is Status.COMPLETED for each in parts)
    if hosts is not None and engine == "rankwise":
        transport = "pipeline_transport" if layout.pp > 1 else "tensor_transport"
        assert parts[0].environment[transport] == "gloo"
    speaker = next(rank for rank in range(layout.ranks) if Grid.of(layout, rank).reports_results)
    with np.load(paths.samples(measurement.name, speaker)) as archive:
        return {column: archive[column] for column in archive.files}


@pytest.mark.nightly
def test_deepspeeds_launcher_on_two_nodes(hosts: TwoHosts, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    target = SlurmTarget(nodes=2, launcher="deepspeed")
    measurements = [noop_measurement("one", ranks=2), noop_measurement("two", ranks=2)]
    paths = write_spread_job(tmp_path / "fine", measurements, target)
    assert agreed(hosts.launch(paths)).status is Status.COMPLETED
    assert [part(paths, spread(measurements[1]), rank).host for rank in (0, 1)] == list(NAMES)

    measurement = spread(noop_measurement("killed", ranks=2, fault="kill", fault_rank=1))
    paths = write_spread_job(tmp_path / "killed", [measurement], target)
    end = agreed(hosts.launch(paths))
    assert (end.status, end.measurement, end.rank, end.kind) == (Status.FAILED, measurement.name, 1, "SIGKILL")
    assert leftovers(tmp_path) == []
