"""Reading run folders: the quick way gives what the plain way does, and damaged files are named."""

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.common.base import SCHEMA_VERSION
from configs.plans.paths import RunPaths
from configs.plans.record import SchemaError, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.noop import NoopWorkload
from reports.numbers.stopping import confidence
from reports.reading import readers
from reports.reading.load import StudyResult, load_run
from reports.reading.read import cell_folders
from reports.reading.readers import read_cells
from reports.reading.samples import read_samples
from reports.tables import MOST_ROWS, first_rows
from reports.text import Table
from tests.reports.test_render import generate, generated, plan_of, write_plan, write_record

COLUMNS = ("a", "b", "c")


def archive(path: Path, **columns: np.ndarray) -> Path:
    np.savez(path, **{f"0/{name}": column for name, column in columns.items()})
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_samples_are_read_as_numpy_reads_them(tmp_path: Path, compressed: bool) -> None:
    columns = {
        "0/a": np.random.default_rng(0).random(512),
        "0/b": np.arange(3, dtype=np.int32),
        "1/a": np.array([], dtype=np.float64),
        "1/c": np.array([True, False]),
        "1/left_out": np.ones(2),
    }
    path = tmp_path / "s.npz"
    (np.savez_compressed if compressed else np.savez)(path, **columns)
    found = read_samples(path, COLUMNS)
    assert list(found) == ["0/a", "0/b", "1/a", "1/c"]
    for name, column in found.items():
        np.testing.assert_array_equal(column, columns[name])
        assert column.dtype == columns[name].dtype


def test_unusual_archives_are_left_to_numpy(tmp_path: Path) -> None:
    path = archive(tmp_path / "s.npz", a=np.ones((2, 3)), b=np.array(["text"]))
    found = read_samples(path, COLUMNS)
    assert found["0/a"].shape == (2, 3) and found["0/b"].tolist() == ["text"]
    with zipfile.ZipFile(path, "a") as file:
        file.comment = b"a comment moves the end"
    assert read_samples(path, COLUMNS)["0/a"].shape == (2, 3)


WHOLE = io.BytesIO()
np.savez(WHOLE, **{"0/a": np.arange(50.0), "0/left_out": np.arange(5.0)})


@given(st.integers(0, len(WHOLE.getvalue()) - 1), st.integers(1, 255))
def test_a_changed_byte_is_seen_or_does_no_harm(
    tmp_path_factory: pytest.TempPathFactory, place: int, change: int
) -> None:
    """Whatever byte of the file is changed: an error that names the file, or the values as they were."""
    data = bytearray(WHOLE.getvalue())
    data[place] ^= change
    path = tmp_path_factory.getbasetemp() / "changed.npz"
    path.write_bytes(data)
    try:
        found = read_samples(path, ("a",))
        assert not found or found["0/a"].tolist() == list(range(50))
    except ValueError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("length", [0, 10, 300, 600])
def test_a_cut_archive_is_named(tmp_path: Path, length: int) -> None:
    path = tmp_path / "r0-a1.npz"
    path.write_bytes(WHOLE.getvalue()[:length])
    with pytest.raises(ValueError, match=r"r0-a1\.npz: the record's samples cannot be read .* set the record aside"):
        read_samples(path, ("a",))
    with pytest.raises(ValueError, match=r"none\.npz"):
        read_samples(tmp_path / "none.npz", ("a",))


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Seven cells of two repeats, with a failed first attempt, a memory pass and a record of no plan."""
    cells = [generate(new_tokens=tokens) for tokens in range(2, 9)]
    folder = write_plan(tmp_path / "run", plan_of(cells, [], repeats=2))
    for cell in cells:
        write_record(folder, cell, 0, attempt=1, status=Status.FAILED)
        write_record(folder, cell, 0, attempt=2, samples=generated(cell, 1.0))
        write_record(folder, cell, 1, samples=generated(cell, 2.0))
        write_record(folder, cell, measuring_pass="memory", figures={"peak_memory_bytes": 7})
    other = generate(new_tokens=20)
    write_record(folder, other, samples=generated(other, 1.0))
    return folder


def same(first: StudyResult, second: StudyResult) -> bool:
    return first.readings == second.readings and first.cells == second.cells


def test_a_second_process_reads_the_same(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = load_run(run)
    assert [reading.path for reading in alone.readings] == sorted(reading.path for reading in alone.readings)
    assert sum(reading.used for reading in alone.readings) == 3 * 7
    monkeypatch.setattr(readers, "SECOND_READER_RECORDS", 1)
    monkeypatch.setattr(readers.os, "sched_getaffinity", lambda _: {0, 1})
    assert same(load_run(run), alone)
    monkeypatch.setattr(readers.sys, "executable", "/bin/false")
    assert same(load_run(run), alone)  # it ended without an answer: its share is read here
    monkeypatch.setattr(readers.sys, "executable", "/nowhere/python")
    assert same(load_run(run), alone)


@pytest.mark.parametrize("nth", [0, 1, -2, -1])
def test_a_second_process_names_the_first_damaged_file(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    folders = cell_folders(run.records, {})
    damaged = [number for number, folder in enumerate(folders) if "r1-a1.json" in folder.names][nth]
    for folder in folders[damaged:]:
        Path(folder.folder, "r1-a1.json").write_text("{") if "r1-a1.json" in folder.names else None
    expected = Path(folders[damaged].folder, "r1-a1.json")
    monkeypatch.setattr(readers, "SECOND_READER_RECORDS", 1)
    monkeypatch.setattr(readers.os, "sched_getaffinity", lambda _: {0, 1})
    assert expected.exists()
    with pytest.raises(ValueError, match="not JSON") as caught:
        read_cells(folders, run.folder)
    assert str(expected) in str(caught.value)


def test_a_newer_record_and_one_that_is_none_are_named(run: RunPaths) -> None:
    path = next(run.records.glob("*/r1-a1.json"))
    whole = path.read_text()
    path.write_text(whole.replace(f'"schema_version":{SCHEMA_VERSION}', f'"schema_version":{SCHEMA_VERSION + 1}'))
    with pytest.raises(SchemaError, match=r"r1-a1\.json: schema_version: got"):
        load_run(run)
    path.write_text(whole.replace(f'"schema_version":{SCHEMA_VERSION},', ""))
    with pytest.raises(ValueError, match=r"r1-a1\.json: schema_version: got None"):
        load_run(run)
    path.write_text(whole.replace('"attempt":1', '"attempt":"first"'))
    with pytest.raises(ValueError, match=r"r1-a1\.json: not a record"):
        load_run(run)


def test_readings_travel_between_processes(run: RunPaths) -> None:
    readings = load_run(run).readings
    assert pickle.loads(pickle.dumps(readings)) == readings


def test_intervals_have_the_confidence_that_the_measuring_rules_ask_for(tmp_path: Path) -> None:
    """Repeats that go on until an interval is narrow need a higher one for the same coverage."""
    cell = Cell(workload=NoopWorkload())
    widths = []
    for name, rules in (("fixed", Measuring(repeats=10)), ("target", Measuring(repeats=10, target_interval=0.01))):
        plan = plan_of([cell], [], repeats=10).model_copy(update={"measuring": rules})
        folder = write_plan(tmp_path / name, plan)
        for repeat in range(10):
            write_record(folder, cell, repeat, samples={"0/pass_seconds": [1.0 + repeat]})
        result = load_run(folder).cells[cell.key]
        assert result.confidence == confidence(rules)
        value = result.estimate("throughput")
        assert value is not None and value.interval is not None and result.estimate("throughput") is value
        widths.append(value.interval[1] - value.interval[0])
    assert widths[0] < widths[1]


def test_long_tables_say_where_the_rest_is() -> None:
    table = Table(("a", "b"), tuple((str(row), "x") for row in range(MOST_ROWS + 5)))
    shown = first_rows(table)
    assert len(shown.rows) == MOST_ROWS + 1
    assert shown.rows[-1] == ("… and 5 more: all of them are in cells.csv", "")
    assert first_rows(shown).rows[:MOST_ROWS] == table.rows[:MOST_ROWS]
    short = Table(("a",), (("1",),))
    assert first_rows(short) is short
    assert first_rows(short, 1000, "records.parquet").rows[-1] == (
        "… and 800 more: all of them are in records.parquet",
    )
