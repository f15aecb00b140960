"""History of runs in a small SQLite file, for trends and named baselines.

    with open_history(path, create=True) as history:
        history.add(run_figures(study, str(folder)), name="main")
        history.run("main")                       # RunFigures, as they were
        history.runs()                            # all, the oldest first

Figures are kept by repeat, so every statistic of today's or tomorrow's version comes out of them although the
run folder is gone. A name stands for one run and moves when it is given again. Each run is there once: added again
after more of it was measured, it takes the place of its earlier state. Cells and repeats that its study lost meanwhile
stay.
Several processes may write at once: each change is one transaction that waits for the file. The journal is
SQLite's default one, because write-ahead logs do not work on the network file systems that clusters keep runs
on (https://www.sqlite.org/wal.html, "All processes using a database must be on the same host computer").
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from configs.common.base import WrongArgument, content_hash, utc_now
from configs.common.files.reading import brief, check_regular
from configs.common.printable import printable
from configs.records.record import SchemaError
from reports.reading.run_figures import CellFigures, RunFigures

HISTORY_VERSION = 2
APPLICATION_ID = 0x52_4B_57_53
"""`RKWS`: what tells our files from other SQLite files."""

_AMONG = "key IN (SELECT value FROM json_each(:keys))"
BUSY_SECONDS = 30.0
MOST_LISTED = 20
HISTORY_FILE = "history.sqlite"

_SCHEMA = (
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY, content TEXT NOT NULL UNIQUE, source TEXT NOT NULL, study TEXT NOT NULL,
        commit_id TEXT, environment TEXT, started_at TEXT, finished_at TEXT, added_at TEXT NOT NULL,
        rules TEXT NOT NULL)""",
    "CREATE TABLE names (name TEXT PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id))",
    """CREATE TABLE environments (
        run INTEGER NOT NULL REFERENCES runs (id), hash TEXT NOT NULL, facts TEXT, PRIMARY KEY (run, hash))""",
    """CREATE TABLE cells (
        run INTEGER NOT NULL REFERENCES runs (id), key TEXT NOT NULL, title TEXT NOT NULL, unit TEXT NOT NULL,
        status TEXT NOT NULL, compared INTEGER NOT NULL, planned INTEGER NOT NULL, failed INTEGER NOT NULL,
        fields TEXT NOT NULL, environments TEXT NOT NULL, hosts TEXT NOT NULL,
        confidence REAL NOT NULL, PRIMARY KEY (run, key))""",
    """CREATE TABLE figures (
        run INTEGER NOT NULL, key TEXT NOT NULL, figure TEXT NOT NULL, repeat INTEGER NOT NULL, value REAL NOT NULL,
        PRIMARY KEY (run, key, figure, repeat), FOREIGN KEY (run, key) REFERENCES cells (run, key))""",
)


@dataclass(frozen=True)
class KeptRun:
    """A run in the history: its number, the names that stand for it, and what it measured."""

    number: int
    names: tuple[str, ...]
    source: str
    added_at: str
    figures: RunFigures

    @property
    def title(self) -> str:
        """Its names, else its number: `main`, `run 3`."""
        return ", ".join(self.names) or f"run {self.number}"


@dataclass(frozen=True)
class Added:
    """What adding a run did. `moved_from`: the other run that its name stood for before.

    `kept`: cells that the history had of this run and that its study has no more; `kept_repeats`: the same of repeats
    of the cells that the study still has.
    """

    number: int
    state: Literal["new", "known", "grown"]
    moved_from: int | None
    kept: int = 0
    kept_repeats: int = 0


@contextmanager
def open_history(path: Path, create: bool = False) -> Iterator["RunHistory"]:
    """Open the file, with `create` also where there is none.

    Raises SchemaError for a file of a newer version, ValueError for a file that is no history or
    is kept busy by another process for longer than half a minute.
    """
    if not create and not path.exists():
        raise WrongArgument(f"{path}: no history here; `rankwise history add RUN --as NAME` makes one")
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    mode = "rwc" if create else "rw"
    connection: sqlite3.Connection | None = None
    try:
        if path.exists():
            check_regular(path)
        address = f"{path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        connection.execute("PRAGMA foreign_keys = ON")
        _prepare(connection, path, create)
        yield RunHistory(connection)
    except sqlite3.Error as error:
        raise ValueError(f"{path}: {_readable(error)}") from error
    finally:
        if connection is not None:
            connection.close()


def _readable(error: sqlite3.Error) -> str:
    if "locked" in str(error) or "busy" in str(error):
        return f"kept busy by another process for {BUSY_SECONDS:.0f} s; try again"
    if "not a database" in str(error):
        return "not a history of runs; choose another file with --history"
    return f"the history cannot be used ({error}); choose another file with --history"


def _prepare(connection: sqlite3.Connection, path: Path, create: bool) -> None:
    """Make the tables in a new file; refuse a file that is not ours or newer than this program."""
    if create:
        with _transaction(connection):
            if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {HISTORY_VERSION}")
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise ValueError(f"{path}: not a history of runs; choose another file with --history")
    if version != HISTORY_VERSION:
        raise SchemaError(
            f"{path}: written with history version {version}, this version of Rankwise reads {HISTORY_VERSION} only; "
            "choose another file with --history"
        )


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; the lock is taken at once, so that two writers wait instead of failing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is read in the block is of one moment: a run is replaced by its later state in several statements."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


class RunHistory:
    """An open history file; see `open_history`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def add(self, run: RunFigures, name: str | None = None) -> Added:
        """Keep a run, once however often it is added; `name` stands for it from now on.

        Raises ValueError where the run has no figure at all, WrongArgument for a name that could be taken for a number
        or a key.
        """
        if not any(cell.completed for cell in run.cells.values()):
            raise ValueError(f"{run.name}: no cell of this run has a figure; nothing to keep")
        if name is not None:
            _check_name(name, run)
        with _transaction(self._connection):
            content = _content(run)
            query = "SELECT id, content FROM runs WHERE content = ? OR (study = ? AND started_at = ?)"
            found = self._connection.execute(query, (content, run.study, run.started_at)).fetchone()
            state: Literal["new", "known", "grown"] = "new" if found is None else "grown"
            before = {} if found is None else self._cells(int(found[0]), json.dumps(list(run.cells)), True)
            cells = {key: _with_later_repeats(cell, before.get(key)) for key, cell in run.cells.items()}
            if found is not None and found[1] == content:
                number, state = int(found[0]), "known"
            else:
                number = self._insert(replace(run, cells=cells), content, None if found is None else int(found[0]))
            moved = self._name(name, number) if name is not None else None
            had = self._connection.execute("SELECT count(*) FROM cells WHERE run = ?", (number,)).fetchone()[0]
        later = sum(len(_repeats(cell) - _repeats(run.cells[key])) for key, cell in cells.items())
        return Added(number, state, moved, had - len(run.cells), later)

    def _insert(self, run: RunFigures, content: str, number: int | None) -> int:
        """Write a run, in the place of an earlier state of it where it has a number already."""
        if number is not None:
            keys = json.dumps(list(run.cells))
            for table in ("figures", "cells"):
                query = f"DELETE FROM {table} WHERE run = :run AND {_AMONG}"
                self._connection.execute(query, {"run": number, "keys": keys})
        row = (content, run.name, run.study, run.commit, run.environment, run.started_at, run.finished_at)
        columns = "content, source, study, commit_id, environment, started_at, finished_at, added_at, rules, id"
        values = (*row, utc_now(), json.dumps(dict(run.rules)), number)
        updates = ", ".join(f"{column} = excluded.{column}" for column in columns.split(", ")[:-1])
        query = f"INSERT INTO runs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        query += f" ON CONFLICT (id) DO UPDATE SET {updates} RETURNING id"
        number = int(self._connection.execute(query, values).fetchone()[0])
        self._connection.executemany(
            "INSERT OR REPLACE INTO environments VALUES (?, ?, ?)",
            [
                (number, digest, None if flat is None else json.dumps(dict(flat)))
                for digest, flat in run.environments.items()
            ],
        )
        self._connection.executemany(
            "INSERT INTO cells VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(number, *_cell_row(cell)) for cell in run.cells.values()],
        )
        self._connection.executemany(
            "INSERT INTO figures VALUES (?, ?, ?, ?, ?)",
            [
                (number, cell.key, figure, repeat, value)
                for cell in run.cells.values()
                for figure, values in cell.figures.items()
                for repeat, value in values.items()
            ],
        )
        return number

    def _name(self, name: str, number: int) -> int | None:
        """Let a name stand for a run; gives the run that it stood for, where that was another."""
        before = self._connection.execute("SELECT run FROM names WHERE name = ?", (name,)).fetchone()
        self._connection.execute("INSERT OR REPLACE INTO names VALUES (?, ?)", (name, number))
        return int(before[0]) if before and before[0] != number else None

    def runs(self, keys: Collection[str] | None = None) -> list[KeptRun]:
        """All runs in the order in which they were measured; with `keys` those that planned one of these cells."""
        condition = "" if keys is None else f"WHERE id IN (SELECT run FROM cells WHERE {_AMONG})"
        return self._select(condition, keys)

    def listed(self) -> list[KeptRun]:
        """All runs as a list needs them: their cells without figures, of which years of runs have millions."""
        return self._select("", with_figures=False)

    def _select(
        self, condition: str, keys: Collection[str] | None = None, with_figures: bool = True, **values: Any
    ) -> list[KeptRun]:
        """The runs that a condition holds for, with all their cells or those of `keys`."""
        listed = None if keys is None else json.dumps(sorted(keys))
        with _snapshot(self._connection):
            names = defaultdict(list)
            for name, number in self._connection.execute("SELECT name, run FROM names ORDER BY name"):
                names[number].append(name)
            rows = self._connection.execute(
                "SELECT id, source, study, started_at, finished_at, rules, added_at FROM runs "
                f"{condition} ORDER BY coalesce(started_at, added_at), id",
                {"keys": listed, **values},
            ).fetchall()
            return [self._checked(row, tuple(names[row[0]]), listed, with_figures) for row in rows]

    def _checked(self, row: tuple[Any, ...], names: tuple[str, ...], keys: str | None, with_figures: bool) -> KeptRun:
        try:
            return self._kept(row, names, keys, with_figures)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"run {brief(row[0])} of the history is damaged ({printable(str(error), 200)})") from error

    def _kept(self, row: tuple[Any, ...], names: tuple[str, ...], keys: str | None, with_figures: bool) -> KeptRun:
        number, source, study, started_at, finished_at, rules, added_at = row
        facts = self._connection.execute("SELECT hash, facts FROM environments WHERE run = ?", (number,))
        environments = {digest: None if text is None else json.loads(text) for digest, text in facts}
        cells = self._cells(number, keys, with_figures)
        figures = RunFigures(source, study, started_at, finished_at, json.loads(rules), cells, environments)
        kept = KeptRun(number, names, source, added_at, figures)
        return replace(kept, figures=replace(figures, name=f"{kept.title} ({source})"))

    def _cells(self, number: int, keys: str | None, with_figures: bool) -> dict[str, CellFigures]:
        condition, values = "run = :run" + ("" if keys is None else f" AND {_AMONG}"), {"run": number, "keys": keys}
        figures: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        query = f"SELECT key, figure, repeat, value FROM figures WHERE {condition} ORDER BY rowid"
        for cell, figure, repeat, value in self._connection.execute(query, values) if with_figures else ():
            figures[cell][figure][repeat] = value
        query = f"SELECT * FROM cells WHERE {condition} ORDER BY rowid"
        return {row[1]: _cell_of(row[1:], figures[row[1]]) for row in self._connection.execute(query, values)}

    def run(self, name: str) -> KeptRun:
        """The run of a name or number. Raises WrongArgument that lists the names there are."""
        number = self._number(name)
        if number is None:
            names = [row[0] for row in self._connection.execute("SELECT name FROM names ORDER BY name")]
            known = (
                f"there are: {', '.join(names)}"
                if names
                else "none has a name. Use: rankwise history add RUN --as NAME"
            )
            raise WrongArgument(f"no run in the history is called {name}; {known}")
        return self._select("WHERE id = :number", number=number)[0]

    def _number(self, name: str) -> int | None:
        query = "SELECT run FROM names WHERE name = :name UNION ALL SELECT id FROM runs WHERE id = :number LIMIT 1"
        number = int(name) if name.isdecimal() and len(name) < 16 else None
        found = self._connection.execute(query, {"name": name, "number": number}).fetchone()
        return int(found[0]) if found else None

    def run_or_key(self, text: str) -> KeptRun | str:
        """The run of a name or number, else the key of the one cell whose key begins with, or name holds, a text.

        Raises WrongArgument where that is none or several, and names those.
        """
        if self._number(text) is not None:
            return self.run(text)
        cells: dict[str, str] = dict(self._connection.execute("SELECT key, title FROM cells ORDER BY rowid"))
        found = [key for key in cells if len(text) >= 4 and key.startswith(text)]
        found = found or [key for key, title in cells.items() if title == text]
        found = found or [key for key, title in cells.items() if text.lower() in title.lower()]
        if len(found) == 1:
            return found[0]
        listed = "".join(f"\n  {key}  {cells[key]}" for key in found[:MOST_LISTED])
        why = (
            f"could be any of {len(found)} cells; give more of its key or name:{listed}" if found else "no run or cell"
        )
        raise WrongArgument(
            f"{text}: {why}" + ("" if found else " of the history is called so; see rankwise history list")
        )


def _check_name(name: str, run: RunFigures) -> None:
    if not name.strip() or name != name.strip() or name.isdecimal() or not name.isprintable():
        raise WrongArgument(f"--as {name!r}: a name is text, not empty and not a number alone. Use one such as main")
    if any(key.startswith(name) for key in run.cells) and len(name) >= 4:
        raise WrongArgument(f"--as {name}: could be taken for the key of a cell. Use a name such as main")


def _repeats(cell: CellFigures) -> set[int]:
    return {repeat for values in cell.figures.values() for repeat in values}


def _with_later_repeats(cell: CellFigures, before: CellFigures | None) -> CellFigures:
    """The cell with the repeats of its earlier state that its study, whose `repeats` were lowered, does not plan."""
    if before is None or not any(repeat >= cell.planned for repeat in _repeats(before)):
        return cell
    figures = {
        name: {repeat: value for repeat, value in before.figures.get(name, {}).items() if repeat >= cell.planned}
        | dict(cell.figures.get(name, {}))
        for name in dict.fromkeys((*cell.figures, *before.figures))
    }
    figures = {name: values for name, values in figures.items() if values}
    planned = max(cell.planned, before.planned)
    measured = max(map(len, figures.values()))
    return replace(
        cell,
        status=before.status,
        planned=planned,
        failed=max(0, min(max(cell.failed, before.failed), planned - measured)),
        figures=figures,
        environments=tuple(sorted({*cell.environments, *before.environments})),
        hosts=tuple(sorted({*cell.hosts, *before.hosts})),
        confidence=max(cell.confidence, before.confidence),
    )


def _content(run: RunFigures) -> str:
    """One hash for all that was measured: the same run is the same wherever its folder lies."""
    cells = [_cell_row(cell) for cell in run.cells.values()]
    figures = [{name: sorted(values.items()) for name, values in cell.figures.items()} for cell in run.cells.values()]
    return content_hash([run.study, run.started_at, run.finished_at, dict(run.rules), cells, figures])


def _cell_row(cell: CellFigures) -> tuple[Any, ...]:
    """The columns of `cells` after the run's number."""
    lists = [json.dumps(dict(cell.fields)), json.dumps(list(cell.environments)), json.dumps(list(cell.hosts))]
    row = (cell.key, cell.title, cell.unit, cell.status, int(cell.compared), cell.planned, cell.failed)
    return (*row, *lists, cell.confidence)


def _cell_of(row: tuple[Any, ...], figures: dict[str, dict[int, float]]) -> CellFigures:
    key, title, unit, status, compared, planned, failed, fields, environments, hosts, confidence = row
    return CellFigures(
        key=key,
        title=title,
        unit=unit,
        status=status,
        compared=bool(compared),
        planned=planned,
        failed=failed,
        fields=json.loads(fields),
        figures={name: dict(values) for name, values in figures.items()},
        environments=tuple(json.loads(environments)),
        hosts=tuple(json.loads(hosts)),
        confidence=confidence,
    )
