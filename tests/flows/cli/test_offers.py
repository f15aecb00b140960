"""What renting is said to cost: at the prices that the user has refreshed, where there are any."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from configs.hardware.prices import CATALOG_COLUMNS
from configs.plans.paths import RunPaths
from configs.spec.study import parse_study
from configs.targets.rented import RentedTarget
from flows import precheck
from flows.cli import offers
from flows.cli.deploy import deploying as deploy_command
from flows.cli.main import app
from flows.precheck import check_study
from tasks.deployment import deploying
from tasks.planning.study_cost import StudyCost
from tasks.providers import clouds, study_nodes
from tasks.providers.leases import open_ledger
from tasks.providers.rental import RentalLease
from tasks.providers.renting import RentalFailed
from tasks.providers.study_nodes import StudyNodes

SHIPPED, REFRESHED = "0.53 USD/h", "7.25 USD/h"
TARGET = RentedTarget.model_validate(
    {"kind": "aws", "instance": "g4dn.xlarge", "regions": ["us-east-1"], "ssh_from": "203.0.113.7/32"}
)
CLOUD = SimpleNamespace(name="aws", default_user="ubuntu", zones=lambda instance, region: [])


@pytest.fixture(autouse=True)
def refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))
    for module in (clouds, study_nodes, deploying):
        monkeypatch.setattr(module, "provider_named", lambda name: CLOUD)
    prices = tmp_path / "cache" / "catalog" / "prices.csv"
    prices.parent.mkdir(parents=True)
    row = "aws/g4dn.xlarge,us-east-1,on_demand,7.25,2026-11-01,the list"
    prices.write_text(f"{','.join(CATALOG_COLUMNS)}\n{row}\n")
    return prices


def up(*more: str) -> str:
    rest = ["--region", "us-east-1", "--ssh-from", "203.0.113.7/32", *more]
    return CliRunner().invoke(app, ["nodes", "up", "aws/g4dn.xlarge", *rest], input="n\n").output


def test_nodes_are_offered_and_capped_at_refreshed_prices(refreshed: Path) -> None:
    assert REFRESHED in up()
    assert f"{REFRESHED} exceeds the cap of 5 USD/h" in up("--max-usd-per-hour", "5")
    refreshed.unlink()
    assert SHIPPED in up() and SHIPPED in up("--max-usd-per-hour", "5")


def test_a_studys_nodes_are_offered_at_refreshed_prices() -> None:
    assert REFRESHED in offers._priced(TARGET)[-1]


def renting(kind: str, tmp_path: Path, model_bytes: int = 0) -> Callable[[], Any]:
    """What rents nodes for at most 5 USD/h."""
    target = TARGET.model_copy(update={"max_usd_per_hour": 5.0})
    if kind == "a study":
        return StudyNodes(target, "s", tmp_path, tmp_path, print, lambda: None, tmp_path / "cache")._rented
    store = SimpleNamespace(cache=tmp_path / "cache", rented=tmp_path, folder=lambda name: tmp_path / name)
    wanted = SimpleNamespace(rented=target, name="d", hours=1.0, max_usd_per_hour=5.0)
    made = SimpleNamespace(store=store, wanted=wanted, say=print, _limits=None)

    def hosts() -> None:
        with open_ledger(tmp_path / "d") as ledger:
            deploying.Deploying._hosts(made, ledger, 4e9, model_bytes)  # type: ignore[arg-type]

    return hosts


@pytest.mark.parametrize("kind", ["a study", "a deployment"])
def test_a_cap_holds_at_refreshed_prices_where_nobody_is_asked(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"7\.25 USD/h exceeds the cap of 5 USD/h"):
        renting(kind, tmp_path)()


def test_a_deployments_nodes_have_room_for_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refreshed: Path
) -> None:
    """A model of more than 60 GB filled the disk of 100, and there is no option for another."""
    rented: list[RentalLease] = []

    def rent(provider: Any, lease: RentalLease, *_: Any) -> None:
        rented.append(lease)
        raise RentalFailed("enough")

    refreshed.unlink()
    monkeypatch.setattr(deploying, "rent", rent)
    with pytest.raises(RentalFailed, match="enough"):
        renting("a deployment", tmp_path, 130 * 2**30 + 1)()
    assert [lease.request.disk_gb for lease in rented] == [231]


def test_a_deployment_is_offered_at_refreshed_prices(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = SimpleNamespace(rented=TARGET, hours=1.0, max_usd_per_hour=None, target=SimpleNamespace(text="aws:g4dn"))
    deploy_command._agreed([wanted], yes=True)  # type: ignore[list-item]
    assert REFRESHED in capsys.readouterr().out


def test_a_study_says_how_long_its_nodes_measure_and_for_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person was asked to rent by the price of an hour alone, without a word on how many hours."""
    monkeypatch.setattr(precheck, "check_clusters", lambda *_: None)  # asks for credentials
    study = parse_study(
        {
            "study": "s",
            "models": [{"id": "synthetic:llama-110m@0"}],
            "workload": {"kind": "generate", "prompt_tokens": 64, "new_tokens": 16},
            "dtype": "float16",
            "targets": [TARGET.model_dump(mode="json", exclude_defaults=True) | {"kind": "aws", "name": "t4"}],
            "experiments": {"batch": {"kind": "sweep", "over": {"batch_size": [1, 2]}}},
            "measuring": {"repeats": 3},
        }
    )
    run = RunPaths(tmp_path / "run")
    plan = check_study(study, tmp_path, tmp_path / "cache", run.folder, clusters=True)
    costs = offers.expected_costs(plan, run, {"t4"}, False)
    assert (costs["t4"].launches, costs["t4"].measurements) == (4, 8)
    assert costs["t4"].usd == pytest.approx(costs["t4"].seconds * 7.25 / 3600)
    assert offers.agreed_to_rent(study, True, costs)
    said = capsys.readouterr().out
    assert re.search(
        r"rent +t4  measuring there takes about \d+ s, 0\.\d+ USD on demand; booting, preparing not counted\n", said
    )
    assert offers.expected_costs(plan, run, set(), False) == {}


def test_nodes_side_by_side_measure_at_once() -> None:
    cost = StudyCost(launches=9, measurements=9, seconds=7200, unknown=2, usd=8.4, node_seconds=10800)
    assert offers.expected_line(cost, 2) == (
        "measuring there takes about 90 min, 8.40 USD on demand; booting, preparing and 2 cells of unknown duration "
        "not counted"
    )
    assert "about 90 min, 8.40 USD; " in offers.expected_line(cost, 2, own_price=True)  # of the study or its file
    unknown = StudyCost(launches=9, measurements=9, seconds=30, unknown=9, usd=None, nothing_known=True)
    assert offers.expected_line(unknown, 2) == "how long measuring there takes is unknown"


def test_nodes_of_a_study_at_an_unknown_price_are_not_said_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run extends their lease for as long as it lives."""
    elsewhere = TARGET.model_copy(update={"regions": ["eu-north-1"]})
    assert offers._priced(elsewhere)[-1] == "1 x aws/g4dn.xlarge: price unknown, for as long as the run lasts"
    assert up("--region", "eu-north-1").startswith("1 x aws/g4dn.xlarge: price unknown, for at most 1 h")


def test_a_price_below_a_cent_is_not_called_nothing(refreshed: Path) -> None:
    refreshed.write_text(refreshed.read_text().replace("7.25", "0.0042"))
    assert "0.0042 USD/h first" in up() and "0.00 USD" not in up()


def test_a_cap_of_the_very_price_of_all_nodes_holds_them(refreshed: Path) -> None:
    """3 x 0.1 is above 0.3 by its last bit; and what exceeds a cap differs from it where it is told."""
    refreshed.write_text(refreshed.read_text().replace("7.25", "0.1"))
    assert "0.30 USD/h first" in up("--nodes", "3", "--max-usd-per-hour", "0.3")
    refreshed.write_text(refreshed.read_text().replace(",0.1,", ",12.0004,"))
    assert "12.0004 USD/h exceeds the cap of 12 USD/h" in up("--max-usd-per-hour", "12")


@pytest.mark.parametrize("minutes", ["nan", "inf", "0"])
def test_nodes_are_waited_for_until_an_end(minutes: str) -> None:
    """With none, nodes that do not answer would be waited for, and paid, until their lease ends."""
    result = CliRunner().invoke(app, ["nodes", "up", "aws/g4dn.xlarge", "--ssh-from", "203.0.113.7/32",
                                      "--wait-minutes", minutes, "--yes"])  # fmt: skip
    assert result.exit_code != 0 and f"--wait-minutes: got {float(minutes)}" in result.output


def test_a_price_on_demand_that_stands_for_one_of_spot_is_named(refreshed: Path) -> None:
    """It was shown as the price of spot nodes; without a word both looked alike."""
    refreshed.write_text(refreshed.read_text() + "aws/g4dn.xlarge,eu-west-3,on_demand,0.61,2026-11-02,the list\n")
    rest = ["--region", "eu-west-3", "--ssh-from", "203.0.113.7/32"]

    def offered(*market: str) -> str:
        return CliRunner().invoke(app, ["nodes", "up", "aws/g4dn.xlarge", *rest, *market], input="n\n").output

    told = "no spot price is listed: this is the one on demand, listed on 2026-11-02 (the list)\n"
    assert told in offered("--market", "spot") and "listed" not in offered()


def test_a_spot_price_is_no_upper_bound(refreshed: Path) -> None:
    """It is the list's of one day, and rises up to the price on demand: nodes were offered for "at most" that much."""
    rows = refreshed.read_text() + "aws/g4dn.xlarge,us-east-1,spot,0.19,2025-11-06,the list\n"
    refreshed.write_text(rows)
    words = "us-east-1, any zone, spot"
    offered = up("--market", "spot", "--hours", "2", "--nodes", "2")
    assert f"0.38 USD/h first ({words}), at most 14.50 USD/h; at most 29.00 USD in 2 h\n" in offered
    assert "\nspot prices change: this is the one listed on 2025-11-06 (the list)\n" in offered
    refreshed.write_text(rows.splitlines()[0] + "\naws/g4dn.xlarge,eu-west-3,spot,0.19,2025-11-06,the list\n")
    rest = ["--region", "eu-west-3", "--ssh-from", "203.0.113.7/32", "--market", "spot"]
    offered = CliRunner().invoke(app, ["nodes", "up", "aws/g4dn.xlarge", *rest], input="n\n").output
    words = words.replace("us-east-1", "eu-west-3")
    assert f"0.19 USD/h first ({words}); its price on demand, to which spot may rise, is unknown\n" in offered
