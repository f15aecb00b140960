"""Prices: which source counts, what a price file may say, and what is refused."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from configs.hardware.catalog import catalog
from configs.hardware.price_file import read_price_file
from configs.hardware.prices import CATALOG, CATALOG_COLUMNS, Offer, Price, listed_offers, read_catalog, target_prices
from configs.plans.paths import RunPaths
from configs.spec.study import StudyError, load_study
from configs.targets.rented import RentedTarget
from configs.targets.target import LocalTarget
from tasks.planning.inputs import copy_inputs
from tasks.planning.study_plan import make_plan

MACHINE = "aws/g4dn.xlarge/us-east-1"


def offer(
    usd: float, machine: str = "aws/g4dn.xlarge", region: str | None = "us-east-1", market: str = "on_demand"
) -> Offer:
    price = Price.model_validate({"usd_per_hour": usd, "source": "test", "market": market, "region": region})
    return Offer(machine=machine, price=price)


CATALOG_OFFERS = (offer(0.5), offer(0.2, market="spot"), offer(0.4, region="eu-west-1"), offer(9.0, machine="aws/p5"))


def test_the_shipped_catalog_names_a_day_and_a_source_for_each_price() -> None:
    offers = read_catalog()
    assert len(offers) > 20
    for item in offers:
        assert item.price.usd_per_hour > 0 and item.price.as_of and item.price.source and item.price.region
        assert item.machine and item.machine.split("/")[0] in ("aws", "azure", "gcp")
    assert CATALOG.stat().st_size < 100_000


def test_the_study_beats_the_own_file_and_that_the_catalog() -> None:
    target = LocalTarget(machine=MACHINE)
    own = (offer(0.45),)
    assert target_prices(target, (), CATALOG_OFFERS).price == CATALOG_OFFERS[0].price
    assert target_prices(target, own, CATALOG_OFFERS).price == own[0].price
    priced = target.model_copy(update={"price_usd_per_hour": 1.25})
    found = target_prices(priced, own, CATALOG_OFFERS)
    assert found.price is not None and (found.price.usd_per_hour, found.price.source) == (1.25, "the study file")


def test_a_stated_price_is_of_the_market_that_its_nodes_are_asked_in() -> None:
    """Else a report calls the dollars of spot nodes on demand, and compares them with other regions' on-demand ones."""
    target = RentedTarget(instance="g4dn.xlarge", regions=["us-east-1"], market="spot", price_usd_per_hour=0.25)
    found = target_prices(target, (), CATALOG_OFFERS)
    assert found.price is not None and (found.price.usd_per_hour, found.price.market) == (0.25, "spot")
    assert "spot" not in {price.market for price in found.others if price.region == "us-east-1"}
    assert any(price.market == "on_demand" and price.region == "us-east-1" for price in found.others)


def test_other_markets_and_regions_are_kept_and_other_machines_are_not() -> None:
    found = target_prices(LocalTarget(machine=MACHINE), (), CATALOG_OFFERS)
    assert [(price.market, price.region, price.usd_per_hour) for price in found.others] == [
        ("spot", "us-east-1", 0.2),
        ("on_demand", "eu-west-1", 0.4),
    ]


@pytest.mark.parametrize("machine", [None, "lab/rack-7", "aws/g4dn.xlarge", "aws/g4dn.xlarge/mars"])
def test_unknown_stays_unknown(machine: str | None) -> None:
    """A spot price, or that of another region, is no answer to what this machine costs."""
    assert target_prices(LocalTarget(machine=machine), (), CATALOG_OFFERS).price is None


def write(folder: Path, text: str) -> Path:
    path = folder / "prices.yaml"
    path.write_text(text)
    return path


def test_the_first_entry_that_fits_counts(tmp_path: Path) -> None:
    text = """
as_of: 2026-02-01
prices:
  - {target: gpu-special, usd_per_hour: 7, source: contract 4711, as_of: 2026-01-15}
  - {target: "gpu-*", usd_per_hour: 2}
  - {machine: "aws/g4dn.*", region: us-east-1, market: spot, usd_per_hour: 0.19}
  - {machine: "*", usd_per_hour: 1}
"""
    offers = read_price_file(write(tmp_path, text), "prices.yaml")

    def price(**target: str) -> Price | None:
        return target_prices(LocalTarget.model_validate(target), offers, ()).price

    assert price(name="gpu-special") == Price(usd_per_hour=7, source="contract 4711 (prices.yaml)", as_of="2026-01-15")
    assert price(name="gpu-9") == Price(usd_per_hour=2, source="prices.yaml", as_of="2026-02-01")
    spot = price(name="cloud", machine=MACHINE)
    assert spot is not None and (spot.usd_per_hour, spot.market) == (0.19, "spot")
    assert price(name="cloud", machine="lab/rack") == Price(usd_per_hour=1, source="prices.yaml", as_of="2026-02-01")
    assert price(name="bare") is None


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("prices: [{target: a, usd_per_hour: 0}]", ["prices[0].usd_per_hour: input should be greater than 0, got 0"]),
        ("prices: [{target: a, usd_per_hour: -1}]", ["prices[0].usd_per_hour: input should be greater than 0, got -1"]),
        ("prices: [{target: a, usd_per_hour: .inf}]", ["prices[0].usd_per_hour: input should be a finite number"]),
        ("prices: [{target: a, usd_per_hour: yes}]", ["prices[0].usd_per_hour: expected a number, got true"]),
        ("prices: [{usd_per_hour: 1}]", ["prices[0]: expected either `target`"]),
        ("prices: [{target: a, machine: b/c, usd_per_hour: 1}]", ["prices[0]: expected either `target`"]),
        ("prices: [{machine: aws/x/us-east-1, usd_per_hour: 1}]", ["expected provider/instance. Set the region in"]),
        (
            "prices: [{target: a, usd_per_hour: 1, markt: spot}]",
            ["prices[0].markt: unknown key (did you mean market?)"],
        ),
        ("prices: [{target: a, usd_per_hour: 1, market: cheap}]", ["prices[0].market: input should be 'on_demand'"]),
        ("prices: [{target: a, usd_per_hour: 1, as_of: soon}]", ["prices[0].as_of: input should be a valid date"]),
        ("prices: []", ["prices: expected at least 1 entry, got none"]),
        ("prices: [{target: a}]\nas_of: x", ["as_of: ", "prices[0].usd_per_hour: is missing"]),
        ("prices: 1\nprices: 2", ["not YAML: line 2, column 1: duplicate key 'prices'"]),
        ("- 1", ["expected a mapping with a list `prices`, got list"]),
        ("prices: [", ["not YAML: line 1"]),
    ],
)
def test_every_problem_of_a_price_file_is_named(tmp_path: Path, text: str, problems: list[str]) -> None:
    with pytest.raises(StudyError) as caught:
        read_price_file(write(tmp_path, text), "mine.yaml")
    assert len(caught.value.problems) == len(problems)
    for line, problem in zip(caught.value.problems, problems, strict=True):
        assert line.startswith("mine.yaml: ") and problem in line


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("aws/x,r,on_demand,0,2026-01-01,s", "line 2: usd_per_hour: Input should be greater than 0"),
        ("aws/x,r,on_demand,-3,2026-01-01,s", "line 2: usd_per_hour"),
        ("aws/x,r,on_demand,1,yesterday,s", "line 2: as_of"),
        ("aws/x,r,on_demand,1,,s", "line 2: expected exactly the columns"),
        ("aws/x,r,on_demand,1,2026-01-01,", "line 2: expected exactly the columns"),
        ("aws/x,r,bargain,1,2026-01-01,s", "line 2: market"),
        ("aws/x,r,spot,1,2026-01-01,s\naws/x,r,spot,2,2026-01-01,s", "line 3: duplicate price of aws/x r spot"),
    ],
)
def test_a_catalog_with_a_doubtful_row_is_refused(tmp_path: Path, row: str, problem: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(f"{','.join(CATALOG_COLUMNS)}\n{row}\n")
    with pytest.raises(ValueError, match=r"prices\.csv") as caught:
        read_catalog(path)
    assert problem in str(caught.value)


def _write_unclosed(path: Path, columns: Sequence[str], row: str, count: int) -> None:
    """Write so many rows, of which the second has a quote that is never closed."""
    path.parent.mkdir()
    lines = [row.format(number) for number in range(count)]
    lines[1] = lines[1].replace("https", '"https')
    path.write_text("\n".join([",".join(columns), *lines, ""]))


@pytest.mark.parametrize("rows", [2, 5000])
def test_a_refreshed_catalog_with_a_quote_that_is_never_closed_is_refused(tmp_path: Path, rows: int) -> None:
    """All rows after it would be text of its own row, and beyond 128 KiB of that csv raises an error of its own."""
    priced = "aws/m{},us-east-1,on_demand,1.25,2026-01-01,https://a.b/list"
    _write_unclosed(tmp_path / "catalog" / "prices.csv", CATALOG_COLUMNS, priced, rows)
    with pytest.raises(ValueError, match=r"prices\.csv: not a CSV file \(.*\)\. Remove the file to fetch it again"):
        listed_offers(tmp_path)
    with pytest.raises(ValueError, match=r"prices\.csv: not a CSV file"):
        catalog(tmp_path)


@pytest.mark.parametrize("rows", [2, 5000])
def test_a_refreshed_table_with_a_quote_that_is_never_closed_is_refused(tmp_path: Path, rows: int) -> None:
    columns = ("name", "as_of", "source", "bytes_per_second")
    _write_unclosed(
        tmp_path / "catalog" / "links.csv", columns, "link{},2026-01-01,https://a.b/a-page-on-the-link,1e9", rows
    )
    with pytest.raises(ValueError, match=r"links\.csv: not a CSV file"):
        catalog(tmp_path)


STUDY = """
study: s
workload: {kind: noop}
targets: [{kind: local, name: here}, {kind: local, name: cloud, machine: aws/g4dn.xlarge/us-east-1}]
experiments: {grid: {kind: sweep, over: {label: [a]}}}
prices: rates/mine.yaml
"""


def test_a_study_takes_its_prices_along(tmp_path: Path) -> None:
    (tmp_path / "rates").mkdir()
    rates = tmp_path / "rates" / "mine.yaml"
    rates.write_text("prices: [{target: here, usd_per_hour: 3}]")
    (tmp_path / "study.yaml").write_text(STUDY)
    study, run = load_study(tmp_path / "study.yaml"), RunPaths(tmp_path / "run")
    inputs = copy_inputs(study, run, tmp_path)
    rates.unlink()
    plan = make_plan(study, [], inputs, run.inputs)
    here, cloud = plan.prices["here"].price, plan.prices["cloud"].price
    assert here is not None and (here.usd_per_hour, here.source) == (3, "rates/mine.yaml")
    assert cloud is not None and cloud.usd_per_hour == 0.526


def test_a_missing_or_bad_price_file_is_a_problem_of_the_study(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    study, run = load_study(tmp_path / "study.yaml"), RunPaths(tmp_path / "run")
    with pytest.raises(StudyError, match=r"prices: no such file: rates/mine\.yaml"):
        copy_inputs(study, run, tmp_path)
    (tmp_path / "rates").mkdir()
    (tmp_path / "rates" / "mine.yaml").write_text("prices: [{target: here, usd_per_hour: 0}, {usd_per_hour: 1}]")
    with pytest.raises(StudyError) as caught:
        copy_inputs(study, run, tmp_path)
    assert len(caught.value.problems) == 2 and caught.value.problems[0].startswith("rates/mine.yaml: prices[0].usd")


def test_a_machine_is_provider_instance_and_region(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace("aws/g4dn.xlarge/us-east-1", "g4dn.xlarge"))
    with pytest.raises(StudyError, match=r"targets\[1\]\.machine: got 'g4dn\.xlarge', expected provider/"):
        load_study(path)


@pytest.mark.parametrize("name", ["gpu[0]", "gpu?", "a100 [spot]", "[a-z"])
def test_a_name_stands_for_itself_and_only_a_star_for_anything(tmp_path: Path, name: str) -> None:
    for written in (name, f"{name}*"):
        offers = read_price_file(write(tmp_path, f"prices: [{{target: '{written}', usd_per_hour: 2}}]"), "prices.yaml")
        found = target_prices(LocalTarget(name=name), offers, ()).price
        assert found is not None and found.usd_per_hour == 2
        assert target_prices(LocalTarget(name="gpu0"), offers, ()).price is None


def test_a_targets_price_of_another_region_is_not_its_price(tmp_path: Path) -> None:
    """`region` beside `target` was a label alone: the first entry counted, wherever the target's machine stands."""
    text = """
prices:
  - {target: gpu, region: eu-west-1, usd_per_hour: 5}
  - {target: gpu, region: us-east-1, usd_per_hour: 4}
"""
    offers = read_price_file(write(tmp_path, text), "prices.yaml")
    found = target_prices(LocalTarget(name="gpu", machine=MACHINE), offers, ())
    assert found.price is not None and (found.price.region, found.price.usd_per_hour) == ("us-east-1", 4)
    assert [other.region for other in found.others] == ["eu-west-1"]
    unplaced = target_prices(LocalTarget(name="gpu"), offers, ()).price
    assert unplaced is not None and unplaced.usd_per_hour == 5
    elsewhere = target_prices(LocalTarget(name="gpu", machine="aws/g4dn.xlarge/ap-south-1"), offers, ())
    assert elsewhere.price is None and len(elsewhere.others) == 2


@pytest.mark.parametrize("told", ["machine: azure/Standard_NC4as_T4_v3", "target: azure"])
def test_an_own_price_holds_in_its_region_however_it_is_written(tmp_path: Path, told: str) -> None:
    """Azure's `East US` is eastus: a rented target has that name, and a contract's price was left out for it."""
    path = tmp_path / "prices.yaml"
    path.write_text(f"prices: [{{{told}, region: East US, usd_per_hour: 0.1}}]\n")
    offers = read_price_file(path, "prices.yaml")
    rented = RentedTarget(kind="azure", instance="Standard_NC4as_T4_v3", regions=["East US"])
    named = LocalTarget(name="azure", machine="azure/Standard_NC4as_T4_v3/EastUS")
    for target in (rented, named):
        found = target_prices(target, offers)
        assert found.price is not None and (found.price.usd_per_hour, found.price.region) == (0.1, target.region)
        assert not any(other.region == "East US" for other in found.others)
    listed = target_prices(named).price
    assert listed is not None and listed.usd_per_hour == 0.526, "as listed for eastus"
    elsewhere = RentedTarget(kind="azure", instance="Standard_NC4as_T4_v3", regions=["West US 2"])
    price = target_prices(elsewhere, offers).price
    assert price is None or price.usd_per_hour != 0.1
