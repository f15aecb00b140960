"""`rankwise catalog`: list accelerators, instances, links, CPUs and prices with their sources, and refresh prices.

rankwise catalog list accelerators
rankwise catalog list instances --provider aws --kind cuda --json
rankwise catalog list links | cpus
rankwise catalog refresh --provider azure --region eastus
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from configs.common.printable import plural
from configs.hardware.hardware import AcceleratorKind
from configs.hardware.price_file import PricedProvider
from flows.cli.tables import print_table

if TYPE_CHECKING:
    from configs.hardware.catalog import HardwareCatalog

CatalogKind = Literal["accelerators", "instances", "prices", "links", "cpus"]
DONE, OTHER_ERROR = 0, 1
_NARROWED_BY = {
    "accelerators": ("--kind",),
    "instances": ("--provider", "--kind", "--region"),
    "prices": ("--provider", "--region"),
    "links": (),
    "cpus": (),
}

app = typer.Typer(help="List known hardware and prices with their sources, and refresh prices.", no_args_is_help=True)


@app.command("list")
def list_command(
    context: typer.Context,
    kind: Annotated[CatalogKind, typer.Argument(help="table to list")] = "accelerators",
    provider: Annotated[
        str | None, typer.Option(metavar="NAME", help="only this provider: aws, gcp, azure ...")
    ] = None,
    device: Annotated[AcceleratorKind | None, typer.Option("--kind", help="only this kind of accelerator")] = None,
    region: Annotated[
        str | None, typer.Option(metavar="REGION", help="region of prices  [default: the provider's home region]")
    ] = None,
    own: Annotated[
        Path | None, typer.Option("--catalog", metavar="FILE.yaml", help="user catalog of hardware and prices")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME.COLUMN=VALUE", help="override one figure")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with sources")] = False,
) -> None:
    """List accelerators, instances, prices, links or CPUs."""
    from flows.cli.errors import WRONG_STUDY, guarded, plainly

    work = lambda: plainly(  # noqa: E731
        lambda: catalog_list(kind, provider, device, region, own, assignments or (), as_json)
    )
    subject, debug = Path(own.name) if own else Path(), bool((context.obj or {}).get("debug"))
    raise typer.Exit(guarded(work, subject, debug, wrong_value=WRONG_STUDY))


@app.command("refresh")
def refresh_command(
    context: typer.Context,
    provider: Annotated[PricedProvider, typer.Option(help="provider of the price list")],
    region: Annotated[
        list[str] | None, typer.Option(metavar="REGION", help="may be repeated  [default: the provider's home region]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Fetch current prices of the listed instances into the cache; they override the shipped ones."""
    from flows.cli.errors import guarded, plainly

    work = lambda: plainly(lambda: catalog_refresh(provider, region or (), as_json))  # noqa: E731
    raise typer.Exit(guarded(work, Path(), bool((context.obj or {}).get("debug"))))


def catalog_list(
    kind: CatalogKind,
    provider: str | None = None,
    device: AcceleratorKind | None = None,
    region: str | None = None,
    own: Path | None = None,
    assignments: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Print a table (or JSON) of all layers and return the exit code. Raises ValueError for a wrong file or figure."""
    from configs.hardware.catalog import catalog
    from flows.folders import cache_folder

    given = {"--provider": provider, "--kind": device, "--region": region}
    asked = {name: value for name, value in given.items() if value is not None}
    for name in asked:
        if name not in _NARROWED_BY[kind]:
            raise ValueError(f"{name}: cannot filter {kind}. Leave it out")
    found = catalog(cache_folder(), own, assignments)
    if kind == "prices":
        rows = price_rows(found, provider, region)
    elif kind == "instances":
        rows = instance_rows(found, provider, device, region)
    elif kind == "accelerators":
        rows = accelerator_rows(found, device)
    else:
        rows = figure_rows(found, kind)
    if not rows:
        raise ValueError(f"{kind}: no entry with {', '.join(f'{name} {value}' for name, value in asked.items())}")
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        columns = _COLUMNS[kind]
        table = [tuple(show(row) for show in columns.values()) for row in rows]
        print_table(tuple(columns), table, words=[name for name in columns if name in _TEXT])
        if kind in _NOTES:
            print(_NOTES[kind])
    return DONE


def catalog_refresh(provider: PricedProvider, regions: Sequence[str] = (), as_json: bool = False) -> int:
    """Refresh the cached prices of a provider; returns the exit code. Raises ValueError, OSError."""
    import sys

    from configs.hardware.catalog import HOME_REGIONS, catalog
    from flows.folders import cache_folder
    from tasks.providers.price_lists import TransientPriceError, refresh_prices

    path = cache_folder() / "catalog" / "prices.csv"
    places = list(dict.fromkeys(regions)) or [HOME_REGIONS[provider]]
    try:
        done = refresh_prices(provider, path, places, catalog().names("instances"))
    except TransientPriceError as error:
        print(f"{error}\n{path}: prices unchanged. Try again later", file=sys.stderr)
        return OTHER_ERROR
    if as_json:
        print(json.dumps({"path": str(path), "written": done.written, "kept": done.kept, "skipped": done.skipped}))
        return DONE
    print(
        f"{plural(done.written, 'price')} of {provider} in {', '.join(places)} written to {path}, "
        f"{plural(done.kept, 'other')} kept"
    )
    for reason, count in sorted(done.skipped.items()):
        print(f"  {plural(count, 'row')} skipped: {reason}")
    return DONE


def accelerator_rows(found: "HardwareCatalog", device: str | None = None) -> list[dict[str, Any]]:
    """Return the figures of each accelerator with their layers."""
    return [
        {**item.model_dump(mode="json", exclude={"operators", "framework_bytes"}), "layers": _layers(found, name)}
        for name, item in found.accelerators().items()
        if device is None or item.kind == device
    ]


def instance_rows(
    found: "HardwareCatalog", provider: str | None = None, device: str | None = None, region: str | None = None
) -> list[dict[str, Any]]:
    """Return the figures of each instance; the price is None if unknown in that region."""
    rows = []
    for name in found.names("instances"):
        row, price = found.instance_row(name), found.price(name, region)
        other = provider is not None and not name.startswith(f"{provider}/")
        if other or (not row.accelerator and not row.cpu):
            continue
        machine = found.listed_instance(name, region)
        if device is not None and machine.accelerator.kind != device:
            continue
        rows.append(
            {
                "name": name,
                "accelerator": machine.accelerator.name,
                "accelerators": machine.accelerators,
                "attachable": [item for item in row.attachable.split(";") if item],
                "kind": machine.accelerator.kind,
                "vcpus": row.vcpus,
                "host_memory_bytes": row.host_memory_bytes,
                "network": row.network,
                "network_bits_per_second": row.network_bits_per_second,
                "storage_bytes": row.storage_bytes,
                "retired": None if row.retired is None else row.retired.isoformat(),
                "successor": row.successor,
                "price": None if price is None else price.model_dump(mode="json"),
                "priced_in": sorted(_regions(found, name)),
                "source": row.source,
                "as_of": None if row.as_of is None else row.as_of.isoformat(),
                "layers": _layers(found, name, "instances"),
            }
        )
    return rows


def price_rows(
    found: "HardwareCatalog", provider: str | None = None, region: str | None = None
) -> list[dict[str, Any]]:
    """Return all prices with their layers, in order of precedence; the region in any spelling of it."""
    from configs.targets.rented import region_name

    return [
        {"name": offer.machine or f"target {offer.target}", "layer": layer, **offer.price.model_dump(mode="json")}
        for layer, offer in found.offers()
        if (provider is None or offer.is_of_provider(provider))
        and (region is None or offer.price.region is None or region_name(offer.price.region) == region_name(region))
    ]


def figure_rows(found: "HardwareCatalog", table: Literal["links", "cpus"]) -> list[dict[str, Any]]:
    """Return the figures of each link or processor with their layers; unknown figures are None."""
    from configs.hardware.catalog_layers import as_row
    from configs.hardware.catalog_rows import TABLES

    rows = []
    for name in found.names(table):
        row = as_row(TABLES[table], f"{table}: {name}", found.figures(table, name))
        rows.append({"name": name, **row.model_dump(mode="json"), "layers": _layers(found, name, table)})
    return rows


def _layers(found: "HardwareCatalog", name: str, table: str = "accelerators") -> list[str]:
    """Return the layers that contribute to an entry, lowest first."""
    return list(dict.fromkeys(figure.layer for figure in found.figures(table, name).values()))


def _regions(found: "HardwareCatalog", name: str) -> set[str]:
    """Return the regions with a known on-demand price of an instance."""
    return {
        offer.price.region
        for _, offer in found.offers()
        if offer.machine == name and offer.price.market == "on_demand" and offer.price.region is not None
    }


def _scaled(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.4g}"


def _teraflops(row: dict[str, Any], form: str) -> str:
    peak = row["peak_flops"].get(form)
    return "-" if peak is None else f"{peak / 1e12:.4g}"


def _price(row: dict[str, Any]) -> str:
    """Return the price in dollars, or the regions where it is known."""
    if row["retired"]:
        successor = f", use {row['successor'].partition('/')[2]}" if row["successor"] else ""
        return f"retired {row['retired']}{successor}"
    if row["price"] is not None:
        return f"{row['price']['usd_per_hour']:.4g}"
    return f"unknown here ({', '.join(row['priced_in'])})" if row["priced_in"] else "unknown"


_Columns = dict[str, Any]
_ACCELERATOR: _Columns = {
    "name": lambda row: row["name"],
    "memory GiB": lambda row: f"{row['memory_bytes'] / 2**30:.1f}",
    "GB/s": lambda row: f"{row['bytes_per_second'] / 1e9:.0f}",
    "float32": lambda row: _teraflops(row, "float32"),
    "tfloat32": lambda row: _teraflops(row, "tfloat32"),
    "bfloat16": lambda row: _teraflops(row, "bfloat16"),
    "float16": lambda row: _teraflops(row, "float16"),
    "float8": lambda row: _teraflops(row, "float8"),
    "int8": lambda row: _teraflops(row, "int8"),
    "link": lambda row: "-" if row["link"] is None else row["link"]["name"],
    "link GB/s": lambda row: "-" if row["link"] is None else f"{row['link']['bytes_per_second'] / 1e9:.4g}",
    "layers": lambda row: ", ".join(row["layers"]),
}
_INSTANCE: _Columns = {
    "name": lambda row: row["name"],
    "accelerators": lambda row: f"{row['accelerators']} x {row['accelerator']}",
    "can have": lambda row: ", ".join(row["attachable"]),
    "vCPUs": lambda row: str(row["vcpus"]),
    "memory GiB": lambda row: f"{row['host_memory_bytes'] / 2**30:.4g}",
    "Gbit/s": lambda row: (
        "-" if row["network_bits_per_second"] is None else f"{row['network_bits_per_second'] / 1e9:.4g}"
    ),
    "network": lambda row: row["network"] or "-",
    "NVMe TB": lambda row: "-" if row["storage_bytes"] is None else f"{row['storage_bytes'] / 1e12:.3g}",
    "USD/h": _price,
    "in": lambda row: "" if row["price"] is None else row["price"]["region"] or "",
    "as of": lambda row: "" if row["price"] is None else row["price"]["as_of"] or "",
    "layers": lambda row: ", ".join(row["layers"]),
}
_PRICE: _Columns = {
    "name": lambda row: row["name"],
    "region": lambda row: row["region"] or "any",
    "market": lambda row: row["market"],
    "USD/h": lambda row: f"{row['usd_per_hour']:.6g}",
    "as of": lambda row: row["as_of"] or "",
    "layer": lambda row: row["layer"],
    "source": lambda row: row["source"],
}
_LINK: _Columns = {
    "name": lambda row: row["name"],
    "GB/s one way": lambda row: _scaled(row["bytes_per_second"], 1e9),
    "latency us": lambda row: _scaled(row["latency_seconds"], 1e-6),
    "layers": lambda row: ", ".join(row["layers"]),
}
_CPU: _Columns = {
    "name": lambda row: row["name"],
    "cores": lambda row: str(row["cores"]),
    "GHz": lambda row: _scaled(row["clock_hertz"], 1e9),
    "GB/s a socket": lambda row: _scaled(row["bytes_per_second"], 1e9),
    "float32": lambda row: _scaled(row["float32"], 1),
    "bfloat16": lambda row: _scaled(row["bfloat16"], 1),
    "int8": lambda row: _scaled(row["int8"], 1),
    "layers": lambda row: ", ".join(row["layers"]),
}
_COLUMNS: dict[CatalogKind, _Columns] = {
    "accelerators": _ACCELERATOR, "instances": _INSTANCE, "prices": _PRICE, "links": _LINK, "cpus": _CPU,
}  # fmt: skip
_TEXT = ("name", "accelerators", "can have", "network", "link", "layers", "layer", "region", "market", "in", "source")
_NOTES: dict[CatalogKind, str] = {
    "accelerators": "float32 to int8: dense peak TFLOP/s (int8: TOP/s); link: one direction; sources with --json",
    "links": "a network's rate is a figure of the instance; sources with --json",
    "cpus": "float32 to int8: FLOP per cycle and core; sources with --json",
}
