"""The JSON file of `rankwise benchmark`, as seed documents write it, and what its nodes become."""

import json
from pathlib import Path

import pytest

from configs.targets.rented import RentedTarget
from configs.targets.target import LocalTarget, SshTarget
from flows.cli.benchmark import BenchmarkRequest, _targets
from tasks.planning.benchmark_file import BenchmarkFile, read_benchmark_file, region_of_zone

WRITTEN = {
    "nodes": [
        {"id": "local", "type": "local", "name": "Local Node"},
        {
            "id": "aws-g4dn-xlarge",
            "type": "aws",
            "name": "AWS G4dn Xlarge",
            "instance_type": "g4dn.xlarge",
            "region": "us-west-2",
        },
        {"id": "lab", "type": "ssh", "host": "gpu-a", "user": "bench"},
    ],
    "benchmark_defaults": {"repeats": 3, "batch_sizes": [1, 2, 4, 8], "timeout_seconds": 600},
    "cloud_defaults": {
        "aws": {"region": "us-west-2", "instance_type": "g4dn.xlarge"},
        "gcp": {"zone": "us-central1-a", "machine_type": "n1-standard-4"},
        "azure": {"location": "eastus", "vm_size": "Standard_NC6s_v3"},
    },
}


def read(tmp_path: Path, **changes: object) -> BenchmarkFile:
    path = tmp_path / "my_config.json"
    path.write_text(json.dumps(WRITTEN | changes))
    return read_benchmark_file(path)


def test_true_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"benchmark_defaults\.repeats: expected a number, got true$"):
        read(tmp_path, benchmark_defaults={"repeats": True})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": [{"id": "a", "type": "aws", "instance_type": "g5.xlarge", "vm_size": "g6.xlarge"}]},
         "instance_type and vm_size are one thing"),
        ({"nodes": [{"id": "a", "type": "azure", "vm_size": "Standard_D2s_v5", "region": "eastus", "location": "uk"}]},
         "region and location are one thing"),
        ({"cloud_defaults": {"gcp": {"machine_type": "g2-standard-4", "instance_type": "n1-standard-4"}}},
         "instance_type and machine_type are one thing"),
    ],
)  # fmt: skip
def test_one_thing_under_two_names_is_refused(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    """The first won, without a word: another machine was rented than the file names last."""
    with pytest.raises(ValueError, match=f"{said}. Leave one out"):
        read(tmp_path, **changes)


def test_nodes_become_targets(tmp_path: Path) -> None:
    file = read(tmp_path)
    assert file.target("local") == LocalTarget()
    named = file.target("aws-g4dn-xlarge")
    assert isinstance(named, RentedTarget)
    assert (named.kind, named.instance, named.regions) == ("aws", "g4dn.xlarge", ["us-west-2"])
    spelled = file.target("gcp:n1-standard-4-t4")
    assert isinstance(spelled, RentedTarget)
    assert (spelled.instance, spelled.regions, spelled.zones) == (
        "n1-standard-4+t4",
        ["us-central1"],
        ["us-central1-a"],
    )
    lab = file.target("lab")
    assert isinstance(lab, SshTarget) and lab.hosts[0].host == "gpu-a" and lab.hosts[0].user == "bench"
    other = file.target("ssh:gpu-b")
    assert isinstance(other, SshTarget) and other.hosts[0].host == "gpu-b"


@pytest.mark.parametrize(
    ("own", "defaults", "regions", "zones"),
    [
        ({"zone": "europe-west1-b"}, {"region": "us-central1"}, "europe-west1", ["europe-west1-b"]),
        ({"region": "us-east1"}, {"zone": "us-central1-a"}, "us-east1", []),
        ({"region": "us-central1"}, {"zone": "us-central1-a"}, "us-central1", ["us-central1-a"]),
        ({}, {"region": "us-east1", "zone": "us-east1-b"}, "us-east1", ["us-east1-b"]),
    ],
)
def test_a_node_elsewhere_keeps_no_default_of_another_region(
    own: dict[str, str], defaults: dict[str, str], regions: str, zones: list[str], tmp_path: Path
) -> None:
    node = {"id": "x", "type": "gcp", "machine_type": "n1-standard-4"} | own
    target = read(tmp_path, nodes=[node], cloud_defaults={"gcp": defaults}).target("x")
    assert isinstance(target, RentedTarget) and (target.regions, target.zones) == ([regions], zones)


def test_unknown_nodes_and_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a provider and an instance"):
        read(tmp_path).target("nowhere")
    with pytest.raises(ValueError, match="repeat"):
        read(tmp_path, benchmark_defaults={"repeat": 3})
    with pytest.raises(ValueError, match=r"no instance_type, and none in cloud_defaults\.aws"):
        read(tmp_path, nodes=[{"id": "x", "type": "aws"}], cloud_defaults={}).target("x")


@pytest.mark.parametrize(
    ("node", "field"),
    [
        ({"type": "aws", "instance_type": "g4dn.xlarge", "user": "ec2-user"}, "user"),
        ({"type": "ssh", "host": "gpu-a", "instance_type": "g4dn.xlarge"}, "instance_type"),
        ({"type": "local", "python": "/opt/torch/bin/python"}, "python"),
    ],
)
def test_fields_that_a_type_of_node_does_not_use_are_refused(node: dict[str, str], field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"nodes.0.?: x\.{field}: not a field of nodes of type {node['type']}\."):
        read(tmp_path, nodes=[{"id": "x"} | node])


@pytest.mark.parametrize(
    ("cloud", "zone", "region"),
    [("gcp", "us-central1-a", "us-central1"), ("aws", "us-east-1a", "us-east-1"), ("azure", "1", None)],
)
def test_the_region_of_a_zone(cloud: str, zone: str, region: str | None) -> None:
    assert region_of_zone(cloud, zone) == region  # type: ignore[arg-type]


def test_the_region_of_a_filter_is_where_its_instance_is_rented(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The price that it was chosen for is of that region; the file's own is of instances that --nodes names."""
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path))
    file = read(tmp_path, nodes=[])
    for more, region in ((", region=us-east-1", "us-east-1"), ("", "us-west-2")):
        asked = BenchmarkRequest(models=["t5-small"], hardware_filter=f"GPU:T4, provider=aws{more}")
        (target,) = _targets(asked, file)
        assert isinstance(target, RentedTarget) and (target.kind, target.regions) == ("aws", [region])


def test_of_instances_without_a_price_none_is_called_the_cheapest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A region that is misspelled has no price either."""
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path))
    asked = BenchmarkRequest(models=["t5-small"], hardware_filter="GPU:T4, provider=aws, region=us-wst-2")
    with pytest.raises(ValueError, match=r"no price of them is known in us-wst-2, so that none is the cheapest"):
        _targets(asked, read(tmp_path, nodes=[]))
