"""Giving back by a stand-in for a cloud: a full disk, and machines that are listed late."""

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks.providers import leases, renting
from tasks.providers.giving_back import Teardown
from tasks.providers.ladder import RentalOffer
from tasks.providers.leases import open_ledger, read_entries
from tasks.providers.readiness.waiting import Limits
from tasks.providers.rental import Node, Provider, RentalLease, Resource
from tasks.providers.renting import give_back_run, rent
from tests.support.clouds.stand_in import NODES, REGION, REQUEST, Cloud, rental, resource


def full_disk(monkeypatch: pytest.MonkeyPatch, begins_with: bytes = b"") -> None:
    """Nothing can be written any more, from the first line that holds these bytes on."""
    full = False

    def refuse(handle: int, data: bytes) -> int:
        nonlocal full
        full = full or begins_with in data
        if not full:
            return os.write(handle, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(leases, "os", SimpleNamespace(**vars(os) | {"write": refuse}))


def test_nodes_are_given_back_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, cloud = rental(tmp_path / "r", int(time.time()) + 60), Cloud(resource("instance"), resource("disk"))
    full_disk(monkeypatch)
    assert give_back_run(cast(Provider, cloud), lease, tmp_path / "r", lambda _: None, Teardown()) == 2
    assert cloud.there == []


def test_nodes_are_given_back_where_the_disk_is_full_when_they_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = Cloud()

    def climb(renting_: Any, rungs: Any) -> list[Node]:
        renting_.ledger.write("prepare", region=REGION)
        cloud.there.append(resource("instance"))
        return NODES

    monkeypatch.setattr(renting._Renting, "climb", climb)
    full_disk(monkeypatch, b'"ready"')
    lease = RentalLease(study="s", run="r", owner="o", expires_at=int(time.time()) + 60, request=REQUEST)
    with pytest.raises(OSError, match="No space left"):
        rent(cast(Provider, cloud), lease, RentalOffer([], []), tmp_path / "r", lambda _: None, Limits())
    assert cloud.there == []


def test_machines_that_are_listed_late_are_given_back(tmp_path: Path) -> None:
    """AWS may leave an instance out of a list for some seconds after the create call has named it."""

    class Late(Cloud):
        asked = 0

        def tagged(self, regions: Sequence[str], run: str | None = None) -> list[Resource]:
            self.asked += 1
            found = super().tagged(regions, run)
            return found if self.asked > 2 else [each for each in found if each.kind != "instance"]

    lease, cloud = rental(tmp_path / "r", int(time.time()) + 60), Late(resource("instance"), resource("placement"))
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("create", token="t", region=REGION)
        ledger.write("created", token="t", region=REGION, ids=["instance-r"])
    patience = Teardown(sleep=lambda _: None)
    assert give_back_run(cast(Provider, cloud), lease, tmp_path / "r", lambda _: None, patience) == 2
    assert cloud.there == [] and read_entries(tmp_path / "r" / "ledger.jsonl")[-1]["event"] == "given_back"


def test_machines_that_are_gone_are_not_waited_for_when_lists_have_settled(tmp_path: Path) -> None:
    lease, cloud = rental(tmp_path / "r", int(time.time()) + 60), Cloud()
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("created", token="t", region=REGION, ids=["instance-r"])
    patience = Teardown(settle_seconds=0, limit_seconds=0)
    assert give_back_run(cast(Provider, cloud), lease, tmp_path / "r", lambda _: None, patience) == 0


def test_a_clock_that_was_set_back_does_not_keep_giving_back_from_its_end(tmp_path: Path) -> None:
    lease, cloud = rental(tmp_path / "r", int(time.time()) + 60), Cloud(resource("instance"))
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("create", token="unanswered", region=REGION)
        later = ledger.path.read_text().replace('"epoch": ', '"epoch": 9')  # in the future
        ledger.path.write_text(later)
    patience = Teardown(limit_seconds=5, settle_seconds=0.2)
    assert give_back_run(cast(Provider, cloud), lease, tmp_path / "r", lambda _: None, patience) == 1
