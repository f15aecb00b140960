"""Google's answers as its client gives them: lists of the whole world, and operations that fail."""

from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud import compute_v1 as compute

from tasks.providers.gcp.provider import Gcp
from tasks.providers.rental import ProviderError

LABELS = {"rankwise-run": "r"}


class Client:
    """A client of any kind, with the pages of its one list."""

    def __init__(self, *pages: Any) -> None:
        self.pages = pages

    def aggregated_list(self, request: Any, retry: None, timeout: float) -> Any:
        return SimpleNamespace(pages=self.pages)

    def list(self, request: Any, retry: None, timeout: float) -> Any:
        return []


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
    gcp = Gcp()
    gcp._signed_in = (None, "p")
    empty = Client()
    gcp._clients = dict.fromkeys(
        (compute.DisksClient, compute.AddressesClient, compute.FirewallsClient, compute.ResourcePoliciesClient), empty
    ) | {compute.InstancesClient: Client(page)}
    assert [node.id for node in gcp.nodes("r", "us-central1")] == ["n-0"]
    assert {each.id for each in gcp.tagged(["us-central1", "us-west1"], "r")} == {"n-0", "n-1"}
    with pytest.raises(ProviderError, match=r"no answer from .*zones/asia-east1-b") as caught:
        gcp.tagged(["asia-east1"], "r")
    assert caught.value.problem == "transient"
