"""Refreshing prices, against a real HTTP server on the loopback that answers as Azure's price list does."""

import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from configs.hardware.catalog import catalog
from configs.hardware.prices import CATALOG_COLUMNS, read_catalog
from tasks.providers import price_lists
from tasks.providers.price_lists import TransientPriceError, aws_quote, refresh_prices
from tests.support.servers.price_server import INSTANCES, PAGES, PriceServer, serving


def refresh(server: PriceServer, path: Path, waits: list[float] | None = None) -> price_lists.Refreshed:
    sleep = ([] if waits is None else waits).append
    return refresh_prices("azure", path, ["eastus"], INSTANCES, azure_api=server.api, sleep=sleep)


def test_prices_of_several_pages_are_written_with_day_and_source(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "catalog" / "prices.csv"
    with serving(PAGES) as server:
        done = refresh(server, path)
    assert len(server.asked) == 3
    condition = "serviceName eq 'Virtual Machines' and armRegionName eq 'eastus' and priceType eq 'Consumption'"
    assert server.asked[0]["$filter"] == [condition]
    offers = {(offer.machine, offer.price.market): offer.price for offer in read_catalog(path)}
    assert {place: price.usd_per_hour for place, price in offers.items()} == {
        ("azure/Standard_NC4as_T4_v3", "on_demand"): 0.55,
        ("azure/Standard_NC4as_T4_v3", "spot"): 0.0655,
        ("azure/Standard_D4s_v5", "on_demand"): 0.193,  # of two that contradict, the dearer one
    }
    today = datetime.now(UTC).date()
    for price in offers.values():
        assert (price.region, price.source) == ("eastus", server.api) and abs(price.age_days(today) or 0) <= 1
    assert (done.written, done.kept) == (3, 0)
    assert done.skipped == {
        "not Linux": 1,
        "another market": 2,
        "not a price row": 1,
        "no price above 0, or no name": 2,
        "not in USD per hour": 1,
        "a second, cheaper price of the same": 1,
    }
    found = catalog(tmp_path / "cache")
    assert found.instance("azure/Standard_NC4as_T4_v3").usd_per_hour == 0.55
    assert catalog().instance("azure/Standard_NC4as_T4_v3").usd_per_hour == 0.526


OLD = f"""{",".join(CATALOG_COLUMNS)}
aws/g4dn.xlarge,us-east-1,on_demand,0.5,2026-01-01,old
azure/Standard_NC4as_T4_v3,eastus,on_demand,0.4,2026-01-01,old
azure/Standard_F8s_v2,eastus,on_demand,0.3,2026-01-01,old
azure/Standard_F8s_v2,westeurope,on_demand,0.35,2026-01-01,old
"""


def test_what_was_not_asked_about_stays_and_what_the_list_has_no_more_goes(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(OLD)
    assert len(read_catalog(path)) == 4
    with serving(PAGES) as server:
        done = refresh(server, path)
    assert (done.written, done.kept) == (3, 2)
    kept = [offer for offer in read_catalog(path) if offer.price.source == "old"]
    assert {(offer.machine, offer.price.region) for offer in kept} == {
        ("aws/g4dn.xlarge", "us-east-1"),
        ("azure/Standard_F8s_v2", "westeurope"),
    }
    assert sorted(file.name for file in tmp_path.iterdir()) == ["prices.csv", "prices.lock"]


def test_two_refreshes_at_once_keep_the_prices_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of AWS were lost where Azure's were written at the same moment."""
    path, other = tmp_path / "prices.csv", list[threading.Thread]()
    write = price_lists._write

    def while_another_refreshes(to: Path, offers: Any) -> None:
        if not other:
            other.append(threading.Thread(target=refresh_prices, args=("aws", path, ["eastus"], INSTANCES)))
            other[0].start()
            other[0].join(0.5)
        write(to, offers)

    def aws_quotes(region: str, wanted: Any) -> Any:
        yield price_lists._Quote("aws/g4dn.xlarge", region, "on_demand", 1.0)

    monkeypatch.setattr(price_lists, "aws_quotes", aws_quotes)
    monkeypatch.setattr(price_lists, "_write", while_another_refreshes)
    with serving(PAGES) as server:
        refresh(server, path)
    other[0].join()
    assert {str(offer.machine).partition("/")[0] for offer in read_catalog(path)} == {"aws", "azure"}


def test_a_busy_server_is_asked_again_as_late_as_it_says(tmp_path: Path) -> None:
    waits: list[float] = []
    busy = (429, {"Retry-After": "7"}, b"slow down")
    late = (503, {"Retry-After": "86400"}, b"")
    garbled = (200, {}, b"<html>")
    with serving(PAGES, [busy, late, garbled]) as server:
        done = refresh(server, tmp_path / "prices.csv", waits)
    assert done.written == 3 and waits == [7.0, 60.0, 4.0]


def test_a_server_that_stays_busy_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(OLD)
    waits: list[float] = []
    busy = [(429, {"Retry-After": "1"}, b"")] * 9
    stays_busy = pytest.raises(TransientPriceError, match="HTTP 429 Too Many Requests, 4 times")
    with serving(PAGES, busy) as server, stays_busy:
        refresh(server, path, waits)
    assert path.read_text() == OLD and waits == [1.0, 1.0, 1.0]


def test_a_failure_on_a_later_page_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(OLD)
    with (
        serving([PAGES[0], {"not": "a list"}]) as server,
        pytest.raises(TransientPriceError, match="has no list `Items`"),
    ):
        refresh(server, path)
    assert path.read_text() == OLD


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ((400, {}, b"bad filter"), "HTTP 400 Bad Request"),
        ((404, {}, b""), "HTTP 404 Not Found"),
        ((200, {}, b"[1]"), "got list, expected a JSON object"),
    ],
)
def test_what_will_not_pass_is_not_tried_again(
    tmp_path: Path, fault: tuple[int, dict[str, str], bytes], problem: str
) -> None:
    with serving(PAGES, [fault]) as server, pytest.raises(ValueError, match=problem):
        refresh(server, tmp_path / "prices.csv")
    assert len(server.asked) == 1 and not (tmp_path / "prices.csv").exists()


def test_no_price_at_all_is_an_error_and_not_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(OLD)
    with serving([[]]) as server, pytest.raises(ValueError, match=r"no prices of our 2 instances in eastus"):
        refresh(server, path)
    assert path.read_text() == OLD
    with serving(PAGES) as server, pytest.raises(ValueError, match=r"no prices of our 2 instances in westeurope"):
        refresh_prices("azure", path, ["eastus", "westeurope"], INSTANCES, azure_api=server.api)
    assert path.read_text() == OLD


def test_a_cache_that_cannot_be_read_is_not_overwritten_unseen(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("broken")
    with serving(PAGES) as server, pytest.raises(ValueError, match=r"prices\.csv: .*Remove the file to fetch it again"):
        refresh(server, path)
    assert path.read_text() == "broken"


def test_the_next_page_is_asked_at_the_same_server_only(tmp_path: Path) -> None:
    with serving(PAGES) as server:
        server.next_link = "http://elsewhere.invalid/?$skip=1"
        with pytest.raises(ValueError, match=r"the next page is on another server"):
            refresh(server, tmp_path / "prices.csv")


def test_azures_links_name_the_port_of_https(monkeypatch: pytest.MonkeyPatch) -> None:
    link = "https://prices.azure.com:443/api/retail/prices?$filter=serviceName%20eq%20'Virtual Machines'&$skip=100"
    asked: list[str] = []

    def ask(page: str, sleep: price_lists.Sleep) -> dict[str, Any]:
        asked.append(page)
        return {"Items": [], "NextPageLink": link if len(asked) == 1 else None}

    monkeypatch.setattr(price_lists, "_ask", ask)
    assert list(price_lists.azure_quotes("eastus", price_lists.AZURE_API, lambda _: None)) == []
    assert asked[1] == link.replace(" ", "%20")


@pytest.mark.parametrize("server", ["https://prices.azure.com:444", "http://prices.azure.com", "https://azure.com"])
def test_another_port_protocol_or_host_is_another_server(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_lists, "_ask", lambda *_: {"Items": [], "NextPageLink": f"{server}/api?$skip=100"})
    with pytest.raises(ValueError, match="the next page is on another server"):
        list(price_lists.azure_quotes("eastus", price_lists.AZURE_API, lambda _: None))


def test_a_region_that_is_none_and_no_region(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got region 'US East', expected one such as eastus"):
        refresh_prices("azure", tmp_path / "p.csv", ["US East"], INSTANCES)
    with pytest.raises(ValueError, match="no region given"):
        refresh_prices("azure", tmp_path / "p.csv", [], INSTANCES)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with serving(PAGES) as server:
        pass
    with pytest.raises(TransientPriceError, match="refused"):
        refresh(server, tmp_path / "prices.csv")


def product(*prices: str, unit: str = "Hrs") -> str:
    """A product of AWS's price list, as get_products returns it: JSON in a text."""
    dimensions = {
        f"SKU.TERM.{number}": {"unit": unit, "pricePerUnit": {"USD": usd}, "description": "$ per On Demand Linux"}
        for number, usd in enumerate(prices)
    }
    term = {"SKU.TERM": {"priceDimensions": dimensions, "effectiveDate": "2026-11-01T00:00:00Z"}}
    return json.dumps({"product": {"attributes": {"instanceType": "g4dn.xlarge"}}, "terms": {"OnDemand": term}})


def test_a_product_of_aws() -> None:
    quote = aws_quote(product("0.5260000000"), "aws/g4dn.xlarge", "us-east-1")
    assert not isinstance(quote, str) and (quote.usd_per_hour, quote.market) == (0.526, "on_demand")
    assert aws_quote(product("0.0000000000"), "aws/x", "r") == "no price above 0, or no name"
    assert aws_quote(product("1", "2"), "aws/x", "r") == "no single hourly price"
    assert aws_quote(product("1", unit="Quantity"), "aws/x", "r") == "no single hourly price"
    assert aws_quote("not JSON", "aws/x", "r") == aws_quote('{"terms": {}}', "aws/x", "r") == "not a price row"


def test_boto3_asks_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            first = "NextToken" not in asked[-1]
            listed = ["not JSON"] if first else [product("0.526")]
            body = json.dumps({"PriceList": listed, "FormatVersion": "aws_v1"} | ({"NextToken": "2"} if first else {}))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{http.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    try:
        done = refresh_prices("aws", tmp_path / "p.csv", ["us-east-1"], INSTANCES)
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
    assert (done.written, done.skipped) == (1, {"not a price row": 1}) and len(asked) == 2
    fields = {entry["Field"]: entry["Value"] for entry in asked[0]["Filters"]}
    assert fields["instanceType"] == "g4dn.xlarge" and fields["tenancy"] == "Shared"


def test_an_answer_that_breaks_off_is_asked_for_again(tmp_path: Path) -> None:
    with serving(PAGES) as server:
        server.faults = [(200, {"Content-Length": "9000"}, b'{"Items": [')]
        assert refresh(server, tmp_path / "prices.csv").written == 3
