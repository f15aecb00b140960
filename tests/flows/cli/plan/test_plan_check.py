"""`rankwise plan-check`: kinds of file, their errors, JSON as promised, and the table."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.planner.check.rows import PublishedRow, RowPrediction
from engine.planner.check.table import KINDS, check_files, read_published_rows
from flows.cli.plan.check import plan_check

DECODE = "model,num_gpus,gpu,dtype,batch_size,prompt_tokens,tokens_per_second\n"
ROWS = DECODE + "llama-2-7b,1,a100_80gb,bf16,1,5,104.9\nllama-2-7b,2,a100_80gb,bf16,1,5,168.84\n"


def written(folder: Path, text: str, name: str = "B.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def as_json(path: Path, fit: Path | None, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert plan_check(path, fit, True) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_is_as_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, ROWS + "llama-9,1,a100_80gb,bf16,1,5,100\n")
    found = as_json(path, None, capsys)
    assert list(found) == ["rows", "median_error", "p90_error", "worst_error", "interval_coverage"]
    first, second, third = found["rows"]
    for row in (first, second):
        assert list(row) == ["predicted", "measured", "error", "interval", "support"]
        assert row["interval"][0] < row["predicted"] < row["interval"][1]
        assert row["error"] == pytest.approx(abs(row["predicted"] - row["measured"]) / row["measured"])
    assert (
        third["predicted"] is None
        and third["interval"] is None
        and third["error"] is None
        and "llama-9" in third["reason"]
    )
    errors = sorted((first["error"], second["error"]))
    assert found["median_error"] == pytest.approx(sum(errors) / 2) and found["worst_error"] == errors[1]
    assert found["p90_error"] == pytest.approx(errors[0] + 0.9 * (errors[1] - errors[0]))


def test_fitted_rows_are_named_as_no_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, ROWS)
    fitted = as_json(path, path, capsys)
    assert fitted["rows"][0]["error"] == pytest.approx(0, abs=1e-9)
    assert plan_check(path, path, False) == 0
    printed = capsys.readouterr().out
    assert "2 of the rows are also in the fit file" in printed and "2 rows, 0 without a prediction" in printed


def test_without_measured_columns_there_are_predictions_and_no_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "model,num_gpus,gpu,dtype,batch_size,prompt_tokens\nllama-2-7b,4,a100_80gb,bf16,1,5\n")
    found = as_json(path, None, capsys)
    assert found["rows"][0]["predicted"] > 100 and found["rows"][0]["measured"] is None
    assert found["median_error"] is None and found["p90_error"] is None and found["worst_error"] is None
    assert plan_check(path, None, False) == 0
    printed = capsys.readouterr().out
    assert "llama-2-7b" in printed and "0 compared with a measurement" in printed and "error:" not in printed


MEMORY = "model,num_gpus,gpu,parallelism,local_batch_size,sequence_length"
TRAINING = "model,sequence_length,num_gpus,gpu,micro_batch_size"


@pytest.mark.parametrize(
    ("header", "title"),
    [
        (f"{TRAINING},num_parameters,gradient_accumulation_steps", "training throughput"),
        (f"{TRAINING},tokens_per_second,tokens_per_second_per_gpu", "training throughput"),
        (f"{MEMORY},activation_checkpointing,compile,float8", "training memory"),
        (f"{MEMORY},tokens_per_second_per_gpu", "training memory"),
        (
            "model,num_gpus,gpu,dtype,batch_size,prompt_tokens,achieved_bandwidth_gb_per_second",
            "tensor-parallel decode",
        ),
    ],
)
def test_kinds_are_told_apart_by_columns_that_were_not_measured(header: str, title: str, tmp_path: Path) -> None:
    path = written(tmp_path, header + "\n" + ",".join("1" for _ in header.split(",")) + "\n")
    assert read_published_rows(path)[1].title == title


def test_checkers_see_no_measured_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the predicted file; and what has an empty field is not asked for."""
    seen: list[PublishedRow] = []

    def spy(rows: list[PublishedRow], fit: list[PublishedRow]) -> list[RowPrediction]:
        seen.extend(rows)
        assert [row["tokens_per_second"] for row in fit] == ["104.9", "168.84"]
        return [RowPrediction(100.0) for _ in rows]

    monkeypatch.setattr("engine.planner.check.decode.predict", spy)
    path = written(tmp_path, ROWS + "llama-2-7b,,a100_80gb,bf16,1,5,100\n")
    found = check_files(path, written(tmp_path, ROWS, "A.csv"))
    assert len(seen) == 2 and all(set(row) == set(DECODE.strip().split(",")) - {"tokens_per_second"} for row in seen)
    assert found.result.rows[2].predicted is None and found.result.rows[2].reason == "num_gpus is not given"
    assert all(set(kind.telling).isdisjoint(kind.measured) for kind in KINDS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty; known kinds of file"),
        (DECODE, "no rows after the header"),
        ("a,b\n1,2\n", "columns a, b are not known; known kinds of file and the columns that they need: training"),
        ("model,num_gpus\nllama-2-7b,2\n", "columns model, num_gpus fit no kind"),
        (DECODE.replace("gpu,", "", 1).replace("num_", "num_gpus,") + "x\n", "column gpu is missing"),
        (DECODE.replace("dtype", "gpu") + "llama-2-7b,1,a,a,1,5,1\n", "column gpu is there twice"),
        (DECODE + "llama-2-7b,1,a100_80gb,bf16,1,5\n", "row 1 has 6 fields, the header 7"),
    ],
)
def test_a_wrong_file_is_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, text)
    assert plan_check(path, None, True) == 2
    printed = capsys.readouterr()
    assert not printed.out and said in printed.err and str(path) in printed.err


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("llama-2-7b,four,a100_80gb,bf16,1,5,9", "num_gpus: 'four' is not a whole number of at least 1"),
        ("llama-2-7b,-4,a100_80gb,bf16,1,5,9", "num_gpus: '-4' is not a whole number of at least 1"),
        ("llama-2-7b,4,a100_80gb,bf16,inf,5,9", "batch_size: 'inf' is not a whole number of at least 1"),
    ],
)
def test_a_row_that_cannot_be_read_costs_no_other(
    row: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(written(tmp_path, f"{ROWS}{row}\n"), None, capsys)
    assert [line["predicted"] is None for line in found["rows"]] == [False, False, True]
    assert found["rows"][2]["reason"] == reason and found["rows"][2]["measured"] == 9


@pytest.mark.parametrize("cell", ["OOM", "nan", "0"])
def test_a_measured_cell_that_is_no_figure_counts_as_not_measured(
    cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_check(written(tmp_path, f"{ROWS}llama-2-7b,4,a100_80gb,bf16,1,5,{cell}\n"), None, True) == 0
    printed = capsys.readouterr()
    row = json.loads(printed.out)["rows"][2]
    assert row["predicted"] > 100 and row["measured"] is None and row["error"] is None
    assert f"row 3: tokens_per_second: '{cell}' is not a number over 0, so the row counts as not" in printed.err


@pytest.mark.parametrize(("wrong", "said"), [("1,5,OOM", "tokens_per_second: 'OOM'"), ("x,5,9", "batch_size: 'x'")])
def test_a_wrong_row_to_fit_on_is_left_out(
    wrong: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, ROWS)
    expected = as_json(path, path, capsys)
    fit = written(tmp_path, f"{ROWS}llama-2-7b,1,a100_80gb,bf16,{wrong}\n", "A.csv")
    assert plan_check(path, fit, True) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == expected and f"A.csv: row 3 is left out: {said}" in printed.err


@pytest.mark.parametrize(
    "text",
    [
        "model,sequence_length,num_gpus,gpu,micro_batch_size,gradient_accumulation_steps\n"
        "mpt-7b,2048{0},8{0},a100_80gb,2{0},1{0}\n",
        "model,num_gpus,gpu,dtype,batch_size,prompt_tokens\nllama-2-7b,2{0},a100_80gb,bf16,1{0},5{0}\n",
        "model,num_gpus,gpu,parallelism,local_batch_size,sequence_length\nllama-3.1-8b,8{0},h100,fsdp,2{0},8192{0}\n",
    ],
)
def test_whole_numbers_may_be_written_with_a_point(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, pointed = (as_json(written(tmp_path, text.format(end)), None, capsys) for end in ("", ".0"))
    assert plain == pointed and plain["rows"][0]["predicted"] > 0


def test_rows_of_the_fit_file_are_told_by_the_columns_of_both(tmp_path: Path) -> None:
    both = "model,sequence_length,num_gpus,gpu,micro_batch_size"
    fit = written(tmp_path, f"{both},precision,tokens_per_second\nmpt-7b,2048,8,a100_80gb,2,amp_bf16,20000\n", "A.csv")
    rows = f"{both},sharding\nmpt-7b,2048,8.0,a100_80gb,2,FULL_SHARD\nmpt-7b,2048,16,a100_80gb,2,FULL_SHARD\n"
    assert check_files(written(tmp_path, rows), fit).in_fit == 1


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, absent = written(tmp_path, ROWS), tmp_path / "none.csv"
    for predict, fit, said in (
        (absent, None, "No such file"),
        (tmp_path, None, "is a folder, expected a file"),
        (good, absent, "No such file"),
        (good, written(tmp_path, f"{MEMORY}\na,1,b,c,1,1\n", "M.csv"),
         "rows of training memory, but"),
        (good, written(tmp_path, "\n".join(line.rpartition(",")[0] for line in ROWS.split()), "blind.csv"),
         "no column tokens_per_second"),
    ):  # fmt: skip
        assert plan_check(predict, fit, False) == 2
        printed = capsys.readouterr()
        assert said in printed.err and not printed.out
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    assert plan_check(binary, None, False) == 2 and "not UTF-8 text" in capsys.readouterr().err


def test_unknown_columns_beside_known_ones_are_named_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(
        tmp_path,
        ROWS.replace("tokens_per_second", "tokens_per_second,mood")
        .replace("104.9", "104.9,good")
        .replace("168.84", "168.84,bad"),
    )
    assert plan_check(path, None, True) == 0
    printed = capsys.readouterr()
    assert "unknown columns ignored: mood" in printed.err and len(json.loads(printed.out)["rows"]) == 2


def test_the_table_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert plan_check(written(tmp_path, ROWS + "llama-9,1,a100_80gb,bf16,1,5,\n"), None, False) == 0
    printed = capsys.readouterr().out
    assert "predicted" in printed and "104.9" in printed and "error: median" in printed
    assert "3 rows, 1 without a prediction, 2 compared with a measurement" in printed


GENERATION = "model,gpu,num_gpus,framework,batch_size,prompt_tokens,new_tokens,tokens_per_second\n"


def test_rows_that_taught_the_shipped_constants_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(
        f"{model},a100-40gb,1,tensorrt-llm,1,128,128,168.96\n" for model in ("meta-llama/Llama-2-7b-hf", "llama-3.1-8b")
    )
    path = written(tmp_path, GENERATION + rows)
    assert plan_check(path, None, False) == 0
    said = capsys.readouterr().out
    assert "rows that are themselves among those measured points: 1. Their errors are in-sample" in said
    assert [row.get("in_sample", False) for row in as_json(path, None, capsys)["rows"]] == [True, False]


def test_predictions_have_three_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "model,sequence_length,num_gpus,gpu,micro_batch_size,gradient_accumulation_steps,tokens_per_second\n"
        "mpt-1b,2048,256,h100_80gb,12,1,10894207\n"
    )
    assert plan_check(written(tmp_path, text), None, False) == 0
    row = capsys.readouterr().out.splitlines()[2].split()
    assert all(figure.replace(",", "")[3:].strip("0") == "" for figure in (row[5], row[6], row[8])), row
    assert row[9] == "10,894,207", "measured figures stay as they are"


@pytest.mark.parametrize("column", ["batch_size", "prompt_tokens", "new_tokens", "num_gpus"])
def test_absurd_numbers_are_refused_row_by_row(column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = GENERATION.strip().split(",")
    row = dict(zip(names, ["llama-3-8b", "h100-80gb", "1", "vllm", "16", "512", "512", "9"], strict=True))
    path = written(tmp_path, GENERATION + ",".join((row | {column: "1000000000000"}).values()) + "\n")
    (found,) = as_json(path, None, capsys)["rows"]
    assert found["predicted"] is None and found["reason"].startswith(f"{column}: got 1000000000000, expected at most")
