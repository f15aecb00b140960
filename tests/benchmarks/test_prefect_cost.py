"""The benchmark of Prefect: its arithmetic, and that the pipeline does run without Prefect."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.prefect_cost.bench import tables
from benchmarks.prefect_cost.tables import (
    COUNTS,
    LAUNCHES,
    SIZES,
    added_seconds,
    figure,
    launches_table,
    seams_table,
    share_table,
    table,
)
from configs.plans.paths import RunPaths
from configs.records.record import Status
from tasks.campaign.ledger import read_ledger
from tests.support.run_folders import studies

FIXED_SECONDS = 5.0
WITHOUT = """
import sys
from benchmarks.prefect_cost.parts import without_prefect
try:
    without_prefect(sys.argv[1:])
finally:
    print("loaded from", getattr(sys.modules["prefect"], "__file__", "nowhere"))
"""


def made_up() -> dict[str, list[float]]:
    """Samples in which a task costs 4 ms, a subflow 1 s, a launch 8 tasks, and the start of a run 5 s."""
    price = {"plain": 0.0, "sequential": 0.004, "submitted": 0.004, "subflow": 1.0}
    samples = {f"start/{name}": [1.0, 3.0, 2.0] for name in ("cold", "warm", "up", "import", "import_used", "idle_cpu")}
    samples["start/memory"] = samples["cells/memory"] = [200 * 2.0**20, 230 * 2.0**20]
    for way, counts in SIZES.items():
        for count in counts:
            samples[f"cells/{way}/{count}/body"] = [count * price[way] * factor for factor in (0.5, 1.0, 9.0)]
            samples |= {f"cells/{way}/{count}/{name}": [1.0] for name in ("flow", "recorded", "server_cpu")}
    for count in COUNTS:
        samples[f"run/{count}/without"] = [4.0, 9.0, 4.0]
        samples[f"run/{count}/with"] = [4.0 + FIXED_SECONDS, 9.0 + FIXED_SECONDS, 14.0]
        samples |= {f"run/{count}/tasks": [8.0], f"run/{count}/flows": [1.0]}
    for count in LAUNCHES:
        samples |= {f"launches/{count}/without/wall": [5.0 + count], f"launches/{count}/without/server_cpu": [1.0]}
        samples |= {f"launches/{count}/with/wall": [9.0 + 1.01 * count]}
        samples |= {f"launches/{count}/with/server_cpu": [2.0 + 0.05 * count]}
        samples |= {f"launches/{count}/before/wall": [8.05 + 1.005 * count]}
        samples |= {f"launches/{count}/before/server_cpu": [2.0 + 0.04 * count]}
        samples |= {f"launches/{count}/before_without/wall": [4.5 + count]}
        samples |= {f"launches/{count}/before_without/server_cpu": [1.0]}
        samples |= {f"launches/{count}/{arm}/run_cpu": [1.0] for arm in ("without", "before", "before_without")}
        samples |= {f"launches/{count}/with/run_cpu": [3.0 + 0.002 * count]}
    return samples | {f"seams/{name}": [0.01, 0.02, 0.09] for name in ("artifact", "poll")}


@pytest.mark.parametrize(
    ("values", "scale", "digits", "text"),
    [
        ([3.0, 1.0, 2.0], 1.0, 1, "2.0 (1.0..3.0)"),
        ([0.0012, 0.0014], 1000.0, 2, "1.30 (1.20..1.40)"),
        ([1.01, 1.02, 1.03], 1.0, 1, "1.0"),
        ([1234.5], 1.0, 0, "1,234"),
        ([-0.5, 0.5, 1.5], 1.0, 1, "0.5 (-0.5..1.5)"),
    ],
)
def test_a_figure_is_median_and_range(values: list[float], scale: float, digits: int, text: str) -> None:
    assert figure(values, scale, digits) == text


def test_what_prefect_adds_is_paired_by_repetition() -> None:
    assert added_seconds(made_up(), 10) == [FIXED_SECONDS, FIXED_SECONDS, 10.0]


def test_shares_are_of_a_cell_of_one_second() -> None:
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in share_table(made_up()).splitlines()}
    assert rows["| plain function call"] == ["0.00 %", "0.00 %", "0.00 % |"]
    assert rows["| task per cell, called in turn"] == ["0.40 %", "0.40 %", "0.40 % |"]
    assert rows["| subflow per cell"] == ["100.00 %", "not measured", "not measured |"]
    assert rows["| as shipped, task per stage of a launch"] == ["0.32 %", "0.03 %", "0.00 % |"]
    assert rows["| as shipped, start-up and all"] == ["50.00 %", "5.00 %", "0.50 % |"]


def test_a_launch_is_what_sixty_cost_more_than_ten() -> None:
    lines = launches_table(made_up()).splitlines()
    assert "| Prefect, now: each launch more |  |  | 10 ms | 2 ms | 50 ms |" in lines
    assert "| Prefect, now: 10 launches | 19.1 | 15.0 | 4.10 | 2.02 | 1.50 |" in lines
    assert "| Prefect, before: each launch more |  |  | 5 ms | 0 ms | 40 ms |" in lines
    assert "| launches without Prefect, now and before: 60 launches | 65.0 | 64.5 | 0.50 | 0.00 | 0.00 |" in lines
    alone = {name: values for name, values in made_up().items() if "/before" not in name}
    assert "before" not in launches_table(alone)


def test_seams_are_in_milliseconds() -> None:
    assert all("| 20.0 (10.0..90.0) |" in line for line in seams_table(made_up()).splitlines()[2:])


def test_tables_can_be_pasted() -> None:
    text = tables(made_up())
    assert "resident: 230 MiB" in text
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 6
    for block in blocks:
        assert len({line.count("|") for line in block}) == 1
    some = {name: values for name, values in made_up().items() if name.startswith("launches")}
    assert tables(some).count("\n\n") == 1, "of the parts that were measured"
    assert table("a | b", [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


@pytest.mark.nightly
def test_the_pipeline_runs_without_prefect(tmp_path: Path) -> None:
    study = studies.write_study(tmp_path)
    command = [sys.executable, "-c", WITHOUT, "run", str(study), "--runs", str(tmp_path / "runs")]
    env = os.environ | {"RANKWISE_DATA": str(tmp_path / "data")}
    finished = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1] == "loaded from nowhere"
    entries = read_ledger(RunPaths(tmp_path / "runs" / "s")).entries.values()
    assert [entry.status for found in entries for entry in found] == [Status.COMPLETED] * 2
    assert not (tmp_path / "data").exists()
