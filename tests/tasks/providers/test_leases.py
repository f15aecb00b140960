"""The ledger of a rental, and the locks by which a run is known to be alive."""

import errno
import fcntl
import os
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.providers import leases
from tasks.providers.giving_back import why_doomed
from tasks.providers.leases import (
    in_use,
    is_dead,
    not_given_back,
    open_ledger,
    read_entries,
    token_of,
    unsettled_seconds,
)
from tasks.providers.rental import RentalLease, Resource, Rung
from tests.support.clouds.stand_in import SPOT_REQUEST


def test_a_line_that_the_disk_cuts_is_an_error_and_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("opened")
        with monkeypatch.context() as nearly_full:
            short = {"write": lambda handle, data: os.write(handle, data[:9])}
            nearly_full.setattr(leases, "os", SimpleNamespace(**vars(os) | short))
            with pytest.raises(OSError, match="No space left"):
                ledger.write("create")
        ledger.write("given_back")
    assert [entry["event"] for entry in read_entries(ledger.path)] == ["opened", "given_back"]
    assert [entry["event"] for entry in ledger.entries] == ["opened", "given_back"]


def test_tokens_are_the_same_again_and_differ_between_attempts_and_rentals() -> None:
    """Of one name, too: a cloud remembers the token of another data folder's rental after its nodes are gone."""
    rung = Rung(region="us-east-1")
    lease = RentalLease(study="s", run="r", owner="o", expires_at=7, request=SPOT_REQUEST)
    assert token_of(lease, 1, rung) == token_of(lease, 1, rung)
    changes = ({"run": "q"}, {"owner": "p"}, {"expires_at": 8})
    others = {token_of(lease.model_copy(update=change), 1, rung) for change in changes}
    others |= {token_of(lease, 2, rung), token_of(lease, 1, Rung(region="us-east-1", market="spot"))}
    assert token_of(lease, 1, rung) not in others and len(others) == 5


def test_a_cut_line_loses_nothing_else(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("opened")
    path = tmp_path / "r" / "ledger.jsonl"
    with path.open("a") as file:
        file.write('{"event": "create", "tok')
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("given_back")
    assert [entry["event"] for entry in read_entries(path)] == ["opened", "given_back"]


def test_an_unanswered_create_call_is_waited_for(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("create", token="a")
        ledger.write("create", token="b")
        ledger.write("refused", token="a")
    entries = read_entries(tmp_path / "r" / "ledger.jsonl")
    asked = entries[1]["epoch"]
    assert unsettled_seconds(entries, asked + 1, 60) == pytest.approx(59)
    assert unsettled_seconds(entries, asked + 60, 60) == pytest.approx(0, abs=1e-3)


def test_a_ledger_has_one_writer_and_its_run_is_alive_meanwhile(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with open_ledger(folder) as ledger:
        ledger.write("opened")
        assert not is_dead(folder)
        with pytest.raises(ValueError, match="another command"), open_ledger(folder):
            pass
    assert is_dead(folder)
    with open_ledger(folder) as ledger:
        ledger.write("ready", nodes=[])
    assert not is_dead(folder)


@pytest.mark.parametrize("last", ["opened", "ready"])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """The message was `No locks available` alone; that its run is alive, or has ended, is not known there."""
    folder = tmp_path / "r"
    with in_use(folder), open_ledger(folder) as ledger:
        ledger.write("opened")
        ledger.write(last, nodes=[])

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    told = f"^{re.escape(str(folder))}: this file system has no locks .* set RANKWISE_DATA to a folder of another one"
    for opened in (open_ledger, in_use):
        with pytest.raises(ValueError, match=told), opened(folder):
            pass
    with pytest.raises(ValueError, match=told):
        is_dead(folder)
    assert not_given_back(tmp_path) == {}
    resource = Resource(provider="aws", kind="disk", id="v", region="us-east-1", run="r", expires_at=1000)
    with pytest.raises(ValueError, match=told):
        why_doomed(resource, tmp_path, False, now=100)


@pytest.mark.parametrize("opened", [open_ledger, in_use])
def test_who_only_looks_keeps_no_command_from_a_rental(
    opened: Callable[[Path], AbstractContextManager[object]], tmp_path: Path
) -> None:
    """`rankwise deployments` or `reap` in a loop ended others with `another command is at work on it`."""
    with opened(tmp_path):
        pass
    [file] = tmp_path.iterdir()
    looking = file.open()
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = threading.Timer(0.05, looking.close)
    timer.start()
    with opened(tmp_path):
        pass
    timer.join()
