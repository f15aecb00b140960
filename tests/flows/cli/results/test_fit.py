"""`rankwise fit`: JSON as promised, text, plot, and every problem of a wrong file."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.results.fit import fit_file
from reports.laws.file import read_points

DATA = Path(__file__).parents[3] / "data"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(text: str, name: str = "points.csv") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert fit_file(path, True, None) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_every_law(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = as_json(DATA / "specsdm91.csv", capsys)
    assert {"lambda", "sigma", "kappa", "peak_ranks", "intervals"} <= found["laws"]["usl"].keys()
    assert found["laws"]["usl"]["intervals"].keys() == {"lambda", "sigma", "kappa", "peak_ranks"}
    assert "serial_fraction" in found["laws"]["amdahl"]
    assert [point["ranks"] for point in found["laws"]["karp_flatt"]] == [18, 36, 72, 108, 144, 216]
    assert found["refused"].keys() == {"gustafson"}
    assert found["supported"]["law"] == "usl" and found["unit_ranks"] == 1
    assert len(found["laws"]["usl"]["residuals"]) == len(found["points"]) == 7
    assert not list(tmp_path.iterdir()), "no plot unless it is asked for"


def test_json_of_weak_scaling_and_of_no_peak(capsys: pytest.CaptureFixture[str]) -> None:
    weak = as_json(written("ranks,throughput,kind\n1,10,weak\n2,19,weak\n4,37,weak\n"), capsys)
    assert weak["laws"].keys() == {"gustafson"} and weak["refused"].keys() == {"amdahl", "usl", "karp_flatt"}
    rows = "".join(f"{n},{10 * n / (1 + 0.1 * (n - 1))}\n" for n in (1, 2, 4, 8, 16, 32))
    flat = as_json(written("ranks,throughput\n" + rows), capsys)
    assert flat["laws"]["usl"]["kappa"] == pytest.approx(0, abs=1e-9)
    assert (flat["laws"]["usl"]["peak_ranks"] is None) == (flat["laws"]["usl"]["kappa"] == 0)
    assert flat["laws"]["amdahl"]["serial_fraction"] == pytest.approx(0.1)


def test_text_and_plot(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_file(DATA / "gpt_fast_7b.csv", False, None) == 0
    text = capsys.readouterr().out
    for part in ("Strong scaling, 4 numbers of ranks from 1 to 8", "Amdahl: lambda", "Karp-Flatt: serial fraction by"):
        assert part in text
    assert "Universal Scalability Law: not fitted; it fits 3 parameters" in text
    assert "Residuals, measured / law - 1, by ranks" in text and "The data support Amdahl's law" in text
    assert Path("gpt_fast_7b-laws.png").read_bytes()[:4] == b"\x89PNG"
    assert fit_file(DATA / "gpt_fast_7b.csv", True, Path("x.svg")) == 0
    assert Path("x.svg").read_text().startswith("<?xml")
    assert json.loads(capsys.readouterr().out)["laws"]


@pytest.mark.parametrize(
    "rows",
    ["4,100\n", "1,100\n2,150\n", "1,100\n2,90\n4,70\n8,50\n", "".join(f"{n},{n**0.9}\n" for n in range(3, 43))],
)
def test_any_number_of_points_is_drawn(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_file(written("ranks,throughput\n" + rows), False, None) == 0
    assert "plot: points-laws.png" in capsys.readouterr().out


@pytest.mark.parametrize("json_wanted", [False, True])
def test_laws_are_printed_where_the_plot_cannot_be_written(
    json_wanted: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert fit_file(DATA / "specsdm91.csv", json_wanted, tmp_path / "file" / "laws.png") == 1
    told = capsys.readouterr()
    assert (
        ("usl" in json.loads(told.out)["laws"])
        if json_wanted
        else told.out.startswith("Strong scaling, 7 numbers of ranks")
    )
    assert told.err == f"--plot {tmp_path}/file/laws.png: Not a directory\n"


def test_repeats_pair_and_conditions_mark(capsys: pytest.CaptureFixture[str]) -> None:
    header = "Ranks, Throughput ,repeat,dtype\n"
    rows = [
        (n, base * n**0.9 * (1 + 1e-4 * (r * n % 5)), r, "bf16" if n == 4 else "fp32")
        for r, base in enumerate((10, 20, 15, 12, 11, 18, 16, 13))
        for n in (1, 2, 4)
    ]
    path = written(header + "".join(",".join(map(str, row)) + "\n" for row in rows))
    found = as_json(path, capsys)
    last = found["points"][-1]
    assert last["changed"] == ["dtype bf16 instead of fp32"]
    low, high = last["speedup"]["interval"]
    assert low < 4**0.9 < high and high - low < 0.01, "a block's own speed is no noise of the speed-up"
    assert fit_file(path, False, None) == 0
    text = capsys.readouterr().out
    assert "Speed-ups are paired by repeat." in text and "Held to be conditions: dtype." in text
    assert "Not only the ranks changed: 4 ranks (dtype bf16 instead of fp32)" in text


def test_rows_of_equal_ranks_without_repeats_are_not_paired(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{n},{n * 10 + i}\n" for n in (1, 2, 4) for i in range(6))
    data = read_points(written(f"ranks,throughput\n{rows}"))
    assert not data.paired and [len(point.values) for point in data.points] == [6, 6, 6]
    assert fit_file(Path("points.csv"), False, None) == 0
    told = capsys.readouterr().out
    assert "unpaired: there is no column repeat" in told and "together get intervals from" not in told


@pytest.mark.parametrize("more", ["", "1,102,3\n2,191,4\n4,352,5\n"])
def test_repeats_that_share_no_number_have_no_speedup_and_it_is_said(
    more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    numbered = written("ranks,throughput,repeat\n1,100,0\n2,190,1\n4,350,2\n" + more)
    assert fit_file(numbered, False, None) == 0
    text = capsys.readouterr().out
    assert "No speed-up at 2 and 4 ranks: no repeat was measured there and at 1 too." in text
    assert "get intervals from" not in text, "there is none that repeats could give an interval"


def test_every_problem_is_named_with_line_and_column(capsys: pytest.CaptureFixture[str]) -> None:
    path = written(
        "ranks,throughput,kind,repeat\n1,abc,weak,0\n2,,strong,x\n2.5,3,odd,1\n3,4\n\n4,5,strong,1\n4,5,weak,1\n-1,inf,,3\n"
    )
    assert fit_file(path, False, None) == 2
    said = capsys.readouterr().err
    for part in (
        "points.csv:2: column throughput: 'abc' is not a number above 0",
        "points.csv:3: column repeat: 'x' is not a whole number from 0 on",
        "points.csv:4: column ranks: '2.5' is not a whole number from 1 to 1,000,000,000",
        "points.csv:4: column kind: 'odd'; use strong or weak",
        "points.csv:5: 2 cells, the first line names 4 columns",
        "points.csv:8: column repeat: repeat 1 of 4 ranks is on line 7 already",
        "points.csv:9: column ranks: '-1' is not",
        "column kind: strong and weak in one file",
    ):
        assert part in said
    assert not list(Path().glob("*.png"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; the first line names the columns: ranks,throughput"),
        ("ranks,thruput\n1,2\n", "no column throughput; there are: ranks, thruput; did you mean it by thruput?"),
        ("ranks;throughput\n1;2\n", "columns must be separated by commas"),
        ("ranks,ranks,throughput\n1,1,2\n", "column ranks: named twice"),
        ("ranks,throughput\n", "no rows below the first line"),
        ("ranks,throughput\n" + "1,x\n" * 30, "more problems"),
        ("ranks,throughput\n" + "9" * 5000 + ",1\n", "column ranks: '9999"),
        ("ranks,throughput\n1e300,1\n", "column ranks: '1e300' is not a whole number from 1 to 1,000,000,000"),
        ("ranks,throughput\n1,1e300\n", "column throughput: '1e300' is not a number above 0 (to 1e+30)"),
        ("ranks,throughput\n1," + "1" * 200_000 + "\n", "not a CSV file (field larger than field limit"),
    ],
)
def test_wrong_files(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_file(written(text), True, None) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read_or_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_file(Path("nowhere.csv"), False, None) == 2
    Path("latin.csv").write_bytes(b"ranks,throughput,gpu\n1,2,\xe9\n")
    assert fit_file(Path("latin.csv"), False, None) == 2
    assert fit_file(DATA / "cisco.csv", False, Path("x.jpeg")) == 2
    said = capsys.readouterr().err
    assert "nowhere.csv: No such file" in said and "not UTF-8 text" in said and "ends in .png or .svg" in said
    assert fit_file(DATA / "cisco.csv", False, Path("latin.csv/x.png")) == 1
