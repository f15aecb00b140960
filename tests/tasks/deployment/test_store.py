"""What the folders of deployments say: names that are no paths, deployments that were interrupted."""

from collections.abc import Sequence

import pytest

from tasks.deployment.bundles import WantedBundle
from tasks.deployment.deploying import Deploying, WantedDeployment
from tasks.deployment.store import Store
from tasks.deployment.targets import parse_target
from tasks.providers.leases import open_ledger
from tests.support.servers.stand_in_deployments import deployed


@pytest.mark.parametrize("name", ["..", ".", "", "../x", "a/b", "/x", "a\n", "-rf", "x" * 65])
def test_a_name_is_no_path(store: Store, name: str) -> None:
    """A failed deployment removes its folder: the name must not lead anywhere else."""
    (store.data / "deployments" / "other").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"letters, digits"):
        store.folder(name)
    wanted = WantedDeployment(name=name, target=parse_target("local:cpu"), bundle=WantedBundle(model="./nothing"))
    with pytest.raises(ValueError, match=r"letters, digits"):
        Deploying(store, wanted, print, None)
    assert (store.data / "deployments" / "other").is_dir()


@pytest.mark.parametrize("events", [("rolling_out",), ("rolling_out", "numbers"), ("scaling", "numbers")])
def test_a_service_whose_rollout_was_killed_is_not_taken_down(store: Store, events: Sequence[str]) -> None:
    """`rankwise reap` removes what is unfinished; the old servers go on serving."""
    deployed(store, *events)
    assert store.unfinished() == []


def test_what_was_never_deployed_or_half_taken_down_is_unfinished(store: Store) -> None:
    deployed(store, "undeploying")
    half = store.folder("half")
    half.mkdir()
    with open_ledger(half) as ledger:
        ledger.write("deploying")
        ledger.write("placing")
    assert store.unfinished() == ["half", "one"]
