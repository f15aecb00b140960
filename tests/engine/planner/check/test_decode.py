"""Tensor-parallel decode: published rows predicted within bounds, no measured column read, unknown rows explained."""

from pathlib import Path

import pytest

from benchmarks.planner.decode import main, smallest_rows
from engine.planner.check.decode import predict
from engine.planner.check.rows import PublishedRow, checked
from engine.planner.check.table import check_files, read_published_rows

PUBLISHED = Path(__file__).parents[4] / "docs" / "measurements" / "published"
FILE = PUBLISHED / "tensor_parallel_decode.csv"


@pytest.fixture(scope="module")
def rows() -> list[PublishedRow]:
    return read_published_rows(FILE)[0]


def row(**changes: str) -> PublishedRow:
    found = {"model": "llama-2-7b", "num_gpus": "1", "gpu": "a100_80gb", "dtype": "bf16"}
    return found | {"batch_size": "1", "prompt_tokens": "5"} | changes


def value(**changes: str) -> float:
    found = predict([row(**changes)], [])[0]
    assert found.predicted is not None, found.reason
    return found.predicted


def reason(**changes: str) -> str:
    found = predict([row(**changes)], [])[0]
    assert found.predicted is None and found.reason is not None
    return found.reason


def test_from_constants_and_the_smallest_row(rows: list[PublishedRow]) -> None:
    smallest = smallest_rows(rows)
    others = [one for one in rows if one not in smallest]
    fitted = checked(others, predict(others, smallest), "tokens_per_second")
    assert len(fitted.errors) == 5
    assert (fitted.percentile(50) or 1) < 0.04 and (fitted.percentile(100) or 1) < 0.06


def test_from_constants_alone(rows: list[PublishedRow]) -> None:
    alone = checked(rows, predict(rows, []), "tokens_per_second")
    assert len(alone.errors) == len(rows) == 7
    assert (alone.percentile(50) or 1) < 0.05 and (alone.percentile(100) or 1) < 0.10


def test_one_model_teaches_another(rows: list[PublishedRow]) -> None:
    for model in ("llama-2-7b", "llama-2-70b"):
        others = [one for one in rows if one["model"] != model]
        fit = smallest_rows([one for one in rows if one["model"] == model])
        assert (checked(others, predict(others, fit), "tokens_per_second").percentile(100) or 1) < 0.10


def test_measured_columns_are_not_read(rows: list[PublishedRow], tmp_path: Path) -> None:
    """Scrambled, absurd or absent: the predictions are the same to the bit."""
    expected = [one.predicted for one in check_files(FILE, FILE).result.rows]
    header = list(rows[0])
    for name, text in (("scrambled", "12345"), ("empty", ""), ("tiny", "1e-9")):
        lines = [",".join(header)]
        for one in rows:
            changed = one | {"tokens_per_second": text, "achieved_bandwidth_gb_per_second": text}
            lines.append(",".join(changed[column] for column in header))
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(lines) + "\n")
        assert [one.predicted for one in check_files(path, FILE).result.rows] == expected
    bare = tmp_path / "bare.csv"
    bare.write_text("\n".join(",".join(list(line.split(","))[:6]) for line in FILE.read_text().split()) + "\n")
    found = check_files(bare, FILE)
    assert [one.predicted for one in found.result.rows] == expected
    assert all(one.measured is None and one.error is None for one in found.result.rows)
    # The bandwidth is not read of the file to fit on either.
    fit = [one | {"achieved_bandwidth_gb_per_second": "1"} for one in rows]
    blind = [{name: text for name, text in one.items() if name in row()} for one in rows]
    assert [one.predicted for one in predict(blind, fit)] == expected


def test_the_smallest_row_sets_the_scale() -> None:
    base = value()
    small, large = row(tokens_per_second=str(base * 1.1)), row(num_gpus="8", tokens_per_second="1")
    found = predict([row(num_gpus="4"), row(model="llama-2-70b", num_gpus="4"), row(dtype="int8")], [large, small])
    for one, alone in zip(
        found, (value(num_gpus="4"), value(model="llama-2-70b", num_gpus="4"), value(dtype="int8")), strict=True
    ):
        assert one.predicted == pytest.approx(1.1 * alone), "own model, another model, another format"
    # An own row of the format counts for more than the model's other row.
    own = row(model="llama-2-13b", dtype="int8", tokens_per_second=str(value(model="llama-2-13b", dtype="int8") * 0.8))
    assert predict([row(dtype="int8")], [small, own])[0].predicted == pytest.approx(0.8 * value(dtype="int8"))
    nothing = [row(tokens_per_second=""), row(model="no-such", tokens_per_second="5")]
    assert predict([row()], nothing)[0].predicted == pytest.approx(base)


def test_other_models_formats_and_batches_keep_to_physics() -> None:
    assert value() > value(model="llama-2-13b") > value(model="codellama-34b") > value(model="llama-2-70b")
    assert value() > value(model="llama-3-8b") > value(model="llama-3-8b", num_gpus="8") / 8
    assert value() < value(dtype="int8") < value(dtype="int4-g128") < 4 * value()
    assert value(dtype="int4") == value(dtype="int4-g32") < value(dtype="int4 (G=128)") == value(dtype="w4a16-g128")
    assert value(model="mixtral-8x7b", dtype="int8", num_gpus="2") > value(
        model="llama-2-70b", dtype="int8", num_gpus="2"
    )
    assert value() < value(gpu="h100-80gb") < value(gpu="h100-80gb", num_gpus="2")
    assert 6 * value() < value(batch_size="8") < 8 * value(), "all sequences' tokens"
    assert value(prompt_tokens="2000") < value()


def test_what_is_not_known_has_a_reason() -> None:
    assert "no-such" in reason(model="no-such")
    assert "warp-9" in reason(gpu="warp-9")
    assert "dtype: 'int3'" in reason(dtype="int3") and "int4-g128" in reason(dtype="int3")
    assert "dtype: 'int4-g0' is not known" in reason(dtype="int4-g0")
    assert reason(num_gpus="16").startswith("num_gpus: 16 are more than the 8 of a node")
    assert reason(num_gpus="3").startswith("num_gpus: 3 ranks cannot share 32 heads, 32 of keys and values")
    assert reason(num_gpus="1.5") == "num_gpus: '1.5' is not a whole number of at least 1"
    assert reason(batch_size="many").startswith("batch_size")
    assert "generates nothing" in reason(model="bert-base-uncased")


def test_the_benchmark_prints_baselines_beside(capsys: pytest.CaptureFixture[str]) -> None:
    main(PUBLISHED)
    printed = capsys.readouterr().out
    assert printed.count("(fit)") == 4
    for name in ("constants: 7 rows", "smallest row: 5 rows", "perfect scaling: 5 rows, median 36.4 %, worst 155.5 %"):
        assert name in printed
