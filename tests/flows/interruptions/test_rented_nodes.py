"""Studies on nodes that they rent: each cloud's API over HTTP, real machines with sshd behind each instance.

Each ends with nothing left, seen by listing the server itself.
"""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from configs.plans.paths import RunPaths
from configs.plans.rentals import Rentals
from configs.records.record import Record, Status, read_record
from flows.server.local import ApiLease, lease_server
from tests.support.clouds import hosts
from tests.support.clouds.aws import FakeAws
from tests.support.clouds.azure import FakeAzure
from tests.support.clouds.faults import Fault
from tests.support.clouds.gcp import FakeGcp
from tests.support.run_folders.studies import rankwise, start, under_measurement, wait_until, write_study

pytestmark = [
    pytest.mark.slow,  # those marked nightly too run whole studies for each way to end one
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]
LONG = {"kind": "noop", "seconds": 12.0}
GANG = {"pair": {"kind": "sweep", "over": {"label": ["a", "b"]}, "base": {"dp": 2, "items": 2}}}


@pytest.fixture(scope="module", autouse=True)
def api() -> Iterator[ApiLease]:
    """One local server for all runs of this file."""
    with lease_server() as lease:
        lease.wait_until_healthy()
        yield lease


Cloud = FakeAws | FakeGcp | FakeAzure


@dataclass(frozen=True)
class Words:
    """What a cloud calls its instances, places, calls and refusals; `creates`: create calls for two nodes."""

    cloud: Callable[[Path], Cloud]
    instance: str
    regions: tuple[str, str]
    create: str
    creates: int
    full: str
    end: str
    denied: str


WORDS = {
    "aws": Words(FakeAws, "c7i.xlarge", ("us-east-1", "us-west-2"), "RunInstances", 1,
                 "InsufficientInstanceCapacity", "TerminateInstances", "AuthFailure"),
    "gcp": Words(FakeGcp, "n1-standard-4", ("us-central1", "us-west1"), "instances.bulkInsert", 1,
                 "ZONE_RESOURCE_POOL_EXHAUSTED", "instances.delete", "forbidden"),
    "azure": Words(FakeAzure, "Standard_D4s_v5", ("eastus", "westus2"), "PUT virtualMachines", 2,
                   "AllocationFailed", "DELETE .*", "AuthorizationFailed"),
}  # fmt: skip


@pytest.fixture(
    scope="module", params=["aws", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gcp", "azure"))]
)
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def words(provider: str) -> Words:
    return WORDS[provider]


@pytest.fixture(scope="module")
def all_of_cloud(words: Words, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with words.cloud(tmp_path_factory.mktemp("cloud")) as made:
        yield made


@pytest.fixture
def cloud(all_of_cloud: Cloud) -> Iterator[Cloud]:
    cloud = all_of_cloud
    cloud.faults.clear()
    cloud.hosts.faults.clear()
    cloud.calls.clear()
    yield cloud
    cloud.faults.clear()
    left = cloud.left()
    if left:
        rankwise("reap", "--all", cwd=cloud.folder)
    assert left == []


def rented_study(folder: Path, provider: str, **changes: Any) -> tuple[Path, RunPaths]:
    """A study of two rented nodes, and its run folder."""
    words = WORDS[provider]
    target = {
        "kind": provider, "name": "rented", "instance": words.instance, "nodes": 2, "regions": list(words.regions),
        "ssh_from": "203.0.113.7/32", "python": sys.prefix, "max_usd_per_hour": 5, "preflight": False,
    } | changes.pop("target", {})  # fmt: skip
    study = write_study(folder, targets=[target], **changes)
    return study, RunPaths(folder / "runs" / "s")


def records(run: RunPaths) -> list[Record]:
    return [read_record(path) for path in sorted(run.records.glob("*/*.json"))]


def rentals(run: RunPaths) -> Rentals:
    return Rentals.model_validate_json(run.rentals.read_bytes())


@pytest.mark.nightly
def test_training_on_two_rented_nodes_is_reported_and_given_back(
    cloud: Cloud, provider: str, words: Words, tmp_path: Path
) -> None:
    """No spot capacity anywhere: the ladder goes on, and the report says so."""
    cloud.faults.append(Fault(words.create, code=words.full, market="spot"))
    train = {"kind": "train", "global_batch_size": 4, "sequence_length": 32, "steps": 3}
    study, run = rented_study(
        tmp_path, provider, models=[{"id": "synthetic:llama-1m@7"}], workload=train,
        target={"market": "spot", "fall_back": "on_demand", "preflight": True},
        experiments={"training": {"kind": "strong", "grow": "dp", "to": 2}},
        measuring={"warmup": 1, "min_seconds": 0.1, "min_passes": 2, "cell_timeout_seconds": 120},
    )  # fmt: skip
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cloud.left() == []
    made = records(run)
    assert {record.status for record in made} == {Status.COMPLETED}
    assert max(len(record.hosts) for record in made) == 2
    (rental,) = rentals(run).rentals
    problems = [attempt.problem for attempt in rental.attempts]
    assert len(problems) > 1 and problems[-1] is None and all("capacity" in str(said) for said in problems[:-1])
    assert rental.attempts[-1].market == "on_demand" and rental.attempts[-1].seconds > 0
    assert not rental.up and rental.left == () and rental.usd is not None and rental.usd > 0
    report = run.report.read_text().replace("\\_", "_")
    assert "## Rented nodes" in report and "on demand" in report
    assert words.full in report


@pytest.mark.slow
def test_a_killed_run_is_gone_on_with_on_its_nodes(cloud: Cloud, provider: str, words: Words, tmp_path: Path) -> None:
    """And they stay up for the time that the target says, which `reap` respects."""
    study, run = rented_study(
        tmp_path, provider, workload=LONG, experiments=GANG, measuring={"repeats": 1}, target={"keep": "10m"}
    )
    first = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run.folder), 200, "a measurement")
    first.send_signal(signal.SIGKILL)
    first.wait()
    nodes = cloud.hosts.running()
    assert len(nodes) == 2
    assert "its run has ended" in rankwise("reap", "--dry-run", cwd=tmp_path).stdout
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cloud.count(words.create) == words.creates, "the nodes were rented once"
    made = records(run)
    assert len(made) == 2 and {record.status for record in made} == {Status.COMPLETED}, "nothing was measured twice"
    (rental,) = rentals(run).rentals
    assert cloud.hosts.running() == nodes and rental.up and rental.kept_until is not None
    assert "They stay up until " in run.report.read_text()
    swept = rankwise("reap", "--dry-run", cwd=tmp_path).stdout
    assert "its run has ended" not in swept and re.search(r"expires in \S+ min\n", swept)
    down = rankwise("nodes", "down", rental.name, cwd=tmp_path)
    assert down.returncode == 0, down.stdout + down.stderr
    assert cloud.left() == []
    again = rankwise("run", study, cwd=tmp_path)
    assert again.returncode == 0 and cloud.count(words.create) == words.creates, "all is measured: nothing is rented"


@pytest.mark.nightly
def test_a_run_that_was_killed_while_renting_is_gone_on_with(
    cloud: Cloud, provider: str, words: Words, tmp_path: Path
) -> None:
    cloud.hosts.faults += [{"boot_seconds": 600}, {"boot_seconds": 600}]
    study, run = rented_study(tmp_path, provider, workload={"kind": "noop", "seconds": 0.01}, measuring={"repeats": 1})
    first = start("run", study, cwd=tmp_path)
    wait_until(lambda: len(cloud.hosts.running()) == 2, 100, "instances")
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cloud.left() == [] and {record.status for record in records(run)} == {Status.COMPLETED}
    assert len(rentals(run).rentals[0].attempts) == 2, "the time of the killed run is told"


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ["renting", "measuring"])
def test_whatever_ends_a_run_gives_its_nodes_back(
    cloud: Cloud, provider: str, words: Words, tmp_path: Path, stage: str
) -> None:
    if stage == "renting":
        cloud.hosts.faults += [{"boot_seconds": 600}, {"boot_seconds": 600}]
    study, run = rented_study(tmp_path, provider, workload=LONG, experiments=GANG, measuring={"repeats": 1})
    process = start("run", study, cwd=tmp_path)
    if stage == "renting":
        wait_until(lambda: len(cloud.hosts.running()) == 2, 100, "instances")
    else:
        wait_until(lambda: under_measurement(run.folder), 200, "a measurement")
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=600)
    assert process.returncode != 0
    assert cloud.left() == []


@pytest.mark.nightly
def test_nodes_that_cannot_be_given_back_are_named(cloud: Cloud, provider: str, words: Words, tmp_path: Path) -> None:
    """The report stands, the exit code tells it, and `reap` removes them once the provider answers."""
    study, run = rented_study(tmp_path, provider, workload={"kind": "noop", "seconds": 0.01}, measuring={"repeats": 1})
    cloud.faults.append(Fault(words.end, code=words.denied))
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT given back" in done.stderr and f"{provider} instance " in done.stderr
    (rental,) = rentals(run).rentals
    assert len(rental.left) >= 2 and "could not be given back" in run.report.read_text()
    cloud.faults.clear()
    reaped = rankwise("reap", cwd=tmp_path)
    assert reaped.returncode == 0, reaped.stdout + reaped.stderr
    assert cloud.left() == []


def test_without_a_cap_or_a_person_nothing_is_rented(cloud: Cloud, provider: str, words: Words, tmp_path: Path) -> None:
    study, _ = rented_study(tmp_path, provider, workload={"kind": "noop"}, target={"max_usd_per_hour": None})
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 1 and "Use --yes, or set max_usd_per_hour" in done.stderr
    study, _ = rented_study(tmp_path, provider, workload={"kind": "noop"}, target={"max_usd_per_hour": 0.01})
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 1 and "exceeds the cap of 0.01 USD/h" in done.stderr
    assert cloud.count(words.create) == 0
