"""Hosts that fail while a bundle is placed on them: a disk that is full, a host that loses its power."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.targets.target import SshTarget
from tasks.deployment.bundles import WantedBundle
from tasks.deployment.deploying import Deploying, WantedDeployment
from tasks.deployment.places import PlaceError
from tasks.deployment.servers import ServerNotReady
from tasks.deployment.store import Store
from tasks.deployment.taking_down import take_down
from tasks.deployment.targets import parse_target
from tests.support.cluster.ssh_hosts import SshTestHosts, ssh_hosts
from tests.support.processes import command_line, processes_of
from tests.support.run_folders.studies import wait_until

pytestmark = pytest.mark.slow
SMALL_DISK_BYTES = 12 << 20
"""Too small for code and model."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTestHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts"), 1) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(data=tmp_path, rented=tmp_path / "rented", cache=tmp_path / "cache")


def wanted(hosts: SshTestHosts, name: str, model: str) -> WantedDeployment:
    target = SshTarget.model_validate(hosts.target())
    bundle = WantedBundle(model=model, level="none", max_length=64)
    return WantedDeployment(
        name=name, target=parse_target("ssh:gpu-a"), bundle=bundle, hours=0.5, ssh=target, ready_seconds=120
    )


def is_deployed(store: Store, asked: WantedDeployment, said: list[str]) -> bool:
    """A host that crashed in the test before is connected to again after a pause."""
    try:
        Deploying(store, asked, said.append, None).deploy()
    except PlaceError:
        return False
    return True


def is_undeployed(store: Store, name: str) -> bool:
    """A connection that has failed is tried again after a pause."""
    try:
        return take_down(store, name, print) == 0.0
    except PlaceError:
        return False


def test_a_connection_that_is_lost_while_the_server_starts_is_made_again(hosts: SshTestHosts, store: Store) -> None:
    host, placed = hosts["a"], "deployments/dropped-*/servers/1/state.json"
    ended: list[BaseException | None] = []

    def deploy() -> None:
        try:
            Deploying(store, wanted(hosts, "dropped", "synthetic:bert-1m@0"), print, None).deploy()
            ended.append(None)
        except (PlaceError, ServerNotReady) as error:
            ended.append(error)

    thread = threading.Thread(target=deploy)
    thread.start()
    try:
        wait_until(lambda: any(host.disk.glob(placed)) or ended, 180, "the server")
        host.kill_sshd()
        time.sleep(4)
        host.start_sshd()
        thread.join(600)
        assert ended == [None]
    finally:
        thread.join()
        hosts.restore()
        if ended == [None]:
            wait_until(lambda: is_undeployed(store, "dropped"), 60, "undeploy")


def test_a_full_disk_is_named_and_nothing_is_left(hosts: SshTestHosts, store: Store) -> None:
    host = hosts["a"]
    host.crash()
    host.disk_bytes = SMALL_DISK_BYTES
    host.boot()
    try:
        with pytest.raises(PlaceError, match=r"gpu-a.*No space left on device"):
            Deploying(store, wanted(hosts, "full", "synthetic:llama-40m@0"), print, None).deploy()
        left = [line for one in host.processes() if "supervisor" in (line := command_line(one))]
        assert left == [] and not store.folder("full").exists() and processes_of(store.folder("full")) == []
    finally:
        hosts.restore()


def test_a_host_that_dies_after_placing_is_remembered_and_nothing_runs_here(hosts: SshTestHosts, store: Store) -> None:
    host, placed = hosts["a"], "deployments/gone-*/servers/1/state.json"
    ended: list[BaseException] = []

    def deploy() -> None:
        try:
            Deploying(store, wanted(hosts, "gone", "synthetic:bert-1m@0"), print, None).deploy()
        except (PlaceError, ServerNotReady) as error:
            ended.append(error)

    thread = threading.Thread(target=deploy)
    thread.start()
    try:
        wait_until(lambda: any(host.disk.glob(placed)) or ended, 180, "the server")
        host.crash()
        thread.join(600)
        assert not thread.is_alive() and len(ended) == 1 and "gpu-a" in str(ended[0]), ended
        # Whether its server died too is not known here: undeploy looks once the host is back.
        assert store.folder("gone").exists() and processes_of(store.folder("gone")) == []
        host.boot()
        wait_until(lambda: is_undeployed(store, "gone"), 60, "undeploy")
        assert not store.folder("gone").exists() and not any(host.disk.glob(placed))
    finally:
        thread.join()
        if not ended:
            take_down(store, "gone", print)
        hosts.restore()


def test_a_host_that_dies_later_is_named_until_it_is_back(hosts: SshTestHosts, store: Store) -> None:
    said: list[str] = []
    wait_until(lambda: is_deployed(store, wanted(hosts, "later", "synthetic:bert-1m@0"), said), 60, "the deployment")
    hosts["a"].crash()
    with pytest.raises(PlaceError, match="gpu-a"):
        take_down(store, "later", said.append)
    assert store.folder("later").exists() and processes_of(store.folder("later")) == []  # remembered; nothing runs here
    hosts["a"].boot()
    wait_until(lambda: is_undeployed(store, "later"), 60, "undeploy")
    assert not store.folder("later").exists()
    assert not any(hosts["a"].disk.glob("deployments/later-*"))
