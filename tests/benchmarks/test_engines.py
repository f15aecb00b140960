"""The bench of engines: its study plans, its tables say what the records hold, and a small one really runs."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import engines as bench_engines
from benchmarks.engines import STUDY, Point, Row, main, model_rows, tables_text
from benchmarks.inference.rows import Measured
from configs.common.execution import Layout
from configs.plans.expand import expand
from configs.plans.paths import RunPaths
from configs.plans.plan import PlannedModel
from configs.records.record import Failure, Record, Status
from configs.spec.cell import Cell
from configs.spec.study import load_study
from configs.workloads.encode import EncodeWorkload
from configs.workloads.generate import GenerateWorkload

WORK = GenerateWorkload(num_prompts=1, new_tokens=4, prompt_tokens=4)


def measured(seconds: float, repeat: int = 0, **fields: Any) -> Measured:
    """A completed record of one pass of four tokens that took so long; of a cell in bfloat16 unless told otherwise."""
    work = fields.pop("workload", WORK)
    layout = Layout(tp=fields.pop("tp", 1))
    cell = Cell(**({"model": "m", "dtype": "bfloat16", "workload": work, "layout": layout} | fields))
    record = Record(
        key=cell.key,
        cell=cell,
        repeat=repeat,
        attempt=1,
        status=Status.COMPLETED,
        job="j",
        position=0,
        started_at=None,
        finished_at=None,
        figures={"num_prompts": 1, "prompt_tokens": 4, "new_tokens": 4, "embedding_size": 8, "passes": 1},
    )
    samples = {name: np.array([seconds]) for name in ("0/pass_seconds", "0/request_seconds", "0/ttft_seconds")}
    samples |= {"0/batch_sequences": np.array([1.0]), "0/gap_seconds": np.full(3, seconds / 4)}
    return Measured(record, samples)


def row(rows: list[Row], engine: str, dtype: str = "bfloat16") -> Row:
    """The row of an engine."""
    (found,) = [row for row in rows if (row.point.engine, row.point.dtype) == (engine, dtype)]
    return found


def test_ours_is_held_against_each_engine_within_blocks() -> None:
    found = []
    for block in range(6):
        slow = 1 + block  # the machine drifts: only ratios within a block are steady
        found.append(measured(1.0 * slow, block))
        found.append(measured(2.0 * slow, block, engine="transformers"))
        found.append(measured(0.5 * slow, block, engine="onnxruntime", dtype="float32"))
        found.append(measured(0.5 * slow * (1.1 if block % 2 else 0.9), block, dtype="float32"))
    rows = model_rows(found)
    assert [each.point.engine for each in rows] == ["rankwise", "transformers", "rankwise", "onnxruntime"]
    theirs = row(rows, "transformers")
    assert theirs.ratio == pytest.approx(2.0) and theirs.word == "ahead" and theirs.blocks == 6
    assert theirs.ratio_bounds == pytest.approx((2.0, 2.0))
    ours = row(rows, "rankwise")
    assert ours.ratio is None and ours.word == "" and ours.rate is not None
    assert row(rows, "onnxruntime", "float32").word == "undecided", "ours is faster in one block, slower in the other"


@pytest.mark.parametrize(
    ("bounds", "word"), [((1.01, 2.0), "ahead"), ((0.5, 0.99), "behind"), ((1.0, 2.0), "undecided"), (None, "")]
)
def test_a_word_needs_all_of_the_bracket(bounds: Any, word: str) -> None:
    point = Point("transformers", 1, 1, "bfloat16")
    assert Row(point, rate=1.0, ratio=None if bounds is None else 1.5, ratio_bounds=bounds).word == word


def test_what_failed_says_why() -> None:
    broken = measured(1.0, engine="deepspeed", tp=2)
    failure = Failure(message="no plan for it")
    record = broken.record.model_copy(update={"status": Status.UNSUPPORTED, "failure": failure})
    text = tables_text({"bert": [Measured(record, {}), measured(1.0, workload=EncodeWorkload(num_prompts=1))]})
    assert "| 2 | 1 | bfloat16 | deepspeed | | | | not measured: no plan for it |" in text
    assert "embeddings/s" in text


def test_the_shipped_study_pairs_every_engine_with_ours() -> None:
    study = load_study(STUDY)
    models = [PlannedModel(name=model.name, identity=model.id, manifest="m.json") for model in study.models]
    cells = list(expand(study, models, {}, lambda work: 0).cells.values())
    points = {(cell.model, Point.of(cell)) for cell in cells}
    for model, point in points:
        assert (model, Point("rankwise", point.tp, point.batch, point.dtype)) in points, (model, point)
    assert {cell.model for cell in cells} == {model.id for model in study.models}
    for engine in ("transformers", "deepspeed", "onnxruntime"):
        batches = {point.batch for _, point in points if point.engine == engine}
        assert batches == {1, 8}, engine
    assert {point.tp for _, point in points if point.engine in ("rankwise", "transformers")} == {1, 2}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_small_study_runs_and_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = yaml.safe_load(STUDY.read_text())
    study["models"] = [{"id": "synthetic:bert-1m@0", "name": "bert-base"}]
    study["experiments"] = {name: study["experiments"][name] for name in ("encoder", "encoder in float32")}
    study["experiments"]["encoder"]["over"] = {"engine": ["rankwise", "transformers"], "batch_size": [1]}
    study["experiments"]["encoder in float32"]["over"]["batch_size"] = [1]
    study["measuring"] |= {"repeats": 1, "min_seconds": 0.05}
    small = tmp_path / "bench_engines.yaml"
    small.write_text(yaml.safe_dump(study))
    monkeypatch.setattr(bench_engines, "STUDY", small)
    monkeypatch.setattr(sys, "argv", ["bench_engines", "--runs", str(tmp_path)])
    main()
    text = capsys.readouterr().out
    assert text.count("not measured") == 0 and text.count("\n| 1 | 1 |") == 4, text
    monkeypatch.setattr(sys, "argv", ["bench_engines", "--table", str(RunPaths(tmp_path / "bench-engines").folder)])
    main()
    assert capsys.readouterr().out in text
