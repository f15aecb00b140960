"""`rankwise nodes` and `rankwise reap` as a user types them, on EC2's API over HTTP with real machines behind."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from tests.support.clouds import hosts
from tests.support.clouds.aws import FakeAws

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]
UP = ["nodes", "up", "aws-g4dn.xlarge", "--region", "us-east-1", "--ssh-from", "203.0.113.7/32"]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAws]:
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    with FakeAws(tmp_path) as made:
        yield made


def invoke(*arguments: str, code: int = 0, answer: str = "") -> str:
    result = CliRunner().invoke(app, list(arguments), input=answer)
    assert result.exit_code == code, result.output
    return result.output


def test_up_list_ssh_extend_down_reap(cloud: FakeAws) -> None:
    refused = invoke(*UP, "--max-usd-per-hour", "0.1", "--yes", code=1)
    assert "0.53 USD/h exceeds the cap of 0.1 USD/h" in refused
    assert "nothing was rented" in invoke(*UP, code=1, answer="n\n")
    assert cloud.count("RunInstances") == 0

    said = invoke(*UP, "--study", "My Study", "--yes")
    assert "0.53 USD/h first (us-east-1, any zone, on demand)" in said and "GPU" not in said
    found = re.search(r"^run (my-study-[0-9a-f]{8})$", said, re.MULTILINE)
    assert found is not None
    run = found[1]
    assert re.search(rf"rented +aws/g4dn.xlarge .* running, run {run}", invoke("list-nodes"))
    listed = invoke("nodes", "list")
    assert run in listed and "g4dn.xlarge running" in listed
    printed = json.loads(CliRunner().invoke(app, ["nodes", "list", "--json"]).stdout)
    [machine] = [each for each in printed["resources"] if each["kind"] == "instance"]
    assert machine["run"] == run and machine["expires_at"] > time.time() and printed["problems"] == []
    invoke("nodes", "ssh", run, "--", "true")
    invoke("nodes", "ssh", run, "--node", "1", code=1)
    invoke("nodes", "extend", run, "--hours", "2")
    assert "kept: aws instance" in invoke("reap")
    assert len(cloud.hosts.running()) == 1

    assert "nothing is left" in invoke("nodes", "down", run)
    assert cloud.left() == []
    invoke("nodes", "down", "no-such-run", code=2)
    assert "removed 0, kept 0" in invoke("reap", "--all")


def test_a_node_whose_driver_shows_no_gpu_is_named(cloud: FakeAws) -> None:
    cloud.hosts.faults.append({"gpus": 0})
    said = invoke(*UP, "--run", "bare", "--yes")
    assert re.search(
        r"^node 0 shows 0 of 1 GPU: .*nvidia-smi.*not found\. Its driver does not work", said, re.MULTILINE
    )
    assert len(cloud.hosts.running()) == 1  # somebody may want to see why
    assert "nothing is left" in invoke("nodes", "down", "bare")
