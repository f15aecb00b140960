"""`rankwise compare`, `history` and the joining of runs: exit codes and files; once for real, slowed on purpose."""

import json
import os
from pathlib import Path
from xml.etree import ElementTree as xml

import pytest
from typer.testing import CliRunner

from configs.plans.paths import RunPaths
from configs.plans.plan import read_plan
from configs.records.record import Status
from flows.cli.main import app
from flows.cli.results.compare import compare_runs, history_add, history_list, history_show, join_runs
from reports.runs.history import open_history
from tests.support.run_folders.report_runs import generated, node_run, write_record
from tests.support.run_folders.studies import rankwise, write_study

SLOWED = "import time\n_sleep = time.sleep\ntime.sleep = lambda seconds: _sleep(1.1 * seconds)\n"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs of made-up records: `first`, `again` of the same speed, `slow` by 10 %."""
    for day, (name, slowness) in enumerate([("first", 1.0), ("again", 1.0), ("slow", 1 / 0.9)], 1):
        run = node_run(tmp_path / name, "local", slowness)
        for path in run.records.glob("*/*.json"):
            path.write_text(path.read_text().replace("2026-01-01", f"2026-01-0{day}"))
    return tmp_path


def test_exit_codes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs(runs / "first", runs / "again") == 0
    assert "No regression of more than 5 % is shown. Of 2 cells, 2 the same." in capsys.readouterr().out
    assert compare_runs(runs / "first", runs / "slow") == 4
    assert "Regression: 2 of 2 cells are worse by more than 5 %." in capsys.readouterr().out
    assert compare_runs(runs / "first", runs / "slow", threshold_percent=15) == 0
    assert compare_runs(runs / "slow", runs / "first") == 0


def test_wrong_arguments_are_2_and_nothing_is_written(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = runs / "out.md"
    assert compare_runs(runs / "first", None, markdown_file=file) == 2
    assert compare_runs(runs / "first", runs / "slow", baseline="main", markdown_file=file) == 2
    assert compare_runs(runs / "first", runs / "slow", threshold_percent=0, markdown_file=file) == 2
    assert compare_runs(runs / "first", runs / "first", markdown_file=file) == 2
    assert not file.exists() and capsys.readouterr().err.count("\n") == 4
    (runs / "latest").symlink_to("first")
    assert compare_runs(runs / "latest", runs / "first") == 2
    assert "got the same run twice" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not a run folder"):
        compare_runs(runs / "first", runs)
    with pytest.raises(ValueError, match="no history here"):
        compare_runs(runs / "first", None, baseline="main")


def test_files_for_other_programs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    markdown, junit = runs / "out.md", runs / "out.xml"
    code = compare_runs(runs / "first", runs / "slow", markdown_file=markdown, junit_file=junit, json_wanted=True)
    data = json.loads(capsys.readouterr().out)
    assert code == 4 and len(data["regressions"]) == 2
    assert "**Regression: 2 of 2 cells are worse by more than 5 %.**" in markdown.read_text()
    assert xml.parse(junit).getroot().get("failures") == "2"


def test_a_baseline_outlives_its_run_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert history_add(runs / "first", "main") == 0
    assert "first: added as run 1, named main" in capsys.readouterr().out
    (runs / "first").rename(runs.parent / "gone")
    assert compare_runs(runs / "slow", None, baseline="main") == 4
    assert compare_runs(runs / "again", None, baseline="main") == 0
    capsys.readouterr()
    file = runs / "history.sqlite"
    history_add(runs / "slow", "main")
    assert "named main (previously run 1)" in capsys.readouterr().out
    assert compare_runs(runs / "again", None, baseline="main", history_file=file) == 0


def test_a_baseline_that_is_the_run_itself_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ratios are 1, so that a check in CI passed for good; also where the run has grown since, or was moved."""
    later = next((runs / "slow" / "records").glob("*/r9-a1.json"))
    content = later.read_text()
    later.unlink()
    history_add(runs / "slow", "main")
    later.write_text(content)
    (runs / "slow").rename(runs / "moved")
    file = runs / "out.md"
    assert compare_runs(runs / "moved", None, baseline="main", markdown_file=file) == 2
    assert capsys.readouterr().err.endswith(f"--baseline main: is {runs / 'moved'} itself, expected another run\n")
    assert not file.exists()


def test_a_run_that_failed_altogether_has_no_other_environment(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every fact of the machine was listed as a difference, with `–` for the run that has no figure."""
    run = RunPaths(runs / "slow")
    for key, cell in read_plan(run.plan).cells.items():
        for file in (run.records / key).iterdir():
            file.unlink()
        write_record(run, cell, status=Status.FAILED)
    assert compare_runs(runs / "first", run.folder) == 4
    text = capsys.readouterr().out
    assert "\n\nNo cell of at least one side has a figure, so the environments are not compared.\n\n" in text
    assert "2 of 2 cells newly fail" in text


def first_record(run: Path) -> Path:
    """A record that begins before all others of its run."""
    record = sorted((run / "records").glob("*/r0-a1.json"))[0]
    record.write_text(json.dumps({**json.loads(record.read_text()), "started_at": "2025-12-31T00:00:00Z"}))
    return record


def test_a_run_whose_failed_repeat_was_measured_again_is_the_same_run(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attempt that failed began first. Without it the run was another one, and passed as compared with itself."""
    run = RunPaths(runs / "slow")
    first = first_record(run.folder)
    completed, samples = json.loads(first.read_text()), first.with_suffix(".npz").read_bytes()
    write_record(run, read_plan(run.plan).cells[first.parent.name], status=Status.FAILED)
    first_record(run.folder)
    history_add(run.folder, "main")
    again = first.with_name("r0-a2.json")
    late = {"attempt": 2, "started_at": "2026-12-31T00:00:00Z", "finished_at": "2026-12-31T00:00:30Z"}
    again.write_text(json.dumps({**completed, **late}))
    again.with_suffix(".npz").write_bytes(samples)
    capsys.readouterr()
    history_add(run.folder)
    assert "updated as run 1 with what the folder has now" in capsys.readouterr().out
    assert compare_runs(run.folder, None, baseline="main") == 2


def test_cells_that_a_study_lost_stay_in_the_history_of_its_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were deleted where the run was added again, and a baseline's figures with them."""
    key = first_record(runs / "slow").parent.name
    history_add(runs / "slow", "main")
    plan = json.loads((runs / "slow" / "plan.json").read_text())
    del plan["cells"][key], plan["repeats"][key]
    for experiment in plan["experiments"]:
        experiment["points"] = [point for point in experiment["points"] if point["cell"] != key]
    (runs / "slow" / "plan.json").write_text(json.dumps(plan))
    capsys.readouterr()
    history_add(runs / "slow")
    assert "run 1 with what the folder has now; kept: 1 cell that its study no longer has" in capsys.readouterr().out
    with open_history(runs / "history.sqlite") as history:
        (kept,) = history.runs()
    assert kept.figures.cells[key].estimate("throughput") is not None and len(kept.figures.cells) == 2
    assert kept.figures.facts(["commit"], [key])["commit"] == kept.figures.facts(["commit"])["commit"]
    assert compare_runs(runs / "slow", None, baseline="main") == 2
    assert compare_runs(runs / "again", None, baseline="main") == 0


def test_repeats_that_a_study_lost_stay_in_the_history_of_its_run(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`repeats` was lowered from 10 to 3 and the run added again: a baseline with intervals became one without."""
    history_add(runs / "slow", "main")
    with open_history(runs / "history.sqlite") as history:
        before = history.run("main").figures.cells
    path = runs / "slow" / "plan.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"repeats": dict.fromkeys(whole["repeats"], 3)}))
    capsys.readouterr()
    for state in ("updated as run 1 with what the folder has now", "already present as run 1"):
        history_add(runs / "slow")
        assert f"{state}; kept: 14 repeats that its study no longer has" in capsys.readouterr().out
        with open_history(runs / "history.sqlite") as history:
            assert history.run("main").figures.cells == before
    key = max(before)
    for record in (runs / "slow" / "records" / key).glob("r[012]-a1.json"):
        record.unlink()
    history_add(runs / "slow")
    with open_history(runs / "history.sqlite") as history:
        cell = history.run("main").figures.cells[key]
    assert (cell.completed, cell.planned, len(cell.values("throughput"))) == (True, 10, 7)
    path.write_text(json.dumps(whole))
    history_add(runs / "slow")
    assert "kept" not in capsys.readouterr().out.splitlines()[-1]


def test_a_name_that_the_history_does_not_have_is_a_wrong_argument(runs: Path) -> None:
    history_add(runs / "first", "main")
    named = ["--history", str(runs / "history.sqlite")]
    for words in (
        ["compare", str(runs / "slow"), "--baseline", "mian", *named],
        ["history", "show", "mian", *named],
        ["history", "show", "99", *named],
        ["history", "add", str(runs / "slow"), "--as", "12", *named],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.output


def test_the_history_lies_beside_the_run_folder_however_that_is_named(
    runs: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a link, or from within the folder, another history was begun that nobody looks at."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "latest").symlink_to(runs / "first")
    (runs / "again" / "jobs").mkdir()
    monkeypatch.chdir(runs / "again" / "jobs")
    for named in (elsewhere / "latest", Path("..")):
        assert history_add(named) == 0
    assert [path.parent for path in (*runs.rglob("*.sqlite"), *elsewhere.rglob("*.sqlite"))] == [runs]
    (runs / "moved").symlink_to((runs / "slow").rename(elsewhere / "slow"))
    assert history_add(runs / "moved") == 0 and not (elsewhere / "history.sqlite").exists()


def test_the_history_is_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = runs / "kept.sqlite"
    for name in ("first", "slow"):
        history_add(runs / name, name, file)
    capsys.readouterr()
    assert history_list(file) == 0 and "slow" in capsys.readouterr().out
    history_list(file, json_wanted=True)
    assert [run["names"] for run in json.loads(capsys.readouterr().out)] == [["first"], ["slow"]]
    assert history_show("first", file) == 0
    key = capsys.readouterr().out.splitlines()[1].split()[0]
    plot = runs / "cell.png"
    assert history_show(key, file, plot=plot) == 0
    shown = capsys.readouterr().out
    assert "40.0 (" in shown and "36.0 (" in shown and f"Figure     {plot}" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    history_show(key, file, figure="peak_memory_bytes", json_wanted=True)
    shown_cell = json.loads(capsys.readouterr().out)
    assert shown_cell["runs"][0]["figures"]["peak_memory_bytes"] == {"0": 100 * 2**20}
    history_show("first", file, json_wanted=True)
    of_run = json.loads(capsys.readouterr().out)["cells"][key]
    assert shown_cell["unit"] == of_run["unit"] == "tokens/s"
    assert history_show(key, file, figure="speed") == 2
    assert history_show(key, file, plot=runs / "cell.gif") == 2
    assert history_show("first", file, plot=plot) == 2


def test_runs_are_joined(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "notes").mkdir()
    assert join_runs([str(runs / "*")], runs / "joined.md") == 0
    said = capsys.readouterr().out
    assert "3 runs joined" in said and "notes: not a run folder, skipped" in said
    assert (runs / "joined.md").read_text().startswith("# 3 nodes side by side: nodes")


def test_a_joined_report_has_the_exit_code_of_the_worst_run(runs: Path) -> None:
    """It was 0 whatever its runs lacked; of one run alone it is 3."""
    next(runs.glob("again/records/*/r9-a1.json")).unlink()
    assert join_runs([str(runs / "again")]) == 3
    assert join_runs([str(runs / "first"), str(runs / "again")], runs / "joined.md") == 3
    assert join_runs([str(runs / "first"), str(runs / "slow")], runs / "joined.md") == 0


def test_the_option_for_runs_to_join_may_be_given_again(runs: Path) -> None:
    """All but the last were dropped without a word, and its own report was written."""
    given = [word for name in ("first", "again") for word in ("--results", str(runs / name))]
    result = CliRunner().invoke(app, ["report", *given, str(runs / "slow"), "--output", str(runs / "joined.md")])
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "3 runs joined"), result.output


def test_the_folder_of_a_file_that_is_named_is_made(runs: Path) -> None:
    """All was read and computed, and then lost for want of a folder."""
    first, again = str(runs / "first"), str(runs / "again")
    new = runs / "new"
    for words, file in (
        (["report", "--results", first, again, "--output"], new / "a" / "joined.md"),
        (["compare", first, again, "--format", "html", "--output"], new / "b" / "compare.html"),
        (["compare", first, again, "--markdown"], new / "c" / "compare.md"),
        (["compare", first, again, "--junit"], new / "d" / "compare.xml"),
    ):
        result = CliRunner().invoke(app, [*words, str(file)])
        assert result.exit_code in (0, 1) and file.is_file(), result.output


def test_a_file_for_the_comparison_of_one_run_is_refused(runs: Path) -> None:
    """It was not written, and nobody said so."""
    for given in (["first"], ["fir*"]):
        asked = ["report", "--results", *(str(runs / name) for name in given), "--output", str(runs / "joined.md")]
        result = CliRunner().invoke(app, asked)
        assert result.exit_code == 2 and "--output: one run alone matches" in result.output, result.output
    assert CliRunner().invoke(app, asked[:-2]).exit_code == 0 and not (runs / "joined.md").exists()


def test_repeats_that_were_cancelled_are_not_said_to_have_failed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "again"
    for place, path in enumerate(sorted(run.glob("records/*/r[789]-a1.json"))):
        record = json.loads(path.read_text())
        record["status"] = "failed" if place % 3 == 0 else "cancelled"
        record["failure"] = {"message": "gone"}
        path.write_text(json.dumps(record))
    assert compare_runs(runs / "first", run) == 0
    assert "repeats failed: 1 of 10 in the second" in capsys.readouterr().out


def test_no_figure_of_a_joined_report_is_of_two_devices(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A partition of mixed nodes: three repeats of one cell, and all of another, ran on a GPU twice as fast."""
    run = node_run(runs / "mixed", "gpus", 1.0)
    four, eight = read_plan(run.plan).cells.values()
    for cell in (four, eight):
        fast = range(3) if cell is four else range(10)
        for repeat in range(10):
            device = "H100" if repeat in fast else "A10G"
            figures = {"measurement_seconds": 2.0, "device": device}
            samples = generated(cell, 0.5 if repeat in fast else 1.0)
            write_record(run, cell, repeat, samples=samples, figures=figures)
    assert join_runs([str(runs / "first"), str(runs / "mixed")], runs / "joined.md") == 0
    assert "left out: 3 repeats of" in capsys.readouterr().err
    text = (runs / "joined.md").read_text()
    assert text.startswith("# 3 nodes side by side") and "gpus on H100 with" in text.splitlines()[2]
    assert "gpus on A10G | 40.0 (40.0 to 40.0)" in text and "tiny on" not in text
    rows = [line for line in text.splitlines() if line.startswith("| gpus on ")]
    assert any(line.startswith("| gpus on A10G | tokens/s | 1 of 1 | 40.0 |") for line in rows)
    assert any(line.startswith("| gpus on H100 | tokens/s | 1 of 1 | 80.0 |") for line in rows)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # 24 launches, each a start of torch, beside whatever else is tested
def test_the_same_code_gives_no_alarm_and_ten_per_cent_slower_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real runs: twice the same, and once with an engine whose every sleep takes 10 % longer."""
    (tmp_path / "slowed").mkdir()
    (tmp_path / "slowed" / "sitecustomize.py").write_text(SLOWED)
    study = write_study(
        tmp_path,
        experiments={"grid": {"kind": "sweep", "over": {"seconds": [0.1, 0.2]}}},
        measuring={"repeats": 8, "min_seconds": 0.4, "memory": False},
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "slowed"), os.environ.get("PYTHONPATH")]))
    for name, variables in (("first", {}), ("again", {}), ("slow", {"PYTHONPATH": path})):
        done = rankwise("run", study, "--runs", tmp_path / name, cwd=tmp_path, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
    first, again, slow = (tmp_path / name / "s" for name in ("first", "again", "slow"))
    history_add(first, "main", tmp_path / "h.sqlite")
    capsys.readouterr()

    assert compare_runs(first, again, json_wanted=True) == 0
    calm = json.loads(capsys.readouterr().out)
    assert compare_runs(first, slow, json_wanted=True) == 4
    alarm = json.loads(capsys.readouterr().out)
    assert compare_runs(slow, None, baseline="main", history_file=tmp_path / "h.sqlite") == 4

    assert len(calm["cells"]) == len(alarm["cells"]) == 2 and calm["regressions"] == []
    assert {cell["verdict"] for cell in calm["cells"]} <= {"same", "better", "worse", "cannot tell"}
    assert [cell["verdict"] for cell in alarm["cells"]] == ["worse", "worse"]
    for cell in alarm["cells"]:
        assert cell["figures"]["throughput"]["ratio"] == pytest.approx(1 / 1.1, abs=0.03)
