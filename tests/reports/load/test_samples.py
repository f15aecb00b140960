import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load.samples import REQUEST_COLUMNS, SAMPLE_COLUMNS
from reports.load.samples import in_order, read_load_run
from tests.support.run_folders.load_runs import made_run


@given(st.permutations(range(6)))
def test_requests_are_put_into_the_order_in_which_they_were_due(order: list[int]) -> None:
    """The generator records them as they end."""
    right = made_run(np.arange(6.0), ttft=0.5, gap=np.arange(1.0, 7.0), tokens=3)
    mixed = {name: column[order] for name, column in right.columns.items()}
    chunks = right.chunk_seconds.reshape(6, 3)[order].ravel()
    found = in_order(right.facts, mixed, chunks, right.lag_seconds, "here")
    assert np.array_equal(found.columns["scheduled_seconds"], np.arange(6.0))
    assert np.array_equal(found.chunk_seconds, right.chunk_seconds)
    assert list(found.gap_request) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert found.gap_seconds == pytest.approx(np.repeat(np.arange(1.0, 7.0), 2))


def written(folder: Path, **changed: np.ndarray) -> Path:
    run = made_run(np.arange(5.0), ttft=0.5, tokens=3)
    columns = {**run.columns, "chunk_seconds": run.chunk_seconds, "lag_seconds": run.lag_seconds} | changed
    folder.mkdir(exist_ok=True)
    np.savez(folder / "samples.npz", **{f"0/{name}": columns[name] for name in SAMPLE_COLUMNS if name in columns})
    (folder / "run.json").write_text(run.facts.model_dump_json())
    return folder


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert len(read_load_run(written(tmp_path / "run"))) == 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chunk_seconds": np.zeros(2)}, "columns of different lengths"),
        ({"chunks": np.full(5, np.nan)}, "columns of different lengths"),
        ({"outcome": np.zeros(4)}, "columns of different lengths"),
        ({"ended_seconds": np.full(5, np.nan)}, "a request without its times"),
    ],
)
def test_damaged_samples_are_refused_by_name(tmp_path: Path, changed: dict[str, np.ndarray], message: str) -> None:
    folder = written(tmp_path / "run", **changed)
    with pytest.raises(ValueError, match=message) as caught:
        read_load_run(folder)
    assert "samples.npz" in str(caught.value)


def test_missing_files_and_columns_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    run = made_run(np.arange(5.0), ttft=0.5, tokens=3)
    np.savez(folder / "samples.npz", **{f"0/{name}": run.columns[name] for name in REQUEST_COLUMNS})
    with pytest.raises(ValueError, match="no column chunk_seconds"):
        read_load_run(folder)
    shutil.rmtree(folder)
    with pytest.raises(OSError, match=r"run\.json"):
        read_load_run(folder)
