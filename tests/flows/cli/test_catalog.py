"""`rankwise catalog` as a user calls it: what it prints, what it writes, and its exit codes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.hardware.prices import CATALOG_COLUMNS
from configs.spec.study import parse_study
from flows.cli.benchmark import _cheapest
from flows.cli.catalog import app
from flows.cli.nodes.listing import _instances
from flows.precheck import check_study
from tasks.providers import price_lists
from tests.support.servers.price_server import PAGES, serving


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def call(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_accelerators_as_a_table_and_as_json() -> None:
    code, table, _ = call("list", "accelerators")
    assert code == 0 and "bfloat16" in table.splitlines()[0]
    row = next(line.split() for line in table.splitlines() if line.startswith("h100-80gb "))
    assert row[1:9] == ["79.1", "3350", "66.9", "494.7", "989.4", "989.4", "1979", "1979"]
    code, text, _ = call("list", "accelerators", "--kind", "rocm", "--json")
    rows = json.loads(text)
    assert code == 0 and [row["name"] for row in rows] == [
        "mi250x-die",
        "mi250-die",
        "mi210",
        "mi300x",
        "mi300a",
        "mi325x",
        "mi350x",
        "mi355x",
    ]
    assert all(row["source"] and row["layers"] == ["shipped"] for row in rows)


def test_instances_with_their_price_or_where_it_is_known_instead() -> None:
    code, table, _ = call("list", "instances", "--provider", "azure", "--kind", "rocm")
    assert code == 0 and "unknown here (eastus2)" in table and "8 x mi300x" in table
    assert "48" in call("list", "instances", "--provider", "azure", "--kind", "rocm", "--region", "eastus2")[1]
    rows = json.loads(call("list", "instances", "--provider", "gcp", "--json")[1])
    n1 = next(row for row in rows if row["name"] == "gcp/n1-standard-8")
    assert n1["attachable"] == ["t4", "v100-16gb"] and n1["price"]["as_of"] == "2026-08-03"


def test_own_file_and_assignments_show_as_layers(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("links: {nvlink4: {latency_seconds: 2e-6, source: measured}}\naccelerators: {h200: {float8: 1e15}}")
    given = ("--catalog", str(own), "--set", "h200.memory_bytes=1e11")
    rows = json.loads(call("list", "accelerators", "--json", *given)[1])
    h200 = next(row for row in rows if row["name"] == "h200")
    assert h200["layers"] == ["shipped", "command line", "user"] and h200["memory_bytes"] == 1e11
    assert h200["link"]["latency_seconds"] == 2e-6
    own.write_text("accelerators: {h200: {float9: 1}}\nprices: []")
    code, _, error = call("list", "--catalog", str(own))
    assert code == 2 and "mine.yaml: accelerators.h200: unknown column 'float9'" in error


def test_links_and_processors() -> None:
    code, table, _ = call("list", "links")
    assert code == 0 and any(line.startswith("nvlink4 ") for line in table.splitlines())
    rows = json.loads(call("list", "cpus", "--json")[1])
    assert rows and all(row["clock_hertz"] > 1e9 and row["layers"] == ["shipped"] for row in rows)
    assert call("list", "links", "--provider", "aws")[::2] == (2, "--provider: cannot filter links. Leave it out\n")


def test_what_is_wrong_is_said_without_a_traceback() -> None:
    code, _, error = call("list", "instances", "--provider", "nix")
    assert (code, error) == (2, "instances: no entry with --provider nix\n")
    code, _, error = call("list", "--set", "h100.memory_bytes=0")
    assert code == 2 and error.startswith("h100.memory_bytes=0: memory_bytes: input should be greater than 0")


def test_refreshed_prices_win_and_are_listed_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(PAGES) as server:
        monkeypatch.setattr(price_lists, "AZURE_API", server.api)
        code, text, _ = call("refresh", "--provider", "azure")
    assert code == 0 and text.startswith("3 prices of azure in eastus written to") and "Linux" in text
    first = json.loads(call("list", "prices", "--provider", "azure", "--json")[1])[0]
    assert (first["name"], first["layer"], first["source"]) == ("azure/Standard_D4s_v5", "refreshed", server.api)
    rows = json.loads(call("list", "instances", "--provider", "azure", "--kind", "cuda", "--json")[1])
    assert rows[0]["price"]["usd_per_hour"] == 0.55


def test_a_refresh_that_fails_says_that_nothing_changed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving([{"not": "a list"}]) as server:
        monkeypatch.setattr(price_lists, "AZURE_API", server.api)
        code, _, error = call("refresh", "--provider", "azure")
    assert code == 1 and "prices unchanged. Try again later" in error and not cache.exists()
    with serving([[]]) as server:
        monkeypatch.setattr(price_lists, "AZURE_API", server.api)
        code, _, error = call("refresh", "--provider", "azure", "--region", "eastus")
    assert code == 1 and "no prices of our" in error


def test_refreshed_prices_are_those_of_studies_and_of_nodes_to_rent(cache: Path, tmp_path: Path) -> None:
    """A price that was refreshed must not be stale where money is decided on."""
    prices = cache / "catalog" / "prices.csv"
    prices.parent.mkdir(parents=True, exist_ok=True)
    row = "aws/g4dn.xlarge,us-east-1,on_demand,7.5,2026-11-10,fresh"
    prices.write_text(f"{','.join(CATALOG_COLUMNS)}\n{row}\n")
    work = {"workload": {"kind": "noop"}, "experiments": {"one": {"kind": "sweep", "over": {"items": [1]}}}}
    target = {"kind": "local", "machine": "aws/g4dn.xlarge/us-east-1"}
    plan = check_study(parse_study({"study": "s", "targets": [target], **work}), tmp_path, cache, tmp_path / "run")
    price = plan.prices["local"].price
    assert price is not None and (price.usd_per_hour, price.source) == (7.5, "fresh")
    listed = {node.name: node.usd_per_hour for node in _instances("GPU:T4, provider=aws")}
    assert listed["aws/g4dn.xlarge"] == 7.5 and listed["aws/g4dn.12xlarge"] != 7.5
    assert _cheapest("GPU:T4, provider=aws, count=1") != "aws/g4dn.xlarge"


def test_prices_of_a_provider_are_all_that_hold_for_it(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    entries = ['"*", usd_per_hour: 1', '"*/p5.*", usd_per_hour: 2', '"a*/x", usd_per_hour: 3', "gcp/x, usd_per_hour: 4"]
    own.write_text("prices:\n" + "".join(f"  - {{machine: {entry}}}\n" for entry in entries))
    rows = json.loads(call("list", "prices", "--provider", "aws", "--catalog", str(own), "--json")[1])
    assert [row["name"] for row in rows if row["layer"] == "user"] == ["*", "*/p5.*", "a*/x"]
    assert all(row["name"].startswith("aws/") for row in rows if row["layer"] != "user")


def test_prices_of_a_region_are_found_by_any_spelling_of_it() -> None:
    """As an instance's price is."""
    code, table, _ = call("list", "prices", "--provider", "azure", "--region", "East US")
    assert code == 0 and table == call("list", "prices", "--provider", "azure", "--region", "eastus")[1]


def test_a_price_that_would_hold_for_nothing_is_refused() -> None:
    code, _, error = call("list", "prices", "--set", "g4dn.*.usd_per_hour=0.3")
    assert code == 2 and "got 'g4dn.*', expected provider/instance, such as aws/g4dn.*, or *" in error
    rows = json.loads(call("list", "instances", "--json", "--set", "aws/g4dn.*.usd_per_hour=0.3")[1])
    assert next(row for row in rows if row["name"] == "aws/g4dn.xlarge")["price"]["usd_per_hour"] == 0.3
