"""What is asked of Google Compute Engine, what its refusals mean, and the startup script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import google.api_core.exceptions as failures
import pytest

from configs.targets.rented import MarketName
from tasks.providers.boot import make_keys, startup_script, user_data
from tasks.providers.gcp.errors import operation_failed, translated
from tasks.providers.gcp.requests import (
    accelerator_of,
    firewall_rules,
    gang,
    is_placed,
    node_names,
    tags_as_description,
    tags_in,
)
from tasks.providers.rental import ProviderError, RentalLease, RentalRequest, Rung

TOKEN = "7d1f0c7f-0000-5000-8000-000000000000"


def lease(instance: str = "n1-standard-4+t4", run: str = "demo-1a2b", **wanted: object) -> RentalLease:
    fields = {"nodes": 2, "regions": ("us-central1",), "ssh_from": "203.0.113.7/32", "hours": 2.0, **wanted}
    request = RentalRequest.model_validate({"provider": "gcp", "instance": instance, **fields})
    return RentalLease(study="s", run=run, owner="o", expires_at=7, request=request)


def asked(rented: RentalLease, market: MarketName = "on_demand", zone: str | None = None) -> dict[str, object]:
    config = '#cloud-config\n{"ssh_keys": {"ed25519_private": "", "ed25519_public": ""}, '
    config += '"ssh_authorized_keys": [], "write_files": [], "runcmd": []}'
    rung = Rung(region="us-central1", zone=zone, market=market)
    body = gang(rented, config, rung, TOKEN, "mine")
    assert body["count"] == body["min_count"] == rented.request.nodes
    properties = body["instance_properties"]
    assert isinstance(properties, dict)
    return properties


def test_attached_gpus_end_at_maintenance_and_have_the_vendors_image() -> None:
    properties = asked(lease("n1-standard-8+2xt4"))
    assert properties["machine_type"] == "n1-standard-8"
    assert properties["guest_accelerators"] == [{"accelerator_type": "nvidia-tesla-t4", "accelerator_count": 2}]
    scheduling, disks = properties["scheduling"], properties["disks"]
    assert isinstance(scheduling, dict) and isinstance(disks, list)
    assert scheduling["on_host_maintenance"] == "TERMINATE" and scheduling["provisioning_model"] == "STANDARD"
    assert "deeplearning-platform-release" in disks[0]["initialize_params"]["source_image"]
    assert disks[0]["auto_delete"] and disks[0]["initialize_params"]["labels"]["rankwise-run"] == "demo-1a2b"
    with pytest.raises(ProviderError, match="cannot be attached"):
        accelerator_of("n1-standard-8+h100-80gb")


def test_a_machine_that_the_catalog_does_not_know_is_rented_with_an_image() -> None:
    """It may have GPUs, which cannot be moved at maintenance."""
    properties = asked(lease("e2-standard-8", image="ours"))
    scheduling, disks = properties["scheduling"], properties["disks"]
    assert isinstance(scheduling, dict) and isinstance(disks, list)
    assert scheduling["on_host_maintenance"] == "TERMINATE"
    assert disks[0]["initialize_params"]["source_image"] == "projects/mine/global/images/ours"
    known = asked(lease("n2-standard-8"))["scheduling"]
    assert isinstance(known, dict) and "on_host_maintenance" not in known


@pytest.mark.parametrize("market", ["spot", "on_demand"])
def test_google_ends_the_machine_itself_after_the_switch(market: MarketName) -> None:
    scheduling = asked(lease("n2-standard-4"), market)["scheduling"]
    assert isinstance(scheduling, dict)
    assert scheduling["instance_termination_action"] == "DELETE"
    assert scheduling["max_run_duration"]["seconds"] == 4 * 3600  # twice the rental
    assert (scheduling["provisioning_model"] == "SPOT") == (market == "spot")


def test_project_keys_and_os_login_are_shut_out() -> None:
    metadata = asked(lease())["metadata"]
    assert isinstance(metadata, dict)
    found = {item["key"]: item["value"] for item in metadata["items"]}
    assert (found["block-project-ssh-keys"], found["enable-oslogin"]) == ("TRUE", "FALSE")


@pytest.mark.parametrize(
    ("instance", "disk"),
    [
        ("a3-ultragpu-8g", "hyperdisk-balanced"),
        ("c4-standard-8", "hyperdisk-balanced"),
        ("g4-standard-48", "hyperdisk-balanced"),
        ("g2-standard-4", "pd-balanced"),
        ("a3-megagpu-8g", "pd-balanced"),
    ],
)
def test_a_machine_boots_from_a_disk_of_a_type_that_its_family_takes(instance: str, disk: str) -> None:
    disks = asked(lease(instance))["disks"]
    assert isinstance(disks, list) and disks[0]["initialize_params"]["disk_type"] == disk


def test_private_nodes_have_no_public_address() -> None:
    interfaces = asked(lease(public_address=False))["network_interfaces"]
    assert isinstance(interfaces, list) and "access_configs" not in interfaces[0]


def test_ssh_is_admitted_from_the_caller_only_whatever_the_network_admits() -> None:
    rules = {rule["name"].rpartition("-")[2]: rule for rule in firewall_rules(lease(), "us-central1")}
    assert rules["ssh"]["source_ranges"] == ["203.0.113.7/32"]
    assert rules["others"]["source_ranges"] == ["0.0.0.0/0"] and rules["others"]["denied"]
    assert rules["ssh"]["priority"] == rules["inside"]["priority"] < rules["others"]["priority"] < 1000
    assert len({tuple(rule["target_tags"]) for rule in rules.values()}) == 1


def test_names_fit_and_differ_between_regions_and_attempts() -> None:
    long = lease(run="a" * 50)
    names = [rule["name"] for region in ("us-central1", "us-west1") for rule in firewall_rules(long, region)]
    names += node_names(long, TOKEN) + node_names(long, "other")
    assert len(set(names)) == len(names) and max(map(len, names)) <= 63


def test_a_description_says_what_labels_say() -> None:
    tags = lease().tags
    assert tags_in(tags_as_description(tags, "us-central1")) == (tags, "us-central1")
    assert tags_in("made by hand") == ({}, "")


def test_families_without_compact_placement() -> None:
    assert is_placed(lease("g2-standard-4").request)
    assert not is_placed(lease("n1-standard-4+t4").request)
    with pytest.raises(ProviderError, match="no compact placement"):
        is_placed(lease("n1-standard-4+t4", placement=True).request)


@pytest.mark.parametrize(
    ("codes", "problem"),
    [
        (["ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "VM_MIN_COUNT_NOT_REACHED"], "capacity"),
        (["STOCKOUT"], "capacity"),
        (["VM_MIN_COUNT_NOT_REACHED", "QUOTA_EXCEEDED"], "quota"),
        (["RESOURCE_OPERATION_RATE_EXCEEDED"], "throttled"),
        (["INTERNAL_ERROR"], "transient"),
        (["INVALID_FIELD_VALUE"], "invalid"),
    ],
)
def test_the_gravest_error_of_an_operation_counts(codes: list[str], problem: str) -> None:
    assert operation_failed([(code, "") for code in codes], 400).problem == problem


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (failures.Forbidden("x", errors=[{"reason": "rateLimitExceeded"}]), "throttled"),
        (failures.Forbidden("x", errors=[{"reason": "quotaExceeded"}]), "quota"),
        (failures.Forbidden("x", errors=[{"reason": "forbidden"}]), "auth"),
        (failures.Unauthorized("x"), "auth"),
        (failures.TooManyRequests("x"), "throttled"),
        (failures.ServiceUnavailable("x"), "transient"),
        (failures.BadRequest("x"), "invalid"),
    ],
)
def test_refused_requests(error: Exception, problem: str) -> None:
    with pytest.raises(ProviderError) as caught, translated():
        raise error
    assert caught.value.problem == problem


def test_missing_credentials_are_one_sentence(tmp_path: Path) -> None:
    program = "from tasks.providers.clouds import provider_named; provider_named('gcp').identity()"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GOOGLE", "CLOUDSDK"))}
    environment = clean | {"HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path), "NO_GCE_CHECK": "true"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith(
        "ProviderError: gcp: no credentials. Run `gcloud auth application-default login`, "
        "or set GOOGLE_APPLICATION_CREDENTIALS, and GOOGLE_CLOUD_PROJECT"
    )


def test_the_startup_script_plants_what_the_cloud_config_plants(tmp_path: Path) -> None:
    make_keys(tmp_path)
    config = user_data(tmp_path, 3600)
    script = startup_script(config, "bench")
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
    for file in json.loads(config.partition("\n")[2])["write_files"]:
        assert file["path"] in script
    assert (tmp_path / "host_ed25519").read_text() in script
    assert (tmp_path / "id_ed25519").read_text() not in script
    assert script.index("/ready ] || exit 0") < script.index("remaining_seconds")  # a reboot renews no lease
    assert len(script) < 256 * 1024  # Google's limit of one value
