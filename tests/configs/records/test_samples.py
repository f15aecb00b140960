"""Archives of samples: which columns may hold words, in the part of a rank and in a record."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.records.samples import TEXT_COLUMNS, DamagedSamplesError, read_archive


@pytest.mark.parametrize("rank", ["", "0/", "12/"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_columns_of_words(tmp_path: Path, rank: str, save: Callable[..., None]) -> None:
    path = tmp_path / "samples.npz"
    for name in TEXT_COLUMNS:
        save(path, **{f"{rank}{name}": np.array(["all_reduce", "send"])})
        assert read_archive(path)[f"{rank}{name}"].tolist() == ["all_reduce", "send"]
    save(path, **{f"{rank}step_seconds": np.array(["0.1", "0.2"])})
    with pytest.raises(DamagedSamplesError, match="step_seconds: not a one-dimensional column of numbers"):
        read_archive(path)
