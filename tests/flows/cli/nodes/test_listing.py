"""`rankwise list-nodes` without any cloud's credentials."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.nodes.listing import _partition, _rented_node
from slurm.schedulers.commands.listing import read_partitions
from tasks.providers.rental import Resource


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")


def test_the_list_is_printed_and_written(tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    result = CliRunner().invoke(app, ["list-nodes", "--output", str(file)])
    assert result.exit_code == 0, result.output
    nodes = json.loads(file.read_text())["nodes"]
    assert nodes[0]["kind"] == "local" and nodes[0]["vcpus"] >= 1
    priced = {node["name"]: node["usd_per_hour"] for node in nodes if node["kind"] == "instance"}
    assert priced["aws/g4dn.xlarge"] == 0.526 and {name.partition("/")[0] for name in priced} == {"aws", "gcp", "azure"}
    assert "aws: not searched: Unable to locate" in result.output  # no silence about what was not looked at


def test_the_filter_selects_instances() -> None:
    result = CliRunner().invoke(app, ["list-nodes", "--hardware-filter", "GPU:T4+, price<=0.53"])
    assert result.exit_code == 0 and "aws/g4dn.xlarge" in result.stdout
    assert "g5.xlarge" not in result.stdout and "local" not in result.stdout
    wrong = CliRunner().invoke(app, ["list-nodes", "--hardware-filter", "T4"])
    assert wrong.exit_code == 2 and "expected GPU:T4" in wrong.output


@pytest.mark.parametrize(
    ("resources", "listed"),
    [
        (["gpu:h100:8(S:0-1)", "gpu:h100:4,lustre:1"], (4, "h100")),
        (["gpu:a100:2,gpu:h100:2", "(null)"], (4, "a100 or h100")),
        (["gpu:8"], (8, "GPU")),
        (["(null)", "lustre:1"], (0, None)),
    ],
)
def test_a_partition_has_the_gpus_of_its_nodes(resources: list[str], listed: tuple[int, str | None]) -> None:
    """Each was listed, and written to the file, with none and without memory."""
    lines = [f"gpu|gpu*|n{number}|64|512000|{each}|1-00:00:00|idle|up|x" for number, each in enumerate(resources)]
    found = _partition(read_partitions("\n".join(lines))["gpu"])
    assert (found.accelerators, found.accelerator) == listed
    assert (found.nodes, found.vcpus, found.host_memory_bytes) == (len(resources), 64, 512000 << 20)


def test_memory_that_a_cluster_does_not_name_is_not_listed() -> None:
    """sinfo prints 1 MB where slurm.conf sets no RealMemory."""
    nodes = [f"batch|batch*|n{number}|64|{memory}|(null)|infinite|idle|up|x" for number, memory in ((1, 1), (2, 1))]
    assert _partition(read_partitions("\n".join(nodes))["batch"]).host_memory_bytes is None
    nodes.append("batch|batch*|n3|64|512000|(null)|infinite|idle|up|x")
    assert _partition(read_partitions("\n".join(nodes))["batch"]).host_memory_bytes == 512000 << 20


@pytest.mark.parametrize(
    ("detail", "name", "state"),
    [("g5.xlarge running", "aws/g5.xlarge", "running, run r"), ("", "aws/i-1", "run r")],  # Azure lists neither
)
def test_a_rented_machine_is_named_by_what_its_cloud_lists(detail: str, name: str, state: str) -> None:
    machine = Resource(provider="aws", kind="instance", id="i-1", region="us-east-1", run="r", detail=detail)
    assert (_rented_node(machine).name, _rented_node(machine).state) == (name, state)
