"""What is ended and given back of a deployment, whatever of it is away."""

from typing import Any

import pytest

from configs.targets.target import SshTarget
from tasks.deployment import taking_down
from tasks.deployment.places import PlaceError
from tasks.deployment.store import Store
from tasks.deployment.taking_down import take_down
from tasks.providers.giving_back import LeftBehind
from tasks.providers.leases import open_ledger
from tasks.providers.rental import ProviderError, RentalLease, RentalRequest
from tests.support.servers.stand_in_deployments import RemoteHost, deployed


def test_servers_of_a_killed_deployment_are_ended_on_its_hosts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = SshTarget.model_validate({"kind": "ssh", "name": "lab", "hosts": ["gpu-a", "gpu-b"]})
    with open_ledger(store.folder("killed")) as ledger:
        ledger.write("deploying")
        ledger.write("hosts", hosts=hosts.model_dump_json(), folder="deployments/killed-5e1f")
        ledger.write("placing", generation=1, number=0)
    monkeypatch.setattr(RemoteHost, "asked", [])
    monkeypatch.setattr(taking_down, "SshPlace", RemoteHost)
    assert take_down(store, "killed", print) == 0.0
    root = "/home/me/deployments/killed-5e1f"
    assert RemoteHost.asked == [
        f"{host}: {what}" for host in ("gpu-a", "gpu-b") for what in (f"end_job {root}/servers/1", f"remove {root}")
    ]
    assert not store.folder("killed").exists()


def test_nodes_are_given_back_though_the_ledgers_line_is_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = deployed(store)
    store.save(made.model_copy(update={"rental": "run-1"}))
    request = RentalRequest(provider="aws", instance="g4dn.xlarge", regions=("us-east-1",), ssh_from="203.0.113.7/32")
    lease = RentalLease(study="deploy-one", run="run-1", owner="me", expires_at=4_000_000_000, request=request)
    (store.rented / "run-1").mkdir(parents=True)
    (store.rented / "run-1" / "lease.json").write_text(lease.model_dump_json())
    given_back: list[str] = []
    monkeypatch.setattr(taking_down, "provider_named", lambda _: None)
    monkeypatch.setattr(taking_down, "give_back_run", lambda provider, lease, *_: given_back.append(lease.run))
    take_down(store, "one", print)
    assert given_back == ["run-1"]


def test_what_cannot_be_given_back_keeps_nothing_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rental that was left behind kept the next one up, at its price, and the partition's jobs."""
    request = RentalRequest(provider="aws", instance="g4dn.xlarge", regions=("us-east-1",), ssh_from="203.0.113.7/32")
    with open_ledger(store.folder("two")) as ledger:
        for run in ("run-1", "run-2", "run-3"):
            lease = RentalLease(study="d", run=run, owner="me", expires_at=4_000_000_000, request=request)
            (store.rented / run).mkdir(parents=True)
            (store.rented / run / "lease.json").write_text(lease.model_dump_json())
            ledger.write("renting", rental=run)
        ledger.write("slurm", partition="gpu")
    asked: list[str] = []

    def give_back_run(provider: Any, lease: RentalLease, *_: Any) -> None:
        asked.append(lease.run)
        if lease.run == "run-1":
            raise LeftBehind(lease.run, ["aws instance i-1"], ["us-east-1: throttled"])
        if lease.run == "run-2":
            raise ProviderError("auth", "AuthFailure", "no such key")

    def clear_partition(*_: Any) -> list[str]:
        asked.append("partition")
        return ["gpu: away"]

    monkeypatch.setattr(taking_down, "provider_named", lambda _: None)
    monkeypatch.setattr(taking_down, "give_back_run", give_back_run)
    monkeypatch.setattr(taking_down, "_clear_partition", clear_partition)
    with pytest.raises(LeftBehind) as raised:
        take_down(store, "two", print)
    assert asked == ["run-1", "run-2", "run-3", "partition"]
    assert raised.value.left == ["aws instance i-1"]
    for words in ("run-1, run-2:", "aws instance i-1", "us-east-1: throttled", "AuthFailure: no such key", "gpu: away"):
        assert words in str(raised.value)
    assert store.folder("two").exists()


def test_a_server_that_does_not_end_keeps_no_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(RemoteHost):
        def ask(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
            super().ask(operation, body, **arguments)
            return {"left": [77] if str(arguments.get("folder")).endswith("servers/1") else []}, b""

    hosts = SshTarget.model_validate({"kind": "ssh", "name": "lab", "hosts": ["gpu-a"]})
    with open_ledger(store.folder("stuck")) as ledger:
        ledger.write("deploying")
        ledger.write("hosts", hosts=hosts.model_dump_json(), folder="deployments/stuck-1")
        ledger.write("numbers", first=1, last=2)
    monkeypatch.setattr(RemoteHost, "asked", [])
    monkeypatch.setattr(taking_down, "SshPlace", Stubborn)
    with pytest.raises(PlaceError, match=r"gpu-a: processes 77 of .*servers/1 could not be ended"):
        take_down(store, "stuck", print)
    # Its folder stays, in which the next `undeploy` finds it.
    assert RemoteHost.asked == [f"gpu-a: end_job /home/me/deployments/stuck-1/servers/{number}" for number in (1, 2)]
