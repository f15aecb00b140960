"""Reading run folders: the quick way gives what the plain way does, and damaged files are named."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.common.base import SCHEMA_VERSION
from configs.plans.paths import RunPaths
from configs.records.record import SchemaError, Status
from configs.records.samples import read_samples
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.noop import NoopWorkload
from reports.numbers.stopping import confidence
from reports.reading import readers
from reports.reading.load import StudyResult, load_run
from reports.reading.names import cell_names
from reports.tables import MOST_ROWS, first_rows
from reports.text import Table
from tasks.campaign.ledger import read_ledger, set_aside_damaged
from tests.support.run_folders.report_runs import generate, generated, plan_of, write_plan, write_record

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


def test_an_archive_with_a_comment_is_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "s.npz", a=np.arange(6.0))
    with zipfile.ZipFile(path, "a") as file:
        file.comment = b"a comment moves the end"
    assert read_samples(path, COLUMNS)["0/a"].tolist() == list(range(6))


@pytest.mark.parametrize("column", [np.ones((2, 3)), np.array(["text"]), np.array([{}]), np.array(1.0)])
def test_samples_are_one_dimensional_numbers(tmp_path: Path, column: np.ndarray) -> None:
    path = archive(tmp_path / "s.npz", a=column)
    with pytest.raises(ValueError, match=r"s\.npz: .*0/a: not a one-dimensional column of numbers"):
        read_samples(path, COLUMNS)


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
    with pytest.raises(ValueError, match=r"r0-a1\.npz: the record's samples cannot be read"):
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
    pairs = zip(first.readings, second.readings, strict=True)
    samples = all(np.array_equal(one.sample_seconds, other.sample_seconds) for one, other in pairs)
    return samples and first.readings == second.readings and first.cells == second.cells


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
def test_a_second_process_lists_the_same_damaged_files(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    paths = sorted(run.records.glob("*/r1-a1.json"))
    for path in paths[nth:]:
        path.write_text("{")
    alone = load_run(run)
    assert [item.path for item in alone.unreadable] == [path.relative_to(run.folder).as_posix() for path in paths[nth:]]
    assert all(item.reason.startswith("not JSON") for item in alone.unreadable)
    monkeypatch.setattr(readers, "SECOND_READER_RECORDS", 1)
    monkeypatch.setattr(readers.os, "sched_getaffinity", lambda _: {0, 1})
    again = load_run(run)
    assert same(again, alone) and again.unreadable == alone.unreadable


@pytest.mark.parametrize("nth", [0, 1, -2, -1])
def test_a_second_process_names_the_first_file_of_another_version(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    paths = sorted(run.records.glob("*/r1-a1.json"))
    for path in paths[nth:]:
        path.write_text('{"schema_version": 99}')
    monkeypatch.setattr(readers, "SECOND_READER_RECORDS", 1)
    monkeypatch.setattr(readers.os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(SchemaError) as caught:
        load_run(run)
    assert str(paths[nth]) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((f'"schema_version":{SCHEMA_VERSION},', ""), "schema_version: got None"),
        (('"attempt":1', '"attempt":"first"'), "attempt: input should be a valid integer"),
        (('"attempt":1', '"attempt":7'), "r1-a7.json"),
        (('"repeat":1', '"repeat":-1'), "repeat: "),
        (('"new_tokens":', '"new_tokens":9'), "cell: has the key "),
        (('"environment":"e1"', '"environment":"../../x"'), "environment: "),
        (('"job":"', '"job":"../'), "job: "),
        (('"finished_at":"', '"finished_at":"x'), "finished_at: "),
        (('"figures":{', '"figures":{"n":' + "9" * 5000 + ","), "a number is too long"),
        (('"hosts":[', '"hosts":' + "[" * 5000), "nested more than 200 levels deep"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_record_that_is_none_is_listed_and_left_out(run: RunPaths, change: tuple[str, str], reason: str) -> None:
    path = next(run.records.glob("*/r1-a1.json"))
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    [found] = load_run(run).unreadable
    assert found.path == path.relative_to(run.folder).as_posix()
    assert reason in found.reason and str(run.folder) not in found.reason and len(found.reason) <= 300
    damaged = read_ledger(run).damaged
    assert list(damaged) == [path], "the ledger and the report agree on what is damaged"


def test_another_attempt_decides_over_a_damaged_one(run: RunPaths) -> None:
    path = next(run.records.glob("*/r0-a2.npz"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    study = load_run(run)
    assert [item.path for item in study.unreadable] == [path.with_suffix(".json").relative_to(run.folder).as_posix()]
    cell = study.cells[path.parent.name]
    assert cell.measurements[0].record.attempt == 1 and list(cell.completed) == [1]
    assert list(read_ledger(run).damaged) == [path.with_suffix(".json")]


def test_a_record_of_another_version_is_named(run: RunPaths) -> None:
    path = next(run.records.glob("*/r1-a1.json"))
    whole = path.read_text()
    path.write_text(whole.replace(f'"schema_version":{SCHEMA_VERSION}', f'"schema_version":{SCHEMA_VERSION + 1}'))
    with pytest.raises(SchemaError, match=r"r1-a1\.json: schema_version: got"):
        load_run(run)


def test_a_damaged_environment_is_listed(run: RunPaths) -> None:
    run.environment("e1").write_text("{")
    study = load_run(run)
    assert [item.path for item in study.unreadable] == ["environments/e1.json"]
    assert study.environments == {"e1": None}


def test_records_set_aside_are_told_until_they_are_measured_again(run: RunPaths) -> None:
    path = next(run.records.glob("*/r1-a1.json"))
    whole = path.read_bytes(), path.with_suffix(".npz").read_bytes()
    path.write_text("{")
    set_aside_damaged(run)
    study = load_run(run)
    assert study.unreadable == () and study.set_aside == (f"set_aside/{path.parent.name}--r1-a1.json",)
    again = path.with_name("r1-a2.json")
    again.write_bytes(whole[0].replace(b'"attempt":1', b'"attempt":2'))
    again.with_suffix(".npz").write_bytes(whole[1])
    assert load_run(run).set_aside == ()


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
    assert first_rows(shown) == shown
    # The short form said "and 189 more: all of them are in the appendix", which has 200 of the thousand.
    thousand = first_rows(Table(("a", "b"), tuple((str(row), "x") for row in range(1000))))
    again = first_rows(thousand.without_empty_columns(), where="the appendix", max_rows=12)
    assert again.rows == (*thousand.rows[:12], ("… and 988 more: all of them are in cells.csv", ""))
    few = first_rows(Table(("a",), (("x",),) * 20), where="the appendix", max_rows=12)
    assert few.rows[-1] == ("… and 8 more: all of them are in the appendix",)
    short = Table(("a",), (("1",),))
    assert first_rows(short) is short
    assert first_rows(short, 1000, "records.parquet").rows[-1] == (
        "… and 800 more: all of them are in records.parquet",
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([{"num_prompts": 20, "prompts": "a" * 64, "variant": "2k"}, {"num_prompts": 22, "prompts": "b" * 64}],
         ["20 prompts, variant 2k", "22 prompts, no variant"]),
        ([{"num_prompts": 4, "prompts": "a" * 64}, {"num_prompts": 4, "prompts": "b" * 64}],
         ["prompts aaaaaaaaaaaa", "prompts bbbbbbbbbbbb"]),
    ],
)  # fmt: skip
def test_cells_of_one_label_are_named_by_what_a_reader_knows(fields: list[dict[str, Any]], expected: list[str]) -> None:
    """A file's hash tells cells apart where nothing else does."""
    cells = [generate(**each) for each in fields]
    plan = plan_of(cells, [])
    found = cell_names(plan)
    assert [found[cell.key].removeprefix(f"{cell.label}, ") for cell in cells] == expected


def test_a_cell_with_variables_is_not_said_to_have_none() -> None:
    """The baseline was named `env {}, no OMP_NUM_THREADS`, the variant `no env, OMP_NUM_THREADS 2`."""
    cells = [generate(num_prompts=4).model_copy(update={"env": env}) for env in ({}, {"OMP_NUM_THREADS": "2"})]
    found = cell_names(plan_of(cells, []))
    names = [found[cell.key].removeprefix(f"{cell.label}, ") for cell in cells]
    assert names == ["no OMP_NUM_THREADS", "OMP_NUM_THREADS 2"]
