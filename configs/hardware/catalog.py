"""The catalog of accelerators, instances and prices.

    accelerator("h100-80gb")                  # also "H100-SXM", or as nvidia-smi prints it
    instance("aws/p5.48xlarge")               # a Machine, at the price of the provider's home region
    mine = catalog(cache_folder(), Path("hardware.yaml"), ["h100-80gb.memory_bytes=84e9"])
    mine.instance("gcp/n1-standard-8+t4", "us-west1"), mine.figures("accelerators", "h100-80gb")["float16"].layer

Four layers, later ones win, figure by figure: what is shipped in `configs/catalog/*.csv`, the same files in
`<cache>/catalog/`, the user's YAML file (`configs.hardware.catalog_file`), single figures on the command line.
Module-level functions know the shipped layer only.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from configs.hardware.catalog_layers import (
    CatalogFigure,
    CatalogLayer,
    Tables,
    as_row,
    figures_of,
    laid_over,
    read_tables,
    shipped_tables,
)
from configs.hardware.catalog_rows import FORMATS, TABLES, AcceleratorRow, CpuRow, InstanceRow, LinkRow
from configs.hardware.hardware import Accelerator, AcceleratorKind, Link, Machine, NumberFormat
from configs.hardware.prices import Offer, Price, machine_parts, read_catalog, refreshed_offers, target_prices
from configs.targets.target import LocalTarget

HOME_REGIONS = {"aws": "us-east-1", "gcp": "us-central1", "azure": "eastus"}
"""Where an instance is priced when no region is named. A price of another region is never taken instead."""
Offers = tuple[tuple[CatalogLayer, Offer], ...]
_SLICE = re.compile(r"(^|[-_ ])\d+g\.\d+gb")
"""In the name of a MIG device: `NVIDIA A100-SXM4-80GB MIG 3g.40gb`, and `a100_3g.40gb` as Slurm calls its type."""


class HardwareCatalog:
    """All layers laid over each other. Names are forgiving: any case, aliases, as a driver prints them.

    own: the user's prices, the command line's first. listed: those of the catalogs, the refreshed ones first.
    """

    def __init__(self, tables: Tables, own: Offers = (), listed: Offers = ()) -> None:
        self._tables = tables
        self._own = own
        self._listed = listed
        self._names = {table: _spellings(tables, table) for table in tables}
        self._accelerators: dict[str, Accelerator] = {}
        self._machines: dict[tuple[str, str | None], Machine] = {}

    def accelerator(self, name: str) -> Accelerator:
        """A GPU by name, alias or as its driver calls it. Raises ValueError with the nearest names."""
        known = self.name_of("accelerators", name)
        if known not in self._accelerators:
            self._accelerators[known] = self._make_accelerator(known)
        return self._accelerators[known]

    def accelerators(self) -> dict[str, Accelerator]:
        """All GPUs by name."""
        return {name: self.accelerator(name) for name in self._tables["accelerators"]}

    def instance(self, name: str, region: str | None = None) -> Machine:
        """An instance as `provider/instance`, with `/region` or `+t4`, `+2xt4` behind where wanted.

        Its accelerators share the node's network equally. Price: on demand, in the region (none named: the
        provider's home region); None where it is not known. A CPU-only instance is one rank on all its cores.
        Raises ValueError: an unknown name, an accelerator that cannot be attached, a retired size (with its successor).
        """
        self.refuse_retired(name)
        return self.listed_instance(name, region)

    def listed_instance(self, name: str, region: str | None = None) -> Machine:
        """As `instance`, of a retired size too: to list it, not to use it."""
        if (name, region) not in self._machines:
            self._machines[name, region] = self._make_machine(name, region)
        return self._machines[name, region]

    def instances(self, provider: str | None = None, kind: AcceleratorKind | None = None) -> dict[str, Machine]:
        """All instances by name, of one provider or with one kind of accelerator; unattached and retired ones are left
        out.
        """
        found: dict[str, Machine] = {}
        for name in self._tables["instances"]:
            row = self._instance_row(name)
            other = provider is not None and not name.startswith(f"{provider}/")
            if other or row.retired or (not row.accelerator and not row.cpu):
                continue
            machine = self.instance(name)
            if kind is None or machine.accelerator.kind == kind:
                found[name] = machine
        return found

    def price(self, name: str, region: str | None = None) -> Price | None:
        """What an hour costs on demand, by the user's own rate where there is one. None: not known there."""
        known, attached, named_region = self._split(name)
        full, provider = _written(known, attached), known.split("/")[0]
        place = region or named_region or HOME_REGIONS.get(provider)
        target = LocalTarget(machine=f"{full}/{place}" if place else full)
        own = [offer for _, offer in self._own if offer.price.market == "on_demand"]
        return target_prices(target, own, [offer for _, offer in self._listed]).price

    def region_in(self, name: str) -> str | None:
        """The region that an instance's name ends with; None: it names none."""
        return self._split(name)[2]

    def offers(self) -> Offers:
        """Return all prices with their layers, in order of precedence."""
        return (*self._own, *self._listed)

    def figures(self, table: str, name: str) -> dict[str, CatalogFigure]:
        """The figures of one entry, each with its layer, source and date."""
        return dict(self._tables[table][self.name_of(table, name)])

    def refuse_retired(self, name: str) -> None:
        """Raise ValueError for a size that its provider no longer rents, with the one that it names instead."""
        known = self._split(name)[0]
        row = self._instance_row(known)
        if row.retired is not None:
            remedy = f"Use {row.successor}" if row.successor else "Use another size"
            raise ValueError(f"instance {known}: retired by its provider on {row.retired.isoformat()}. {remedy}")

    def names(self, table: str) -> list[str]:
        """The names in a table: links, accelerators, cpus, instances."""
        return list(self._tables[table])

    def instance_row(self, name: str) -> InstanceRow:
        """What the table of instances says of one, such as its vcpus."""
        return self._instance_row(self._split(name)[0])

    def name_of(self, table: str, name: str) -> str:
        """The name in the table that a user's spelling means. Raises ValueError with the nearest names."""
        spelling = _plain(name)
        found = self._names[table].get(spelling, [])
        what = table.removesuffix("s")
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{what} {name!r} is ambiguous; use one of: {', '.join(found)}")
        known = self._names[table]
        if table == "accelerators" and _SLICE.search(spelling):
            raise ValueError(
                f"unknown accelerator {name!r}: a slice of a divided GPU (MIG); the catalog has whole GPUs"
            )
        close = [known[match][0] for match in get_close_matches(spelling, list(known), n=3, cutoff=0.6)]
        hint = f"did you mean {' or '.join(dict.fromkeys(close))}?" if close else f"known: {_some(known)}"
        raise ValueError(f"unknown {what} {name!r}; {hint}")

    def _make_accelerator(self, name: str) -> Accelerator:
        row = as_row(AcceleratorRow, f"accelerators: {name}", self._tables["accelerators"][name])
        known: dict[NumberFormat, float | None] = {form: getattr(row, form) for form in FORMATS}
        return Accelerator(
            name=name,
            title=row.title,
            kind=row.kind,
            memory_bytes=row.memory_bytes,
            bytes_per_second=row.bytes_per_second,
            peak_flops={form: peak for form, peak in known.items() if peak is not None},
            link=None if row.link is None else self._link(row.link, f"accelerators: {name}"),
            link_domain=row.link_domain,
            kernel_seconds=row.kernel_seconds,
            source=row.source,
            as_of=None if row.as_of is None else row.as_of.isoformat(),
        )

    def _make_machine(self, name: str, region: str | None) -> Machine:
        known, attached, named_region = self._split(name)
        row = self._instance_row(known)
        device, count = self._device(known, row, attached)
        full = _written(known, attached)
        price = self.price(full, region or named_region)
        return Machine(
            name=full,
            accelerator=device,
            accelerators=count,
            inside=None if row.inside is None else self._link(row.inside, f"instances: {known}"),
            between=self._between(known, row, count),
            host_memory_bytes=row.host_memory_bytes,
            storage_bytes=row.storage_bytes,
            usd_per_hour=None if price is None else price.usd_per_hour,
        )

    def _link(self, name: str, where: str) -> Link:
        row = self._link_row(name, where)
        if row.bytes_per_second is None:
            raise ValueError(f"{where}: link {name} is a network without bytes_per_second. Use it under `network`")
        return Link(name=name, latency_seconds=row.latency_seconds, bytes_per_second=row.bytes_per_second)

    def _link_row(self, name: str, where: str) -> LinkRow:
        if name not in self._tables["links"]:
            raise ValueError(f"{where}: unknown link {name!r}; known: {', '.join(self._tables['links'])}")
        return as_row(LinkRow, f"links: {name}", self._tables["links"][name])

    def _between(self, name: str, row: InstanceRow, ranks: int) -> Link | None:
        """The share that one rank has of the node's network."""
        if row.network is None or row.network_bits_per_second is None:
            return None
        link = self._link_row(row.network, f"instances: {name}")
        bytes_per_second = row.network_bits_per_second / 8 / ranks
        return Link(name=row.network, latency_seconds=link.latency_seconds, bytes_per_second=bytes_per_second)

    def _instance_row(self, name: str) -> InstanceRow:
        return as_row(InstanceRow, f"instances: {name}", self._tables["instances"][name])

    def _split(self, name: str) -> tuple[str, tuple[int, str] | None, str | None]:
        """A user's `gcp/n1-standard-8+2xt4/us-west1` as known name, (count, accelerator) and region."""
        parts = name.split("/")
        region = parts.pop() if len(parts) == 3 else None
        machine, *attached = machine_parts("/".join(parts) if len(parts) > 1 else f"/{name}")
        known = self.name_of("instances", machine[0].removeprefix("/"))
        if not attached:
            return known, None, region
        if len(attached) > 1:
            raise ValueError(f"{name}: expected accelerators of one type, such as {known}+2xt4")
        (spelling, count) = attached[0][0].split("/")[1], attached[0][1]
        can_have = [item.strip() for item in self._instance_row(known).attachable.split(";")]
        meant = [item for item in self._names["accelerators"].get(_plain(spelling), ()) if item in can_have]
        return known, (count, meant[0] if len(meant) == 1 else self.name_of("accelerators", spelling)), region

    def _device(self, name: str, row: InstanceRow, attached: tuple[int, str] | None) -> tuple[Accelerator, int]:
        """What computes in an instance, and how many of it."""
        can_have = [item.strip() for item in row.attachable.split(";") if item.strip()]
        if attached is not None:
            if attached[1] not in can_have:
                takes = f"use one of: {', '.join(can_have)}" if can_have else "it supports none"
                raise ValueError(f"{name}: {attached[1]} cannot be attached; {takes}")
            return self.accelerator(attached[1]), attached[0]
        if row.accelerator is not None:
            return self.accelerator(row.accelerator), row.accelerators or 1
        if row.cpu is None:
            choice = f". Attach one, such as {name}+{can_have[0]}" if can_have else ""
            raise ValueError(f"{name}: no accelerator or CPU in the catalog{choice}")
        return self._processor(name, row), 1

    def _processor(self, name: str, row: InstanceRow) -> Accelerator:
        """The cores of an instance as one accelerator: an estimate from cores, clock and width, and it says so."""
        assert row.cpu is not None
        if row.cpu not in self._tables["cpus"]:
            raise ValueError(f"instances: {name}: unknown cpu {row.cpu!r}")
        cpu = as_row(CpuRow, f"cpus: {row.cpu}", self._tables["cpus"][row.cpu])
        cores = row.vcpus / cpu.threads_per_core
        rate = cores * cpu.clock_hertz
        widths: dict[NumberFormat, float | None] = {
            "float32": cpu.float32,
            "bfloat16": cpu.bfloat16,
            "int8": cpu.int8,
        }
        return Accelerator(
            name=f"{row.cpu}-{cores:g}c",
            title=f"{cores:g} cores of {cpu.title}",
            kind="cpu",
            memory_bytes=row.host_memory_bytes,
            bytes_per_second=cpu.bytes_per_second * cores / cpu.cores,
            peak_flops={form: rate * width for form, width in widths.items() if width is not None},
            kernel_seconds=cpu.kernel_seconds,
            source=f"estimate, not measured: {cores:g} cores x {cpu.clock_hertz / 1e9:g} GHz x FLOP a cycle, and the "
            f"cores' share of the socket's memory bandwidth; {cpu.source}",
            as_of=None if cpu.as_of is None else cpu.as_of.isoformat(),
        )


def catalog(cache: Path | None = None, own: Path | None = None, assignments: Sequence[str] = ()) -> HardwareCatalog:
    """All layers. cache: the user's cache folder; own: his catalog file; assignments: `name.column=value`.

    Raises ValueError (WrongArgument for the user's file) naming the file and the field.
    """
    tables = shipped_tables()
    listed: Offers = tuple(("shipped", offer) for offer in read_catalog())
    mine: Offers = ()
    if cache is not None:
        tables = laid_over(tables, read_tables(cache / "catalog", "refreshed"))
        listed = (*(("refreshed", offer) for offer in refreshed_offers(cache)), *listed)
    if own is not None:
        from configs.common.base import WrongArgument
        from configs.hardware.catalog_file import read_catalog_file
        from configs.spec.study import StudyError

        try:
            added, offers = read_catalog_file(own)
        except StudyError as error:  # the catalog is at fault, not a study
            raise WrongArgument(str(error)) from error
        tables = laid_over(tables, _by_known_names(added, tables, own.name))
        mine = tuple(("user", offer) for offer in offers)
    for assignment in assignments:
        known = HardwareCatalog(tables)
        tables, offer = _assigned(known, tables, assignment)
        mine = (("command line", offer), *mine) if offer is not None else mine
    return HardwareCatalog(tables, mine, listed)


def _assigned(known: HardwareCatalog, tables: Tables, assignment: str) -> tuple[Tables, Offer | None]:
    """One `name.column=value` of the command line: changed tables, or a price for `usd_per_hour`."""
    dotted, equals, value = assignment.partition("=")
    name, dot, column = dotted.strip().rpartition(".")
    if not equals or not dot or not name:
        raise ValueError(f"{assignment}: expected name.column=value, such as h100-80gb.memory_bytes=84e9")
    if column == "usd_per_hour":
        if "*" not in name:
            name = _priced_name(known, name)
        elif name != "*" and name.count("/") != 1:  # it would fit no machine
            raise ValueError(f"{assignment}: got {name!r}, expected provider/instance, such as aws/g4dn.*, or *")
        try:
            price = Price.model_validate({"usd_per_hour": value.strip(), "source": "the command line"})
        except ValidationError as error:
            raise ValueError(f"{assignment}: {error.errors()[0]['msg']}, got {value!r}") from None
        return tables, Offer(machine=name, price=price)
    for table in ("accelerators", "instances", "links", "cpus"):
        try:
            found = known.name_of(table, name)
        except ValueError:
            continue
        given = {column: value.strip()}
        figures = figures_of(TABLES[table], assignment, given | {"source": "the command line"}, "command line")
        nothing: Tables = {other: {} for other in tables}
        return laid_over(tables, nothing | {table: {found: {column: figures[column]}}}), None
    hints = [str(problem) for table in ("accelerators", "instances") if (problem := _problem(known, table, name))]
    raise ValueError(f"{assignment}: " + "; ".join(hints))


def _priced_name(known: HardwareCatalog, name: str) -> str:
    """Return the catalog's spelling of an instance that is priced; a machine of the user's own has his."""
    if name.count("/") != 1:
        return known.name_of("instances", name)
    try:
        return known.listed_instance(name).name
    except ValueError:
        return name


def _problem(known: HardwareCatalog, table: str, name: str) -> ValueError | None:
    """Why a name is not in a table."""
    try:
        known.name_of(table, name)
    except ValueError as error:
        return error
    return None


def _by_known_names(added: Tables, below: Tables, file: str) -> Tables:
    """The user's entries under the names that they mean: `h100` there is our `h100-80gb`, not another device."""
    renamed: Tables = {table: {} for table in added}
    for table, entries in added.items():
        spellings = _spellings(below, table)
        for name, figures in entries.items():
            meant = spellings.get(_plain(name), [name])
            if len(meant) > 1:
                raise ValueError(f"{file}: {table}.{name} is ambiguous; use one of: {', '.join(meant)}")
            parts = meant[0].split("/")
            sound = len(parts) == 2 and "+" not in meant[0] and all(part and part == part.strip() for part in parts)
            if table == "instances" and not sound:
                raise ValueError(f"{file}: instances.{name}: expected provider/instance, such as lab/rack-7")
            renamed[table][meant[0]] = {**renamed[table].get(meant[0], {}), **figures}
    return renamed


def _written(name: str, attached: tuple[int, str] | None) -> str:
    """An instance with what is attached to it, as `gcp/n1-standard-8+2xt4`."""
    if attached is None:
        return name
    count, device = attached
    return f"{name}+{count}x{device}" if count > 1 else f"{name}+{device}"


def _spellings(tables: Tables, table: str) -> dict[str, list[str]]:
    """Every spelling of a name, plain, and the names that it can mean; a name itself means nothing else."""
    found: dict[str, list[str]] = {}
    for name, figures in tables[table].items():
        aliases = str(figures["aliases"].value).split(";") if "aliases" in figures else []
        if table == "instances":
            aliases.append(name.partition("/")[2])
            aliases += [name.partition("/")[2].removeprefix("Standard_")] if "/Standard_" in name else []
        for spelling in dict.fromkeys(_plain(alias) for alias in aliases if alias.strip()):
            names = found.setdefault(spelling, [])
            names += [name] if name not in names else []
    return found | {_plain(name): [name] for name in tables[table]}


def _plain(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` and `nvidia-h100-80gb-hbm3` alike, without the maker's name."""
    plain = re.sub(r"[\s_-]+", "-", name.strip().lower())
    return re.sub(r"^(nvidia-|amd-|intel(\(r\))?-|instinct-|tesla-|geforce-)+", "", plain)


def _some(names: dict[str, list[str]]) -> str:
    known = list(dict.fromkeys(name for found in names.values() for name in found))
    return ", ".join(known[:12]) + (" ..." if len(known) > 12 else "")


@lru_cache(maxsize=1)
def _shipped() -> HardwareCatalog:
    return catalog()


def accelerator(name: str) -> Accelerator:
    """A GPU of the shipped catalog. Raises ValueError with the nearest names."""
    return _shipped().accelerator(name)


def instance(name: str, region: str | None = None) -> Machine:
    """An instance of the shipped catalog; see HardwareCatalog.instance."""
    return _shipped().instance(name, region)


def instances(provider: str | None = None, kind: AcceleratorKind | None = None) -> dict[str, Machine]:
    """All instances of the shipped catalog, by name."""
    return _shipped().instances(provider, kind)
