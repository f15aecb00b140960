"""Google's answers as its client gives them: lists of the whole world, and operations that fail."""

from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud import compute_v1 as compute

from tasks.providers.gcp.provider import Gcp
from tasks.providers.gcp.requests import node_names
from tasks.providers.rental import ProviderError, RentalLease, RentalRequest, Rung

LABELS = {"rankwise-run": "r"}
TOKEN = "7d1f0c7f-0000-5000-8000-000000000000"
CONFIG = (
    '#cloud-config\n{"ssh_keys": {"ed25519_private": "", "ed25519_public": ""}, "ssh_authorized_keys": [], '
    '"write_files": [], "runcmd": []}'
)


class Client:
    """A client of any kind, with the pages of its one list."""

    def __init__(self, *pages: Any) -> None:
        self.pages = pages

    def aggregated_list(self, request: Any, retry: None, timeout: float) -> Any:
        return SimpleNamespace(pages=self.pages)

    def list(self, request: Any, retry: None, timeout: float) -> Any:
        return []


def cloud(instances: Client) -> Gcp:
    """Google with this client of instances, and nothing else there."""
    gcp = Gcp()
    gcp._signed_in = (None, "p")
    others = compute.DisksClient, compute.AddressesClient, compute.FirewallsClient, compute.ResourcePoliciesClient
    gcp._clients = {compute.InstancesClient: instances} | dict.fromkeys(others, Client())
    return gcp


def instances(**names: str) -> Any:
    """A page with one instance in each zone."""
    items = {
        f"zones/{zone.replace('_', '-')}": compute.InstancesScopedList(
            instances=[compute.Instance(name=name, status="RUNNING", labels=LABELS, machine_type="n1")]
        )
        for zone, name in names.items()
    }
    return compute.InstanceAggregatedList(items=items)


@pytest.mark.parametrize("told", ["unreachables", "warning"])
def test_a_zone_that_is_out_elsewhere_keeps_no_node_from_being_given_back(told: str) -> None:
    """Every list is about the whole world: one zone's outage failed renting, giving back and `reap` everywhere."""
    page = instances(us_central1_a="n-0", us_west1_b="n-1")
    if told == "unreachables":
        page.unreachables = ["projects/p/zones/asia-east1-b"]
    else:
        silent = compute.InstancesScopedList(warning=compute.Warning(code="UNREACHABLE"))
        page.items = {**page.items, "zones/asia-east1-b": silent}
    gcp = cloud(Client(page))
    assert [node.id for node in gcp.nodes("r", "us-central1")] == ["n-0"]
    assert {each.id for each in gcp.tagged(["us-central1", "us-west1"], "r")} == {"n-0", "n-1"}
    with pytest.raises(ProviderError, match=r"no answer from .*zones/asia-east1-b") as caught:
        gcp.tagged(["asia-east1"], "r")
    assert caught.value.problem == "transient"


class Bulk(Client):
    """Bulk requests whose operations end at once as `errors` say, each for good: a request id names its operation."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__(compute.InstanceAggregatedList())
        self._errors, self._operations = errors, dict[str, Any]()

    def bulk_insert_unary(self, request: Any, retry: None, timeout: float) -> Any:
        if request["request_id"] not in self._operations:
            operation = compute.Operation(status=compute.Operation.Status.DONE)
            if self._errors:
                operation.error = compute.Error(errors=[compute.Errors(code=self._errors.pop(0))])
            self._operations[request["request_id"]] = operation
        return self._operations[request["request_id"]]


@pytest.mark.parametrize("code", ["RESOURCE_OPERATION_RATE_EXCEEDED", "INTERNAL_ERROR"])
def test_an_operation_that_failed_for_now_is_asked_for_again(code: str) -> None:
    """The next tries were answered with the operation that had failed, and the place was given up after a minute."""
    gcp = cloud(Bulk([code]))
    wanted = {"provider": "gcp", "instance": "n2-standard-4", "nodes": 2, "regions": ("us-central1",)}
    request = RentalRequest.model_validate(wanted | {"ssh_from": "203.0.113.7/32"})
    rented = RentalLease(study="s", run="r", owner="o", expires_at=7, request=request)
    rung = Rung(region="us-central1", zone="us-central1-a")
    with pytest.raises(ProviderError, match=code):
        gcp.create(rented, CONFIG, rung, TOKEN)
    made = gcp.create(rented, CONFIG, rung, TOKEN)
    assert len(made) == 2 and made == gcp.create(rented, CONFIG, rung, TOKEN)
    assert not {node.id for node in made} & set(node_names(rented, TOKEN)), "those may not be deleted yet"
