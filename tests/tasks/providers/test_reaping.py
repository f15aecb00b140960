"""What `reap` removes and what it keeps: tags, ledgers, and runs of other machines."""

import errno
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.providers import leases, study_nodes
from tasks.providers.giving_back import why_doomed
from tasks.providers.leases import in_use, is_dead, open_ledger, read_entries
from tasks.providers.rental import ProviderError, Resource
from tests.support.clouds.stand_in import REGION, Cloud, reap, rental, resource


def test_a_run_that_was_extended_outlives_a_tag_with_its_old_end(tmp_path: Path) -> None:
    cloud = Cloud(resource("instance"), resource("placement", left=-5), resource("disk", "other", left=-5))
    swept = reap(cloud, tmp_path)
    assert [each.id for each in swept.removed] == ["disk-other"] and len(swept.kept) == 2
    assert [each.id for each in cloud.there] == ["instance-r", "placement-r"]


def test_what_was_extended_while_others_were_removed_is_kept(tmp_path: Path) -> None:
    class Extended(Cloud):
        def delete(self, resource: Resource) -> None:
            super().delete(resource)
            self.there = [each.model_copy(update={"expires_at": int(time.time()) + 60}) for each in self.there]

    cloud = Extended(resource("instance", "a", left=-5), resource("instance", "b", left=-5))
    swept = reap(cloud, tmp_path)
    assert [each.id for each in cloud.there] == ["instance-b"]
    assert [each.run for each, _ in swept.doomed] == ["a"] and [each.run for each, _ in swept.kept] == ["b"]


@pytest.mark.parametrize("refusal", ["folder", "permission"])
def test_a_ledger_that_cannot_be_read_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """As that of nodes that were rented with sudo: other runs' nodes stayed up, and were paid for."""
    ledger = tmp_path / "damaged" / "ledger.jsonl"
    ledger.mkdir(parents=True)
    if refusal == "permission":  # root may read anything
        read = leases.read_entries

        def refused(path: Path) -> list[dict[str, Any]]:
            if path == ledger:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return read(path)

        monkeypatch.setattr(leases, "read_entries", refused)
    cloud = Cloud(resource("instance", "damaged"), resource("disk", "damaged"), resource("instance", "b", left=-5))
    swept = reap(cloud, tmp_path)
    assert [each.id for each in swept.removed] == ["instance-b"]
    assert [each.id for each, _ in swept.kept] == ["instance-damaged", "disk-damaged"]
    said = "Permission denied" if refusal == "permission" else "is a folder, expected a file"
    assert swept.problems == [f"run damaged: whether it has ended is not known: {ledger}: {said}"]


def test_a_run_of_another_machine_that_rents_anew_is_not_taken_for_dead(tmp_path: Path) -> None:
    cloud = Cloud(resource("instance", left=-5))
    assert len(reap(cloud, tmp_path).removed) == 1 and (tmp_path / "r").is_dir()
    assert not is_dead(tmp_path / "r")
    cloud.there = [resource("instance")]  # it goes on under the same name
    assert reap(cloud, tmp_path).removed == [] and len(cloud.there) == 1


def test_a_run_is_not_called_given_back_while_one_of_its_regions_does_not_answer(tmp_path: Path) -> None:
    class Silent(Cloud):
        silent = True

        def regions(self) -> list[str]:
            return [REGION, "eu-west-1"]

        def tagged(self, regions: Sequence[str], run: str | None = None) -> list[Resource]:
            if self.silent and "eu-west-1" in regions:
                raise ProviderError("unreachable", "", "no answer")
            return super().tagged(regions, run)

    far = resource("instance", left=-5).model_copy(update={"region": "eu-west-1", "id": "i-far"})
    cloud = Silent(resource("instance", left=-5), far)
    with open_ledger(tmp_path / "r") as ledger:
        for region, name in ((REGION, "instance-r"), ("eu-west-1", "i-far")):
            ledger.write("prepare", region=region)
            ledger.write("created", region=region, ids=[name])
    swept = reap(cloud, tmp_path)
    assert [each.id for each in swept.removed] == ["instance-r"] and [each.id for each in cloud.there] == ["i-far"]
    assert "aws instance i-far in eu-west-1" in swept.problems[-1] and "instance-r" not in swept.problems[-1]
    entries = tmp_path / "r" / "ledger.jsonl"
    assert "given_back" not in {entry["event"] for entry in read_entries(entries)}
    cloud.silent = False
    assert [each.id for each in reap(cloud, tmp_path).removed] == ["i-far"]
    assert read_entries(entries)[-1]["event"] == "given_back"


def test_nodes_of_another_machine_outlive_a_run_of_their_name_that_has_ended_here(tmp_path: Path) -> None:
    rental(tmp_path / "r", int(time.time()) + 60)
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("given_back", removed=[])
    theirs = resource("instance").model_copy(update={"owner": "ada-laptop"})
    cloud = Cloud(theirs)
    assert why_doomed(theirs, tmp_path, False, time.time()) is None
    assert reap(cloud, tmp_path).removed == [] and cloud.there == [theirs]
    cloud.there = [resource("disk").model_copy(update={"owner": "o"})]  # appeared after its run had given back
    assert [each.id for each in reap(cloud, tmp_path).removed] == ["disk-r"]


@pytest.mark.parametrize(("later", "everything", "doomed"), [(600, False, False), (600, True, True), (-5, False, True)])
def test_nodes_whose_tags_keep_an_old_end_live_until_the_one_that_they_were_told(
    tmp_path: Path, later: int, everything: bool, doomed: bool
) -> None:
    """`reap` removed the nodes of a run that was measuring on them, where the cloud had not taken their new end."""
    now = time.time()
    folder = tmp_path / "r"
    rental(folder, int(now + later))
    with open_ledger(folder) as ledger:
        ledger.write("opened", attempt=1, expires_at=int(now - 60))
        ledger.write("ready", nodes=[])
        ledger.write("extended", expires_at=int(now + later))
    tagged = resource("instance").model_copy(update={"expires_at": int(now - 60), "owner": "o"})
    with study_nodes.in_use(folder):
        assert (why_doomed(tagged, tmp_path, everything, now) is not None) is doomed
    theirs = tagged.model_copy(update={"owner": "ada-laptop"})
    assert why_doomed(theirs, tmp_path, everything, now) is not None, "of another machine's run the tags are all"


@pytest.mark.parametrize(
    ("expires_at", "run", "everything", "doomed"),
    [
        (10, "r", False, True),
        (1000, "r", False, False),
        (1000, "r", True, True),
        (None, "r", False, False),
        (10, "../elsewhere", False, False),
        (10, "..", False, False),
        (10, "", True, False),
    ],
)
def test_what_is_reaped(tmp_path: Path, expires_at: int | None, run: str, everything: bool, doomed: bool) -> None:
    resource = Resource(provider="aws", kind="disk", id="v", region="us-east-1", run=run, expires_at=expires_at)
    assert (why_doomed(resource, tmp_path, everything, now=100) is not None) is doomed


def test_nodes_of_a_study_that_ended_without_them_are_reaped(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with in_use(folder):
        with open_ledger(folder) as ledger:
            ledger.write("ready", nodes=[])
        assert not is_dead(folder)
        with pytest.raises(ValueError, match="another run"), in_use(folder):
            pass
    assert is_dead(folder)
