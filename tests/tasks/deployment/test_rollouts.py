"""Rollouts and changes of the number of servers: those that break off, are killed, or follow such a one."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from configs.common.files.reading import read_model
from configs.serving.deployment import (
    FrontConfig,
    LevelCheck,
    OptimizationLevel,
    PlacedServer,
    RoutedServer,
    ServingBundle,
)
from tasks.deployment import bundles, rollouts
from tasks.deployment.bundles import WantedBundle, bundle_name, read_bundle
from tasks.deployment.places import LocalPlace, PlaceError
from tasks.deployment.store import Store
from tasks.providers.leases import open_ledger, read_entries
from tests.support.servers.stand_in_deployments import LosingPlacer, Placer, WorkingFront, deployed


def test_a_rollout_is_kept_where_an_old_server_cannot_be_ended(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new servers have the traffic: they are noted, so that they can be taken down."""
    deployed(store)
    placer, said = LosingPlacer(1), list[str]()
    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", WorkingFront)
    monkeypatch.setattr(rollouts, "bundle_name", lambda _: "b-2")
    monkeypatch.setattr(rollouts, "_switch", lambda *_: None)
    monkeypatch.setattr(rollouts, "_watch", lambda *_: None)
    rollouts.replace(store, "one", SimpleNamespace(), said.append)  # type: ignore[arg-type]
    after = store.read("one")
    assert [server.generation for server in after.servers] == [2] and after.bundle == "b-2"
    assert placer.ended == [1] and "an old server was not ended: gpu-a: not reached" in said[-1]


def test_servers_that_the_front_does_not_take_are_ended(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = deployed(store)
    placer = LosingPlacer(2)

    def switch(*_: Any) -> None:
        raise PlaceError(None, "the front does not run")

    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", WorkingFront)
    monkeypatch.setattr(rollouts, "read_bundle", lambda *_: None)
    monkeypatch.setattr(rollouts, "_switch", switch)
    with pytest.raises(PlaceError, match="the front does not run"):
        rollouts.set_server_count(store, "one", 3, print)
    assert placer.ended == [2, 3]  # also where the first one cannot be reached
    assert store.read("one") == before


@pytest.mark.parametrize("written", [False, True])
def test_new_servers_go_on_while_the_front_sends_them_requests(
    store: Store, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """A full disk keeps it from being told of the old ones; one that is only slow to take them will."""
    deployed(store)
    placer, said = Placer(), list[str]()

    class Front(WorkingFront):
        config = FrontConfig(backends=(RoutedServer(name="server-1", url="u"),))

        def apply(self, config: Any) -> None:
            if not self.applied:  # the switch to the new server
                self.applied.append(config)
                self.config = FrontConfig(backends=(RoutedServer(name="server-2", url="u"),))
                return
            if written:
                self.config = config
            raise PlaceError(28, "No space left on device")

    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", Front)
    monkeypatch.setattr(rollouts, "bundle_name", lambda _: "b-2")
    monkeypatch.setattr(rollouts, "_switch", lambda front, *_: front.apply(None))
    monkeypatch.setattr(rollouts, "_watch", lambda *_: "server-2 failed 1 of 1 requests")
    with pytest.raises(rollouts.RolledBack, match="rolled back after" if written else "could not be rolled back after"):
        rollouts.replace(store, "one", SimpleNamespace(), said.append)  # type: ignore[arg-type]
    assert placer.ended == ([2] if written else [])
    assert ("the new servers still get its requests" in said[-1]) is not written


@pytest.mark.parametrize(
    ("events", "own", "routed", "ended"),
    [
        ([("rolling_out", {}), ("numbers", {"first": 2, "last": 3})], 1, [1], [2, 3]),  # while it placed servers
        ([("rolling_out", {}), ("numbers", {"first": 2, "last": 2})], 1, [2, 1], [2]),  # while they were watched
        ([("numbers", {"first": 2, "last": 2}), ("deployed", {})], 2, [2, 1], [1]),  # while the old ones ended
        ([("numbers", {"first": 2, "last": 2}), ("deployed", {})], 2, [2], []),  # it was not
    ],
)
@pytest.mark.parametrize("replaces", [True, False])
def test_what_a_killed_rollout_left_is_ended_by_the_next_command(
    store: Store, monkeypatch: pytest.MonkeyPatch, replaces: bool, events: Any, own: int, routed: Any, ended: Any
) -> None:
    made = deployed(store)
    store.save(made.model_copy(update={"servers": (made.servers[0].model_copy(update={"generation": own}),)}))
    with open_ledger(store.folder("one")) as ledger:
        for event, details in events:
            ledger.write(event, **details)
    left, switched = list[int](), list[Any]()

    class Front(WorkingFront):
        config = FrontConfig(
            backends=tuple(
                RoutedServer(name=f"server-{number}", url="http://x", draining=number == 1) for number in routed
            )
        )

    placer = Placer()
    monkeypatch.setattr(placer, "end_numbered", left.append, raising=False)
    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", Front)
    monkeypatch.setattr(rollouts, "read_bundle", lambda *_: None)
    monkeypatch.setattr(rollouts, "bundle_name", lambda _: "b-3")
    monkeypatch.setattr(rollouts, "_watch", lambda *_: None)
    monkeypatch.setattr(
        rollouts, "_switch", lambda _, __, active, draining: switched.append([one.generation for one in active])
    )
    if replaces:
        rollouts.replace(store, "one", SimpleNamespace(), print)  # type: ignore[arg-type]
    else:
        rollouts.set_server_count(store, "one", 1, print)
    assert left == ended and (switched[0] == [own] or len(routed) == 1)
    assert placer.ended == ([own] if replaces else [])


@pytest.mark.parametrize("replaces", [True, False])
def test_a_command_works_on_what_another_has_left(
    store: Store, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    """The other one ends between this one's start and its turn."""
    before = deployed(store)
    other = before.servers[0].model_copy(update={"generation": 5})

    @contextmanager
    def late(folder: Path) -> Iterator[Any]:
        store.save(before.model_copy(update={"servers": (other, other)}))
        with open_ledger(folder) as ledger:
            yield ledger

    placer = Placer()
    monkeypatch.setattr(rollouts, "open_ledger", late)
    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", WorkingFront)
    monkeypatch.setattr(rollouts, "bundle_name", lambda _: "b-2")
    monkeypatch.setattr(rollouts, "read_bundle", lambda *_: None)
    monkeypatch.setattr(rollouts, "_switch", lambda *_: None)
    monkeypatch.setattr(rollouts, "_watch", lambda *_: None)
    if replaces:
        rollouts.replace(store, "one", SimpleNamespace(), print)  # type: ignore[arg-type]
        assert placer.ended == [5, 5] and [one.generation for one in store.read("one").servers] == [6, 7]
    else:
        rollouts.set_server_count(store, "one", 1, print)
        assert placer.ended == [5]


def test_servers_get_numbers_that_none_of_the_first_ones_had(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three that `deploy` had placed were gone: the next was placed in the folder of one, and never started."""
    deployed(store)
    with open_ledger(store.folder("one")) as ledger:
        for number in range(3):
            ledger.write("placing", generation=1, number=number, bundle="b-1")
        ledger.write("deployed")
    monkeypatch.setattr(rollouts, "placer_of", lambda *_: Placer())
    monkeypatch.setattr(rollouts, "DeploymentFront", WorkingFront)
    monkeypatch.setattr(rollouts, "read_bundle", lambda *_: None)
    monkeypatch.setattr(rollouts, "_switch", lambda *_: None)
    assert [one.generation for one in rollouts.set_server_count(store, "one", 2, print).servers] == [1, 4]


def test_fewer_servers_are_noted_before_the_others_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One could not be reached: the next command counted both, and sent requests to the one that had ended."""
    made = deployed(store)
    servers = tuple(made.servers[0].model_copy(update={"generation": number}) for number in (1, 2, 3))
    store.save(made.model_copy(update={"servers": servers}))
    placer = LosingPlacer(3)
    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", WorkingFront)
    monkeypatch.setattr(rollouts, "read_bundle", lambda *_: None)
    monkeypatch.setattr(rollouts, "_switch", lambda *_: None)
    with pytest.raises(PlaceError, match="gpu-a: not reached"):
        rollouts.set_server_count(store, "one", 1, print)
    assert placer.ended == [2, 3] and [one.generation for one in store.read("one").servers] == [1]


@pytest.mark.parametrize("error", [PlaceError(None, "the front does not run"), KeyboardInterrupt()])
def test_a_rollout_that_breaks_off_ends_its_own_servers_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = deployed(store)
    placer, applied = Placer(), list[Any]()

    class Front:
        config = FrontConfig(key="k")

        def __init__(self, place: Any, folder: str) -> None:
            return

        def apply(self, config: Any) -> None:
            applied.append(config)

        def wait_until_idle(self, names: set[str], seconds: float) -> bool:
            return names == {"server-2"}

    def switch(front: Any, *rest: Any) -> None:
        raise error

    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", Front)
    monkeypatch.setattr(rollouts, "bundle_name", lambda _: "b-2")
    monkeypatch.setattr(rollouts, "_switch", switch)
    with pytest.raises(type(error)):
        rollouts.replace(store, "one", SimpleNamespace(), print)  # type: ignore[arg-type]
    assert placer.ended == [2] and applied == [Front.config]
    assert store.read("one") == before and store.unfinished() == []
    assert read_entries(store.folder("one") / "ledger.jsonl")[-1]["event"] == "deployed"


def test_an_expired_deployment_is_not_changed(store: Store) -> None:
    store.save(deployed(store).model_copy(update={"expires_at": 2.0}))
    changes: tuple[Callable[[], Any], ...] = (
        lambda: rollouts.replace_bundle(store, "one", WantedBundle(model="./nothing"), print, None),
        lambda: rollouts.replace(store, "one", SimpleNamespace(), print),  # type: ignore[arg-type]
        lambda: rollouts.set_server_count(store, "one", 2, print),
    )
    for change in changes:
        with pytest.raises(ValueError, match="one: has expired"):
            change()


def test_an_error_without_words_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*_: Any) -> None:
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(rollouts, "first_answers", no_answer)
    server = PlacedServer(generation=2, bundle="b-2", folder="x", port=1, local_port=1)
    front: Any = WorkingFront(None, "")
    told = rollouts._watch(front, Placer(), [server], SimpleNamespace(), 0.0)  # type: ignore[arg-type]
    assert told == "server-2: ReadTimeout"


def test_the_evidence_of_what_runs_outlives_a_rollout_that_is_rolled_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle's file had the answers and speeds of the one that failed; and it never said how a rollout fits."""
    deployed(store)
    found: dict[OptimizationLevel, LevelCheck] = {"none": LevelCheck(level="none", throughput=7.0)}
    kept: list[bool] = []

    def check_levels(model: Any, target: Any, levels: Any, dtype: Any, folder: Path, *_: Any) -> Any:
        folder.mkdir()
        return found, {"none": ()}

    monkeypatch.setattr(bundles, "check_levels", check_levels)

    def replace(_: Store, __: str, bundle: ServingBundle, *___: Any) -> None:
        kept.append(read_bundle(store.bundles, bundle_name(bundle)) == bundle)
        if len(kept) == 2:
            raise rollouts.RolledBack("one: rolled back")

    monkeypatch.setattr(rollouts, "replace", replace)
    wanted = WantedBundle(model="synthetic:llama-1m@0", dtype="float32")
    rollouts.replace_bundle(store, "one", wanted, print, None)
    [first] = store.measuring_folders("one")
    evidence = read_model(first / "bundle.json", ServingBundle)
    assert re.fullmatch(r"needs about 0\.\d\d GiB a rank, local:cpu has \d+\.\d\d GiB", evidence.fit_text)
    found["none"] = LevelCheck(level="none", throughput=1.0)
    with pytest.raises(rollouts.RolledBack):
        rollouts.replace_bundle(store, "one", wanted, print, None)
    assert read_bundle(store.bundles, bundle_name(evidence)) == evidence
    [failed] = set(store.measuring_folders("one")) - {first}
    assert read_model(failed / "bundle.json", ServingBundle).checks == (found["none"],)
    rollouts.replace_bundle(store, "one", wanted, print, None)
    assert read_bundle(store.bundles, bundle_name(evidence)).checks == (found["none"],)
    assert kept == [True, False, False]  # of a bundle that is new there is no other evidence


def test_a_rollout_that_does_not_fit_beside_what_runs_is_refused_before_it_is_measured(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was measured for minutes, and then its servers were not started."""
    deployed(store)
    monkeypatch.setattr(rollouts, "make_bundle", lambda *_, **__: pytest.fail("it is measured"))
    monkeypatch.setattr(LocalPlace, "memory_bytes", lambda _: 1 << 20)
    with pytest.raises(ValueError, match=r"one: the model does not fit where its servers run: needs about .*local"):
        rollouts.replace_bundle(store, "one", WantedBundle(model="synthetic:llama-1m@0"), print, None)


def test_a_new_server_that_answers_late_is_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine is busy, or it reads a prompt of a million characters: what it says counts, not how soon."""

    def late(url: str, timeout: float, **_: Any) -> Any:
        if timeout < 10:
            raise httpx.ReadTimeout("")
        return SimpleNamespace(status_code=200)

    monkeypatch.setattr(httpx, "get", late)
    monkeypatch.setattr(rollouts, "first_answers", lambda *_: None)
    server = PlacedServer(generation=2, bundle="b-2", folder="x", port=1, local_port=1)
    front: Any = SimpleNamespace(config=FrontConfig(key="k"), state=SimpleNamespace(backends=()))
    assert rollouts._watch(front, Placer(), [server], SimpleNamespace(), 0.01) is None  # type: ignore[arg-type]
