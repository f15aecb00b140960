"""The runner of the GPU checks: planted crashes cost their own figures only; the whole rehearsal passes on a CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.catalog import CHECKS, Check
from benchmarks.gpu.checks.tests import outcomes
from benchmarks.gpu.reporting.document import PAGE, RESULTS, page, read_runs
from benchmarks.gpu.reporting.results import CheckResult, Figure, read_result, read_results, write_result
from benchmarks.gpu.reporting.table import rows, summary
from benchmarks.gpu.running.child import hide_unusable
from benchmarks.gpu.running.needs import CARRIED, FROM_IMAGE, advice, missing_packages
from benchmarks.gpu.running.plants import PLANTS, parse_plants
from benchmarks.gpu.running.runner import ROOT, limit_seconds


def gpu_check(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=380, env=environment)


@pytest.mark.parametrize(
    ("figure", "real", "rehearsed"),
    [
        (Figure("share", 0.7, bar=0.65), "met", "rehearsed"),
        (Figure("share", 0.6, bar=0.65), "missed", "rehearsed"),
        (Figure("share", float("nan"), bar=0.65), "missed", "rehearsed"),
        (Figure("error", 0.2, bar=0.1, sense="at most"), "missed", "rehearsed"),
        (Figure("verdict", "agrees", bar="agrees", sense="is", speed=False), "met", "met"),
        (Figure("verdict", "defect", bar="agrees", sense="is", speed=False), "missed", "missed"),
        (Figure("share", None, bar=0.65, note="no torchao"), "not reached", "not reached"),
        (Figure("seconds", 3.0), "seen", "seen"),
    ],
)
def test_a_figure_meets_its_bar_or_does_not(figure: Figure, real: str, rehearsed: str) -> None:
    assert (figure.state(rehearsal=False), figure.state(rehearsal=True)) == (real, rehearsed)


def a_result(**changes: object) -> CheckResult:
    figures = (Figure("share", 0.7, bar=0.65, low=0.69, high=0.72, samples=20), Figure("ms", 5.0))
    return CheckResult(
        **{"check": "decode", "title": "t", "state": "finished", "rehearsal": False, "figures": figures} | changes
    )  # type: ignore[arg-type]


def test_results_are_read_as_they_were_written_and_damaged_ones_made_again(tmp_path: Path) -> None:
    write_result(tmp_path, a_result())
    (tmp_path / "prefill.json").write_text('{"schema": 1, "check": "prefill"')
    (tmp_path / "power.json").write_text("[]")
    assert read_results(tmp_path) == {"decode": a_result()}
    with pytest.raises(ValueError, match=r"power\.json: not a result"):
        read_result(tmp_path / "power.json")


def test_the_table_has_the_bar_beside_the_figure_and_names_what_was_not_reached() -> None:
    crashed = a_result(check="power", state="crashed", cause="ended by SIGSEGV", figures=())
    found = rows([a_result(), crashed])
    assert found[0] == ("decode", "share", "0.7", "0.69 to 0.72", "≥ 0.65", "met")
    assert found[-1] == ("power", "(crashed) ended by SIGSEGV", "–", "", "", "not reached")
    assert summary([a_result(), crashed]) == "bars: 1 met, 0 missed, 1 not reached, 0 rehearsed; not finished: power"


def test_what_is_missing_is_named_with_the_command_that_packs_it() -> None:
    check = Check("decode", "t", 1.0, needs=("json", "a_missing_module"), wants=("pydantic_of_nowhere",))
    missing = missing_packages([check])
    assert missing == {"a_missing_module": ["decode"], "pydantic_of_nowhere": ["decode"]}
    assert any("make gpu-wheels" in line for line in advice({"pydantic": ["decode"]}))
    assert not any("make gpu-wheels" in line for line in advice({"torch": ["decode"]}))


def test_checks_need_no_package_but_those_of_an_image_and_those_that_are_carried() -> None:
    """In a process where other dependencies of the project cannot be imported."""
    absent = ["aiohttp", "asyncssh", "azure", "boto3", "google", "matplotlib", "pandas"]
    absent += ["prefect", "pyarrow", "rich", "typer"]
    assert not set(absent) & {*FROM_IMAGE, *CARRIED}
    modules = [f"benchmarks.gpu.checks.{path.stem}" for path in (ROOT / "benchmarks/gpu/checks").glob("[a-z]*.py")]
    code = (
        f"import importlib, sys; sys.modules.update(dict.fromkeys({absent}))\n"
        f"for name in {sorted(modules)}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_package_that_cannot_be_imported_is_taken_for_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "too_new").mkdir()
    (tmp_path / "too_new" / "__init__.py").write_text("from . import quantization\n")
    (tmp_path / "too_new" / "quantization.py").write_text("from torch.nn.functional import NotThereYet\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("too_new") is not None
    hide_unusable("too_new")
    try:
        assert importlib.util.find_spec("too_new") is None
    finally:
        del sys.modules["too_new"]


def test_limits_are_shares_on_a_gpu_and_against_hangs_alone_in_a_rehearsal() -> None:
    waiting = [Check("a", "t", 1.0, 10.0), Check("b", "t", 4.0), Check("c", "t", 5.0)]
    assert limit_seconds(waiting, 200.0, rehearsal=False) == 20.0
    assert limit_seconds(waiting, 50.0, rehearsal=False) == 10.0, "what it needs at least"
    assert limit_seconds(waiting, 8.0, rehearsal=False) == 8.0, "then it is not begun"
    assert limit_seconds(waiting, 200.0, rehearsal=True) == 100.0
    assert limit_seconds(waiting[1:2], 200.0, rehearsal=True) == 200.0, "the last one has all"


def test_unknown_plants_and_checks_are_refused(tmp_path: Path) -> None:
    assert parse_plants(["decode=hang"], {"decode"}) == {"decode": "hang"}
    for wrong in ("decode=explode", "nothing=hang", "decode"):
        with pytest.raises(ValueError, match="--plant"):
            parse_plants([wrong], {"decode"})
    refused = gpu_check(tmp_path, "--only", "decoding")
    assert refused.returncode == 2 and "no check decoding" in refused.stderr


def test_the_page_is_the_one_that_the_result_files_give() -> None:
    assert PAGE.read_text() == page(read_runs(RESULTS)), "run python -m benchmarks.gpu.reporting.document"


def test_the_page_says_what_was_seen_and_what_was_not(tmp_path: Path) -> None:
    assert "No part of Rankwise has run on a GPU yet" in page({})
    seen = page({"h100": [a_result(surroundings={"device": "NVIDIA H100"}, began="2026-12-01T10:00:00Z")]})
    assert "NVIDIA H100, 2026-12-01" in seen and "run on a GPU yet" not in seen
    assert "- `prefill`" in seen and "- `decode`:" not in seen
    (tmp_path / "run").mkdir()
    write_result(tmp_path / "run", a_result(rehearsal=True))
    with pytest.raises(ValueError, match="rehearsal"):
        read_runs(tmp_path)


@pytest.mark.nightly
def test_planted_crashes_cost_their_own_figures_and_a_second_call_makes_them(tmp_path: Path) -> None:
    names = ["prefill", "training", "decode-peers", "decode-quantised", "loading", "power"]
    planted = dict(zip(names, PLANTS, strict=True))
    chosen = [part for name in (*names, "decode") for part in ("--only", name)]
    plants = [part for name, kind in planted.items() for part in ("--plant", f"{name}={kind}")]
    done = gpu_check(tmp_path, "--budget-minutes", "3", *chosen, *plants)
    assert done.returncode == 1, done.stderr
    found = read_results(tmp_path)
    ends = {kind: (found[name].state, found[name].cause) for name, kind in planted.items()}
    assert ends["segfault"] == ("crashed", "ended by SIGSEGV")
    assert ends["hang"][0] == "timed out" and ends["kill"] == ("crashed", "ended by SIGKILL")
    assert ends["oom"][0] == "failed" and "allocate" in ends["oom"][1]
    assert ends["missing"] == ("failed", "ModuleNotFoundError: No module named 'a_package_that_is_not_installed'")
    assert ends["full-disk"][0] == "failed" and "No space left" in ends["full-disk"][1]
    assert found["decode"].state == "finished" and found["decode"].figures
    for name in names:
        assert f"{name} " in done.stdout and found[name].cause in done.stdout
    before = (tmp_path / "decode.json").read_bytes()
    again = gpu_check(tmp_path, "--budget-minutes", "2", "--only", "decode", "--only", "prefill")
    assert again.returncode == 0, again.stdout
    assert (tmp_path / "decode.json").read_bytes() == before
    assert json.loads((tmp_path / "prefill.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_a_check_that_leans_on_most_of_the_code_passes_in_a_rehearsal(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--budget-minutes", "6", "--only", "serving")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert {result.state for result in read_results(tmp_path).values()} == {"finished"}


@pytest.mark.nightly
def test_the_whole_rehearsal_passes(tmp_path: Path) -> None:
    # The budget's shares are limits of single checks, against hangs; all of them end within `gpu_check`'s time.
    done = gpu_check(tmp_path, "--budget-minutes", "12")
    found = read_results(tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert sorted(found) == sorted(check.name for check in CHECKS)
    unreached = {
        figure.name: figure.note
        for result in found.values()
        for figure in result.figures
        if figure.state(rehearsal=True) == "not reached"
        # The first is no package of the tests; the second has its own, and is slow beside other tests.
        and not figure.name.startswith(("torchao", "calibration of the host"))
    }
    assert unreached == {}
    assert (tmp_path / "study.tar.gz").is_file()
    assert not (tmp_path / "work").exists() or not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "[gw0] [ 10%] PASSED tests/a.py::test_a\n[gw1] [ 20%] FAILED tests/a.py::test_b\n"
            "[gw0] [ 30%] PASSED tests/a.py::test_c\ntests/a.py::test_d \n",
            "2 passed, 1 failed",
        ),
        ("tests/a.py::test_a PASSED [ 50%]\ntests/a.py::test_b SKIPPED (needs a GPU) [100%]\n", "1 passed, 1 skipped"),
        ("collecting ... \n", "none"),
    ],
)
def test_what_passed_until_the_time_was_up_is_counted(written: str, said: str, tmp_path: Path) -> None:
    output = tmp_path / "tests.txt"
    output.write_text(written)
    assert outcomes(output) == said
