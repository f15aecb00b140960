"""What Azure's requests say and what its refusals mean, without a server."""

import base64
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError, ResourceNotFoundError

from tasks.providers.azure.errors import call_azure
from tasks.providers.azure.provider import Azure
from tasks.providers.azure.requests import machine, refuse_retired
from tasks.providers.giving_back import Teardown, why_doomed
from tasks.providers.leases import open_ledger
from tasks.providers.readiness.waiting import Limits
from tasks.providers.rental import Node, ProviderError, RentalLease, RentalRequest, Rung
from tasks.providers.renting import RentalFailed, _Renting, plan_rental

REQUEST = RentalRequest(
    provider="azure", instance="Standard_NC24ads_A100_v4", nodes=2, regions=("eastus",), ssh_from="203.0.113.7/32"
)
LEASE = RentalLease(study="s", run="r", owner="o", expires_at=int(time.time()) + 3600, request=REQUEST)
BOOT = '#cloud-config\n{"ssh_authorized_keys": ["ssh-ed25519 AAAA"]}\n'


def test_a_missing_subscription_is_named_and_storage_cannot_rent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_SUBSCRIPTION_ID", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=secret")
    with pytest.raises(ProviderError, match=r"storage account and cannot rent\. Set AZURE_SUBSCRIPTION_ID") as caught:
        Azure().identity()
    assert caught.value.problem == "auth" and "secret" not in str(caught.value)


def test_missing_clients_are_told_in_one_sentence() -> None:
    code = "import sys; sys.modules['azure.identity'] = None; from tasks.providers.clouds import provider_named as p\n"
    code += "try: p('azure')\nexcept ValueError as error: print(error)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'rankwise[azure]'" in said.stdout and said.stdout.count("\n") == 1


def test_a_retired_size_is_refused_with_what_follows_it() -> None:
    with pytest.raises(ProviderError, match=r"NC6s_v3: retired .* on 2025-09-30\. Use azure/Standard_NC24ads_A100_v4"):
        refuse_retired("Standard_NC6s_v3")
    refuse_retired("Standard_NC4as_T4_v3")
    with pytest.raises(RentalFailed, match="retired"):
        plan_rental(Azure(), REQUEST.model_copy(update={"instance": "Standard_NC12s_v3"}), None)


def test_everything_of_a_spot_machine_ends_with_it() -> None:
    made = machine(LEASE, BOOT, Rung(region="eastus", zone="2", market="spot"), "/g/providers", "n", "ubuntu")
    properties = made["properties"]
    assert (properties["priority"], properties["evictionPolicy"], made["zones"]) == ("Spot", "Delete", ["2"])
    interface = properties["networkProfile"]["networkInterfaceConfigurations"][0]
    address = interface["properties"]["ipConfigurations"][0]["properties"]["publicIPAddressConfiguration"]
    for each in (properties["storageProfile"]["osDisk"], interface["properties"], address["properties"]):
        assert each["deleteOption"] == "Delete"
    assert made["tags"] == interface["tags"] == address["tags"] == LEASE.tags
    assert base64.b64decode(properties["osProfile"]["customData"]).decode() == BOOT
    assert properties["proximityPlacementGroup"]["id"].endswith("/rankwise-r")


def test_on_demand_has_no_limit_and_no_eviction() -> None:
    made = machine(LEASE, BOOT, Rung(region="eastus"), "/g/providers", "n", "ubuntu")
    assert "priority" not in made["properties"] and "zones" not in made


@pytest.mark.parametrize("image", ["ubuntu", "a:b:c"])
def test_an_image_that_is_neither_urn_nor_id_is_refused(image: str) -> None:
    lease = LEASE.model_copy(update={"request": REQUEST.model_copy(update={"image": image})})
    with pytest.raises(ProviderError, match="publisher:offer:sku:version"):
        machine(lease, BOOT, Rung(region="eastus"), "/g/providers", "n", "ubuntu")


@pytest.mark.parametrize(
    ("code", "message", "status", "problem"),
    [
        ("SkuNotAvailable", "", 409, "capacity"),
        ("ZonalAllocationFailed", "", 200, "capacity"),
        ("OverconstrainedAllocationRequest", "", 409, "capacity"),
        ("OperationNotAllowed", "exceeding approved Total Regional Cores quota", 409, "quota"),
        ("OperationNotAllowed", "the disk is attached", 409, "invalid"),
        ("TooManyRequests", "", 429, "throttled"),
        ("", "", 503, "transient"),
        ("InternalExecutionError", "An internal execution error occurred. Please retry later.", 200, "transient"),
        ("NetworkingInternalOperationError", "Unknown network allocation error.", 200, "transient"),
        ("ExpiredAuthenticationToken", "", 401, "auth"),
        ("InvalidParameter", "", 400, "invalid"),
    ],
)
def test_refusals_by_code(code: str, message: str, status: int, problem: str) -> None:
    class Body:
        """What a response of the client says."""

        status_code, reason = status, ""
        headers: dict[str, str] = {}
        request = None

        def text(self, encoding: str | None = None) -> str:
            return json.dumps({"error": {"code": code, "message": message}} if code else {})

        body = text

    def refuse() -> None:
        raise HttpResponseError(response=Body())  # type: ignore[arg-type]

    with pytest.raises(ProviderError) as caught:
        call_azure(refuse)
    assert caught.value.problem == problem and caught.value.code == code


class Response:
    """A refusal for too many requests."""

    status_code, code, reason, request, headers = 429, "TooManyRequests", "", None, dict[str, str]()

    def text(self, encoding: str | None = None) -> str:
        return json.dumps({"error": {"code": self.code, "message": "wait"}})

    body = text


class NotFound(Response):
    """Of a resource that is gone."""

    status_code, code = 404, "ResourceNotFound"


def test_what_was_made_before_a_throttled_request_is_kept_for_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was deleted and made again, which takes minutes, more requests, and is throttled anew."""
    asked: list[str] = []
    throttled = [True]

    def put(group: str, name: str, wanted: Any) -> Any:
        if asked and throttled:
            throttled.clear()
            raise HttpResponseError(response=Response())  # type: ignore[arg-type]
        asked.append(name)
        return SimpleNamespace(wait=lambda seconds: None, done=lambda: True, result=lambda: None)

    machines = SimpleNamespace(list=lambda group: [], begin_create_or_update=put)
    monkeypatch.setenv("AZURE_SUBSCRIPTION_ID", "s")
    monkeypatch.setattr(Azure, "_compute", SimpleNamespace(virtual_machines=machines))
    monkeypatch.setattr(Azure, "nodes", lambda *_: [])
    azure, rung = Azure(), Rung(region="eastus")
    with pytest.raises(ProviderError, match="TooManyRequests"):
        azure.create(LEASE, BOOT, rung, "token-of-8")
    assert len(azure.create(LEASE, BOOT, rung, "token-of-8")) == 2
    assert asked == ["node-token-of-0", "node-token-of-0", "node-token-of-1"], "and none was deleted"


def test_nodes_are_known_again_where_azure_lists_their_group_in_capitals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its compute service does, and names have no case: nodes that had just come up were deleted as strangers."""
    inside = "/subscriptions/s/resourceGroups/RANKWISE-R-EASTUS/providers"
    types = {"node-0": "Microsoft.Compute/virtualMachines", "disk-0": "Microsoft.Compute/disks"}
    listed = [
        SimpleNamespace(id=f"{inside}/{type}/{name}", name=name, type=type, location="eastus", tags=LEASE.tags)
        for name, type in types.items()
    ]
    group = SimpleNamespace(id="/subscriptions/s/resourceGroups/rankwise-r-eastus", name="rankwise-r-eastus",
                            location="eastus", tags=LEASE.tags)  # fmt: skip
    resources = SimpleNamespace(
        resource_groups=SimpleNamespace(list=lambda filter: [group]),
        resources=SimpleNamespace(list=lambda filter: listed, list_by_resource_group=lambda name: listed),
    )
    deleted: list[str] = []
    monkeypatch.setattr(Azure, "_resources", resources)
    for other in ("_compute", "_network"):  # asked for nothing: a disk of the run's own group ends with the group
        monkeypatch.setattr(Azure, other, SimpleNamespace())
    azure = Azure()
    found = {each.kind: each for each in azure.tagged(["eastus"], "r")}
    made = Node(id="rankwise-r-eastus/node-0", region="eastus", state="running")
    assert found["instance"].id == made.id
    azure.delete(found["disk"])
    monkeypatch.setattr(Azure, "delete", lambda azure, resource: deleted.append(resource.id))
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("create", provider="azure", region="eastus", token="t")
        ledger.write("created", region="eastus", token="t", ids=[made.id])
        limits = Limits(teardown=Teardown(settle_seconds=0))
        renting = _Renting(azure, LEASE, tmp_path / "r", ledger, print, limits, 1)
        renting._remove_others(Rung(region="eastus"), [made])
    assert deleted == []


def test_what_was_left_in_another_group_is_found_with_its_tags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Azure's list of resources by their tags leaves these out, so that nothing was known to be expired."""
    inside = "/subscriptions/s/resourceGroups/Others/providers/Microsoft.Compute/disks"
    listed = [
        SimpleNamespace(id=f"{inside}/{name}", name=name, type="Microsoft.Compute/disks", location="eastus", tags=None)
        for name in ("lost", "gone")
    ]
    own = {f"{inside}/lost": LEASE.model_copy(update={"expires_at": 7}).tags}

    def get_at_scope(id: str) -> Any:
        if id not in own:
            raise ResourceNotFoundError("ResourceNotFound", response=NotFound())  # type: ignore[arg-type]
        return SimpleNamespace(properties=SimpleNamespace(tags=own[id]))

    resources = SimpleNamespace(
        resource_groups=SimpleNamespace(list=lambda filter: []),
        resources=SimpleNamespace(list=lambda filter: listed),
        tags=SimpleNamespace(get_at_scope=get_at_scope),
    )
    monkeypatch.setattr(Azure, "_resources", resources)
    for run in (None, "r"):
        lost, gone = Azure().tagged(["eastus"], run)
        assert (lost.id, lost.run, lost.owner, lost.expires_at) == ("others/lost", "r", "o", 7)
        assert why_doomed(lost, tmp_path, False, time.time()) and why_doomed(gone, tmp_path, True, time.time()) is None


def test_a_group_that_has_lost_its_tags_is_removed_with_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in a run's own group ends with it alone."""
    inside = "/subscriptions/s/resourceGroups/RANKWISE-R-EASTUS/providers/Microsoft.Compute/disks"
    disk = SimpleNamespace(id=f"{inside}/d", name="d", type="Microsoft.Compute/disks", location="eastus", tags=None)
    resources = SimpleNamespace(
        resource_groups=SimpleNamespace(list=lambda filter: []),
        resources=SimpleNamespace(list=lambda filter: [disk]),
        tags=SimpleNamespace(get_at_scope=lambda id: SimpleNamespace(properties=SimpleNamespace(tags=LEASE.tags))),
    )
    monkeypatch.setattr(Azure, "_resources", resources)
    found = {each.kind: (each.id, each.run) for each in Azure().tagged(["eastus"], "r")}
    assert found == {"disk": ("rankwise-r-eastus/d", "r"), "group": ("rankwise-r-eastus", "r")}
