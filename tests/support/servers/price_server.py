"""A price list on the loopback: a real HTTP server that answers page by page as Azure's does.

    with serving(PAGES) as server:
        refresh_prices("azure", path, ["eastus"], INSTANCES, azure_api=server.api)

Rows bear the keys of https://learn.microsoft.com/rest/api/cost-management/retail-prices; some are broken on purpose.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

INSTANCES = ("azure/Standard_NC4as_T4_v3", "azure/Standard_D4s_v5", "aws/g4dn.xlarge")


def item(name: str, usd: Any, sku: str | None = None, **more: Any) -> dict[str, Any]:
    """A row as the list has it; the keys are those of the API's documentation."""
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": usd,
        "unitPrice": usd,
        "armRegionName": "eastus",
        "location": "US East",
        "effectiveStartDate": "2026-01-01T00:00:00Z",
        "meterName": "NC4as T4 v3",
        "productName": "Virtual Machines NCasT4 v3 Series",
        "skuName": sku or name.removeprefix("Standard_").replace("_", " "),
        "serviceName": "Virtual Machines",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "armSkuName": name,
    } | more


PAGES: list[list[Any]] = [
    [
        item("Standard_NC4as_T4_v3", 0.55),
        item("Standard_NC4as_T4_v3", 0.73, productName="Virtual Machines NCasT4 v3 Series Windows"),
        item("Standard_NC4as_T4_v3", 0.11, "NC4as T4 v3 Low Priority"),
        item("Standard_Unheard_v9", 7.0),
    ],
    [
        item("Standard_NC4as_T4_v3", 0.0655, "NC4as T4 v3 Spot"),
        item("Standard_D4s_v5", 0, "D4s v5"),
        item("Standard_D4s_v5", "free", "D4s v5"),
        {"no": "row"},
        "no row at all",
        item("Standard_D4s_v5", 0.2, "D4s v5", currencyCode="EUR"),
    ],
    [item("Standard_D4s_v5", 0.193, "D4s v5"), item("Standard_D4s_v5", 0.192, "D4s v5")],
]


class PriceServer:
    """Answers page by page. `faults` are (status, headers, body) given before the true answers."""

    def __init__(self, pages: list[Any], faults: list[tuple[int, dict[str, str], bytes]] | None = None) -> None:
        self.pages, self.faults = pages, list(faults or ())
        self.asked: list[dict[str, list[str]]] = []
        self.next_link: str | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                server.asked.append(query)
                status, headers, body = server.faults.pop(0) if server.faults else (200, {}, server.page(query))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.api = f"http://127.0.0.1:{self.http.server_port}/api/retail/prices"

    def page(self, query: dict[str, list[str]]) -> bytes:
        number = int(query.get("$skip", ["0"])[0])
        condition = query["$filter"][0].replace(" ", "%20")
        last = number + 1 >= len(self.pages)
        following = self.next_link or f"{self.api}?$filter={condition}&$skip={number + 1}"
        body = {"BillingCurrency": "USD", "Items": self.pages[number], "NextPageLink": None if last else following}
        return json.dumps(body).encode()


@contextlib.contextmanager
def serving(pages: list[Any], faults: list[tuple[int, dict[str, str], bytes]] | None = None) -> Iterator[PriceServer]:
    server = PriceServer(pages, faults)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join()
        server.http.server_close()
