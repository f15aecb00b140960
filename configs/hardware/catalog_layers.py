"""The layers of the hardware catalog: tables read, laid over each other figure by figure, and checked.

    tables = shipped_tables()
    tables = laid_over(tables, read_tables(cache / "catalog", "refreshed"))

A table is name -> column -> Figure, so that each figure remembers its layer, source and date. Raises ValueError
that names the file and the row.
"""

import csv
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from configs.common.booleans import boolean_problems
from configs.common.files.reading import read_text
from configs.hardware.catalog_rows import TABLES, CatalogRow
from configs.spec.study import suggestion

CatalogLayer = Literal["shipped", "refreshed", "user", "command line"]
SHIPPED = Path(__file__).parents[1] / "catalog"

_SAID_ANYWAY = ("title", "aliases", "source", "as_of")
_Row = TypeVar("_Row", bound=CatalogRow)


class CatalogFigure(NamedTuple):
    """One value of the catalog and where it comes from."""

    value: Any
    layer: CatalogLayer
    source: str
    as_of: str | None


CatalogTable = dict[str, dict[str, CatalogFigure]]
Tables = dict[str, CatalogTable]


@lru_cache(maxsize=1)
def shipped_tables() -> Tables:
    """What comes with Rankwise. Not to be changed by the caller: `laid_over` makes a copy."""
    return read_tables(SHIPPED, "shipped")


def read_tables(folder: Path, layer: CatalogLayer) -> Tables:
    """The tables of a folder, `links.csv` and so on; one that is not there is empty."""
    return {table: _read_table(folder / f"{table}.csv", table, layer) for table in TABLES}


def laid_over(below: Tables, above: Tables) -> Tables:
    """A copy of the tables below in which the figures above win."""
    return {
        table: {
            name: {**below[table].get(name, {}), **above[table].get(name, {})}
            for name in [*below[table], *(name for name in above[table] if name not in below[table])]
        }
        for table in below
    }


def as_row(model: type[_Row], where: str, figures: dict[str, CatalogFigure]) -> _Row:
    """The figures of one name, checked together. Source and date: of all layers that have a say, the oldest date.

    Raises ValueError: a column that is missing or cannot be.
    """
    groups: dict[tuple[CatalogLayer, str], list[str]] = {}
    dates: list[str] = []
    for column, figure in figures.items():
        if column not in _SAID_ANYWAY:
            groups.setdefault((figure.layer, figure.source), []).append(column)
            dates += [figure.as_of] if figure.as_of else []
    sources = [
        source if place == 0 else f"{', '.join(columns)}: {source} ({layer})"
        for place, ((layer, source), columns) in enumerate(groups.items())
    ]
    values = {column: figure.value for column, figure in figures.items()}
    values |= {"source": "; ".join(sources), "as_of": min(dates, default=None)}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        column = str(problem["loc"][0]) if problem["loc"] else "row"
        if problem["type"] == "missing":
            raise ValueError(f"{where}: {column}: is missing") from error
        raise ValueError(f"{where}: {column}: {problem['msg']}, got {problem['input']!r}") from error


def checked_column(model: type[CatalogRow], where: str, column: str, value: Any) -> None:
    """Raise ValueError where a column does not exist or cannot hold the value."""
    if column not in model.model_fields:
        raise ValueError(f"{where}: unknown column {column!r}{suggestion(column, list(model.model_fields))}")
    try:
        made = _adapter(model, column).validate_python(value.strip() if isinstance(value, str) else value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ValueError(f"{where}: {column}: {message[:1].lower()}{message[1:]}, got {value!r}") from None
    for problem in boolean_problems({column: value}, {column: made}):
        raise ValueError(f"{where}: {problem}")


@lru_cache(maxsize=128)
def _adapter(model: type[CatalogRow], column: str) -> TypeAdapter[Any]:
    """What checks one column by itself: rows of a layer may lack the others."""
    field = model.model_fields[column]
    annotation: Any = field.annotation
    for constraint in field.metadata:
        annotation = Annotated[annotation, constraint]
    return TypeAdapter(annotation, config={"allow_inf_nan": False})


def _read_table(path: Path, table: str, layer: CatalogLayer) -> CatalogTable:
    try:
        text = read_text(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    rows = csv.DictReader(
        text.splitlines(), strict=True
    )  # else a quote that is never closed swallows all rows after it
    try:
        listed = [(rows.line_num, row) for row in rows]
    except csv.Error as error:
        raise ValueError(f"{path}: not a CSV file ({error})") from error
    columns = list(rows.fieldnames or ())
    allowed = ["name", *TABLES[table].model_fields]
    for column in columns:
        if column not in allowed:
            raise ValueError(f"{path}: unknown column {column!r}; use {', '.join(allowed)}")
    missing = [column for column in ("name", "as_of", "source") if column not in columns]
    if missing:
        raise ValueError(f"{path}: missing column {missing[0]!r}")
    found: CatalogTable = {}
    for line, row in listed:
        where = f"{path}, line {line}"
        if None in row or None in row.values():
            raise ValueError(f"{where}: expected {len(columns)} fields, as in the first line")
        name = row.pop("name").strip()
        if not name or name in found:
            raise ValueError(f"{where}: {f'duplicate name {name}' if name else 'missing name'}")
        if not row["source"].strip() or not row["as_of"].strip():
            raise ValueError(f"{where}: {name}: missing source or date (as_of)")
        given = {column: value.strip() for column, value in row.items() if value.strip()}
        found[name] = figures_of(TABLES[table], f"{where}: {name}", given, layer)
    return found


def figures_of(
    model: type[CatalogRow], where: str, given: dict[str, Any], layer: CatalogLayer
) -> dict[str, CatalogFigure]:
    """The columns of one row as figures of a layer, each one checked by itself."""
    for column, value in given.items():
        checked_column(model, where, column, value)
    as_of = given.get("as_of")
    dated = as_of.isoformat() if isinstance(as_of, date) else None if as_of is None else str(as_of)
    return {column: CatalogFigure(value, layer, str(given["source"]), dated) for column, value in given.items()}
