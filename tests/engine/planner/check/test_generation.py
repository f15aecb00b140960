"""Rows of offline generation: measured columns are no inputs, reasons, and files with columns of their own."""

import json
from pathlib import Path

import pytest

from engine.planner.check.generation import predict
from engine.planner.check.table import Columns, check_files
from flows.cli.plan.check import plan_check

HEADER = "model,gpu,num_gpus,framework,batch_size,prompt_tokens,new_tokens,latency_seconds,tokens_per_second\n"
ROW = "llama-3-8b,h100-80gb,1,vllm,16,512,512,"


def written(folder: Path, text: str) -> Path:
    path = folder / "B.csv"
    path.write_text(text)
    return path


def test_measured_columns_change_no_prediction(tmp_path: Path) -> None:
    found = [
        check_files(written(tmp_path, f"{HEADER}{ROW}{cells}\n")).result.rows[0] for cells in ("5,3000", "9,1", ",")
    ]
    assert len({row.predicted for row in found}) == 1 and found[0].measured == 3000 and found[2].measured is None
    assert found[0].interval is not None and "with vllm" in (found[0].support or "")


def test_latency_alone_becomes_tokens_a_second(tmp_path: Path) -> None:
    header = HEADER.replace(",tokens_per_second", "")
    row = check_files(written(tmp_path, f"{header}{ROW}8\n")).result.rows[0]
    assert row.measured == pytest.approx(16 * 1024 / 8) and row.error is not None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("llama-9,h100-80gb,1,vllm,1,8,8,,", "llama-9"),
        ("llama-3-8b,h1000,1,vllm,1,8,8,,", "unknown accelerator 'h1000'"),
        ("llama-3-8b,h100-80gb,16,vllm,1,8,8,,", "num_gpus: 16 are more than the 8 of a node"),
        ("llama-3-8b,h100-80gb,1,tgi,1,8,8,,", "framework: 'tgi' is not known"),
        ("phi-4,h100-80gb,4,vllm,1,8,8,,", "num_gpus: 4 ranks cannot share 40 heads, 10 of keys and values"),
        ("llama-3-70b,h100-80gb,1,vllm,1,8,8,,", "do not fit in the 84.9 GB"),
        ("bert-base-uncased,h100-80gb,1,vllm,1,8,8,,", "is not a decoder"),
        ("llama-3-8b,h100-80gb,1,vllm,0,8,8,,", "batch_size: '0' is not a whole number of at least 1"),
        ("llama-3-8b,h100-80gb,,vllm,1,8,8,,", "num_gpus is not given"),
    ],
)
def test_what_cannot_be_predicted_says_why(row: str, reason: str, tmp_path: Path) -> None:
    bad, good = check_files(written(tmp_path, f"{HEADER}{row}\n{ROW},\n")).result.rows
    assert bad.predicted is None and reason in (bad.reason or "") and good.predicted is not None


def test_a_file_with_columns_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "Name,GPUs,bs,in,out,tok/s,engine\nllama-3-8b,2,16,512,512,4000,mine\n")
    column = [
        "model=Name",
        "num_gpus=GPUs",
        "batch_size=bs",
        "prompt_tokens=in",
        "new_tokens=out",
        "tokens_per_second=tok/s",
    ]
    value = ["gpu=h100-80gb", "framework=vllm"]
    assert plan_check(path, None, True, column, value) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    same = predict(
        [
            dict(
                zip(
                    HEADER.strip().split(","),
                    ["llama-3-8b", "h100-80gb", "2", "vllm", "16", "512", "512", "", ""],
                    strict=True,
                )
            )
        ],
        [],
    )
    assert row["predicted"] == pytest.approx(same[0].predicted) and row["measured"] == 4000
    assert plan_check(path, None, True) == 2 and "--column NAME=COLUMN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "values", "said"),
    [
        (["model"], [], "--column: expected NAME=COLUMN with one of"),
        (["colour=x"], [], "got 'colour=x'"),
        ([], ["gpu="], "--value: expected NAME=VALUE"),
    ],
)
def test_a_wrong_mapping_is_refused(names: list[str], values: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Columns.parsed(names, values)


def test_a_mapped_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + ROW + ",\n")
    with pytest.raises(ValueError, match="--column model=Name: no such column; it has model, gpu"):
        check_files(path, None, Columns({"model": "Name"}, {}))
