"""The user's own hardware and prices: a YAML file that is laid over the shipped catalog.

    tables, offers = read_catalog_file(Path("hardware.yaml"))

    as_of: 2026-11-01                     # of everything that has no date of its own
    source: measured on our cluster       # likewise
    accelerators:
      h100-80gb: {memory_bytes: 84.9e9}   # one figure of an accelerator that is known
    links:
      our-fabric: {latency_seconds: 8e-6}
    instances:
      lab/rack-7: {accelerator: h100-80gb, accelerators: 4, vcpus: 64, host_memory_bytes: 1e12,
                   network: our-fabric, network_bits_per_second: 4e11}
    prices:                               # as in a price file (configs.hardware.price_file)
      - {machine: "lab/*", usd_per_hour: 9.5}

Columns are those of `configs.hardware.catalog_rows`. Raises StudyError naming every problem.
"""

from datetime import date
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from configs.common.base import Frozen
from configs.common.booleans import boolean_problems
from configs.hardware.catalog_layers import Tables, figures_of
from configs.hardware.catalog_rows import TABLES
from configs.hardware.price_file import PriceEntry, offers_of, problem_line
from configs.hardware.prices import Offer
from configs.spec.study import StudyError, read_mapping

Entries = dict[str, dict[str, Any]]


class CatalogFile(Frozen):
    """The user's file, before its rows are checked."""

    as_of: date | None = None
    source: str | None = Field(None, min_length=1)
    links: Entries = {}
    accelerators: Entries = {}
    cpus: Entries = {}
    instances: Entries = {}
    prices: list[PriceEntry] = []


def read_catalog_file(path: Path) -> tuple[Tables, tuple[Offer, ...]]:
    """The tables and offers of the user's file."""
    name = str(path)
    data = read_mapping(path, name, f"expected a mapping with any of {', '.join(CatalogFile.model_fields)}")
    try:
        file = CatalogFile.model_validate(data)
    except ValidationError as error:
        models = {"prices": PriceEntry}
        raise StudyError(
            [f"{name}: {problem_line(dict(detail), CatalogFile, models)}" for detail in error.errors()]
        ) from error
    problems = [f"{name}: {problem}" for problem in boolean_problems(data, file)]
    problems += [
        f"{name}: prices[{place}].target: a catalog has prices of machines. Name a `machine`; targets are priced by "
        "the file that a study names under `prices`"
        for place, entry in enumerate(file.prices)
        if entry.target is not None
    ]
    tables: Tables = {}
    for table, model in TABLES.items():
        tables[table] = {}
        for entry, columns in getattr(file, table).items():
            source = columns.get("source") or file.source
            given = {**columns, "source": f"{source} ({path.name})" if source else path.name}
            if "as_of" not in given and file.as_of is not None:
                given["as_of"] = file.as_of
            try:
                tables[table][entry] = figures_of(model, f"{name}: {table}.{entry}", given, "user")
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise StudyError(problems)
    return tables, offers_of(file.prices, file.as_of, name)
