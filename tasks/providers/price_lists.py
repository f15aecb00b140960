"""Prices fetched from the clouds' own price lists into the cache, where they win over the shipped snapshot.

    refreshed = refresh_prices("azure", cache_folder() / "catalog" / "prices.csv", ["eastus"], instances)
    refreshed.written, refreshed.skipped      # prices of this provider in the file now; rows that were no prices

Azure: the retail price API, open to all (https://learn.microsoft.com/rest/api/cost-management/retail-prices).
AWS: the Price List Query API through boto3 with the user's credentials
(https://docs.aws.amazon.com/aws-cost-management/latest/APIReference/API_pricing_GetProducts.html).

The file is replaced as a whole or not at all: a refresh that fails leaves the old one as it was. A price of the
refreshed provider that the list has no more is removed; those of other providers stay. What a second attempt can mend
is a TransientPriceError, everything else a ValueError.
"""

import csv
import io
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import Request, urlopen

from configs.common.base import write_atomically
from configs.common.system.lock_files import turn_to_change
from configs.hardware.price_file import PricedProvider
from configs.hardware.prices import CATALOG_COLUMNS, Market, Offer, Price, read_catalog

AZURE_API = "https://prices.azure.com/api/retail/prices"
_TIMEOUT_SECONDS = 30.0
_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
_ATTEMPTS = 4
_LONGEST_WAIT_SECONDS = 60.0
_MOST_PAGES = 2000  # of 100 to 1000 prices; one region's virtual machines are some tens
Sleep = Callable[[float], None]


class TransientPriceError(Exception):
    """The network or the price list failed in a way that can pass; trying again is worth while."""


@dataclass(frozen=True)
class Refreshed:
    """What a refresh did. skipped: why rows were no prices of ours, and how many of each."""

    path: Path
    written: int
    kept: int
    skipped: dict[str, int]


@dataclass(frozen=True)
class _Quote:
    """One price of a list."""

    machine: str
    region: str
    market: Market
    usd_per_hour: float


def refresh_prices(
    provider: PricedProvider,
    path: Path,
    regions: Sequence[str],
    instances: Collection[str],
    *,
    azure_api: str | None = None,
    sleep: Sleep = time.sleep,
) -> Refreshed:
    """Ask a provider for the prices of `instances` (`provider/name`) in `regions`, and put them into the file.

    azure_api: another address than AZURE_API. sleep: waits, where the list asks to be asked later.
    Raises ValueError: no region, no price at all, credentials missing; TransientPriceError: try again;
    OSError: the file cannot be written.
    """
    if not regions:
        raise ValueError(f"{provider}: no region given. Use --region, such as --region eastus")
    api = azure_api or AZURE_API
    wanted = {name for name in instances if name.startswith(f"{provider}/")}
    found: dict[tuple[str, str, str], _Quote] = {}
    skipped: dict[str, int] = {}
    for region in regions:
        source = azure_quotes(region, api, sleep) if provider == "azure" else aws_quotes(region, wanted)
        for quote_or_reason in source:
            if isinstance(quote_or_reason, str):
                skipped[quote_or_reason] = skipped.get(quote_or_reason, 0) + 1
            elif quote_or_reason.machine in wanted:
                _take(found, quote_or_reason, skipped)
    without = [region for region in regions if not any(place[1] == region for place in found)]
    if without:
        raise ValueError(
            f"{provider}: no prices of our {len(wanted)} instances in {', '.join(without)}. "
            "Check the provider's spelling of the region"
        )
    as_of = datetime.now(UTC).date().isoformat()
    origin = api if provider == "azure" else "AWS Price List Query API"
    offers = [_offer(quote, as_of, origin) for quote in found.values()]
    with turn_to_change(path):
        kept = [offer for offer in _offers_there(path) if not _is_replaced(offer, provider, regions)]
        _write(path, [*kept, *offers])
    return Refreshed(path, len(offers), len(kept), skipped)


def azure_quotes(region: str, api: str, sleep: Sleep) -> Iterator[_Quote | str]:
    """The Linux prices of a region's virtual machines, on demand and spot; a text is why a row is none.

    The filter's values are case-sensitive. Low-priority machines are for Azure Batch only; Windows has rows of its own.
    """
    if not re.fullmatch(r"[a-z0-9]+", region):
        raise ValueError(f"azure: got region {region!r}, expected one such as eastus")
    conditions = f"serviceName eq 'Virtual Machines' and armRegionName eq '{region}' and priceType eq 'Consumption'"
    page: str | None = f"{api}?$filter={quote(conditions)}"
    for _ in range(_MOST_PAGES):
        if page is None:
            return
        answer = _ask(page, sleep)
        items = answer.get("Items")
        if not isinstance(items, list):
            raise TransientPriceError(f"{page}: the response has no list `Items`")
        for item in items:
            yield _azure_quote(item)
        page = _next_page(answer.get("NextPageLink"), page)
    raise ValueError(f"{api}: more than {_MOST_PAGES} result pages for {region}; aborted")


def _azure_quote(item: Any) -> _Quote | str:
    if not isinstance(item, dict):
        return "not a price row"
    product, sku = str(item.get("productName", "")), str(item.get("skuName", ""))
    if "Windows" in product or "Cloud Services" in product:
        return "not Linux"
    if "Low Priority" in sku or item.get("type") != "Consumption":
        return "another market"
    if item.get("currencyCode") != "USD" or item.get("unitOfMeasure") != "1 Hour":
        return "not in USD per hour"
    usd, name, region = item.get("retailPrice"), item.get("armSkuName"), item.get("armRegionName")
    if not name or not region or not isinstance(usd, int | float) or not math.isfinite(usd) or usd <= 0:
        return "no price above 0, or no name"
    return _Quote(f"azure/{name}", str(region), "spot" if sku.endswith(" Spot") else "on_demand", float(usd))


def aws_quotes(region: str, wanted: Collection[str]) -> Iterator[_Quote | str]:
    """On-demand prices of shared Linux machines, by unmodified boto3. Spot prices are not in that list."""
    import boto3  # type: ignore[import-untyped]
    import botocore.exceptions  # type: ignore[import-untyped]

    fixed = {
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "regionCode": region,
    }
    try:
        # The list is served from a few regions only, whatever region it is asked about.
        pages = boto3.client("pricing", region_name="us-east-1").get_paginator("get_products")
        for machine in sorted(wanted):
            filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in fixed.items()]
            filters.append({"Type": "TERM_MATCH", "Field": "instanceType", "Value": machine.partition("/")[2]})
            for page in pages.paginate(ServiceCode="AmazonEC2", Filters=filters, FormatVersion="aws_v1"):
                for product in page["PriceList"]:
                    yield aws_quote(product, machine, region)
    except (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError) as error:
        raise ValueError(
            f"aws: {error}. The price list requires credentials with permission to call pricing"
        ) from error
    except (botocore.exceptions.ConnectionError, botocore.exceptions.HTTPClientError) as error:
        raise TransientPriceError(f"aws: {error}") from error
    except botocore.exceptions.ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if "Throttl" in code or "InternalError" in code:
            raise TransientPriceError(f"aws: {error}") from error
        raise ValueError(f"aws: {error}") from error
    except botocore.exceptions.BotoCoreError as error:
        raise ValueError(f"aws: {error}") from error


def aws_quote(product: Any, machine: str, region: str) -> _Quote | str:
    """The on-demand price of one product of the list, which is JSON in a text."""
    try:
        terms = json.loads(product)["terms"]["OnDemand"]
        dimensions = [item for term in terms.values() for item in term["priceDimensions"].values()]
        hourly = [item for item in dimensions if item["unit"] == "Hrs"]
        prices = {float(item["pricePerUnit"]["USD"]) for item in hourly}
    except (ValueError, KeyError, TypeError, AttributeError):
        return "not a price row"
    if len(prices) != 1:
        return "no single hourly price"
    usd = prices.pop()
    if not math.isfinite(usd) or usd <= 0:
        return "no price above 0, or no name"
    return _Quote(machine, region, "on_demand", usd)


def _take(found: dict[tuple[str, str, str], _Quote], quote_: _Quote, skipped: dict[str, int]) -> None:
    """Of two prices for the same thing neither is believed over the other: the dearer one counts, and it is said."""
    place = (quote_.machine, quote_.region, quote_.market)
    other = found.get(place)
    if other is not None and other.usd_per_hour != quote_.usd_per_hour:
        skipped["a second, cheaper price of the same"] = skipped.get("a second, cheaper price of the same", 0) + 1
    if other is None or quote_.usd_per_hour > other.usd_per_hour:
        found[place] = quote_


def _ask(url: str, sleep: Sleep) -> dict[str, Any]:
    """One page as JSON. Asked again where the server says that it may pass, as late as it says."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with urlopen(Request(url, headers={"Accept": "application/json"}), timeout=_TIMEOUT_SECONDS) as answer:
                data = json.load(answer)
        except HTTPError as error:
            error.close()  # it holds the connection
            if error.code not in _PASSING_STATUS:
                raise ValueError(f"{url}: HTTP {error.code} {error.reason}") from error
            if attempt == _ATTEMPTS:
                raise TransientPriceError(f"{url}: HTTP {error.code} {error.reason}, {attempt} times") from error
            sleep(_wait_seconds(error.headers.get("Retry-After"), attempt))
        except (URLError, OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            if attempt == _ATTEMPTS:
                raise TransientPriceError(f"{url}: {reason}") from error
            sleep(_wait_seconds(None, attempt))
        else:
            if isinstance(data, dict):
                return data
            raise ValueError(f"{url}: got {type(data).__name__}, expected a JSON object")
    raise AssertionError("the last attempt returns or raises")


def _wait_seconds(asked: str | None, attempt: int) -> float:
    """What Retry-After asks for (seconds or a date), else 1, 2, 4 seconds; never longer than a minute."""
    if asked is not None:
        try:
            wait = float(asked)
        except ValueError:
            try:
                wait = (parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds()
            except (ValueError, TypeError):
                wait = 2.0 ** (attempt - 1)
        return min(max(wait, 0.0), _LONGEST_WAIT_SECONDS) if math.isfinite(wait) else _LONGEST_WAIT_SECONDS
    return 2.0 ** (attempt - 1)


def _next_page(link: Any, page: str) -> str | None:
    """The next page's address, at the same server only. Azure's links name the port that https has anyway."""
    if not link:
        return None
    address = urljoin(page, str(link).replace(" ", "%20"))
    if _server(address) != _server(page):
        raise ValueError(f"{page}: the next page is on another server, {address}")
    return address


def _server(address: str) -> tuple[str, str | None, int | None]:
    """Protocol, host and port of an address; None: no host. Raises ValueError for a port that is none."""
    parts = urlsplit(address)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _is_replaced(offer: Offer, provider: str, regions: Sequence[str]) -> bool:
    """Whether the list speaks of such prices, so that what it has no more is gone."""
    spoken_of = offer.price.market in (("on_demand", "spot") if provider == "azure" else ("on_demand",))
    return spoken_of and (offer.machine or "").startswith(f"{provider}/") and offer.price.region in regions


def _offers_there(path: Path) -> tuple[Offer, ...]:
    """Those of the refreshed file. A file that cannot be read is a ValueError: it is not overwritten unseen."""
    try:
        return read_catalog(path) if path.exists() else ()
    except ValueError as error:
        raise ValueError(f"{error}. Remove the file to fetch it again") from error


def _offer(quote_: _Quote, as_of: str, source: str) -> Offer:
    price = Price(
        usd_per_hour=quote_.usd_per_hour, source=source, as_of=as_of, market=quote_.market, region=quote_.region
    )
    return Offer(machine=quote_.machine, price=price)


def _write(path: Path, offers: Sequence[Offer]) -> None:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(CATALOG_COLUMNS)
    for offer in sorted(offers, key=lambda offer: (offer.machine or "", offer.price.market, offer.price.region or "")):
        price = offer.price
        rows.writerow([offer.machine, price.region, price.market, repr(price.usd_per_hour), price.as_of, price.source])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())
