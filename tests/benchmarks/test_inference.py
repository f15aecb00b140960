"""The inference benchmark: its study plans, and its rows say what the records hold."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.inference import kernels
from benchmarks.inference.bench import STUDY, main
from benchmarks.inference.rows import Measured, Row, inference_rows, table_text, work_of
from configs.common.execution import Layout
from configs.plans.expand import expand
from configs.plans.paths import RunPaths
from configs.plans.plan import PlannedModel
from configs.records.record import Failure, Record, Status
from configs.spec.cell import Cell
from configs.spec.study import load_study
from configs.workloads.communication import CommunicationWorkload
from configs.workloads.generate import GenerateWorkload

BLOCKS = 8
DECODE = GenerateWorkload(num_prompts=1, prompt_tokens=64, read_probe=True)
MANY = GenerateWorkload(num_prompts=64, batch_size=64)
ANSWERS = GenerateWorkload(num_prompts=4, batch_size=4, micro_batch_size=2, answers=True)


def measured(
    samples: dict[str, Any], repeat: int = 0, figures: dict[str, Any] | None = None, by_rank: Any = None, **fields: Any
) -> Measured:
    """A completed record with these samples; fields of the cell, warm and in bfloat16 unless told otherwise."""
    layout = Layout(tp=fields.pop("tp", 1), pp=fields.pop("pp", 1))
    cell = Cell(**({"model": "folder:0", "page_cache": "warm", "dtype": "bfloat16", "layout": layout} | fields))
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
        figures=figures or {},
        rank_figures=by_rank or {},
    )
    return Measured(record, {name: np.atleast_1d(np.array(value)) for name, value in samples.items()})


def row(rows: list[Row], start: str) -> Row:
    """The row whose text begins so."""
    (found,) = [row for row in rows if row.what.startswith(start)]
    return found


def test_decode_is_held_against_peers_and_the_plain_read_within_blocks() -> None:
    found = []
    for block in range(BLOCKS):
        slow = 1 + block / 10  # the machine drifts: only ratios within a block are steady
        ours = {"0/gap_seconds": [0.012 * slow] * 3, "0/weights_read_seconds": [0.009 * slow] * 3}
        found.append(measured(ours, block, workload=DECODE))
        two = {
            "0/gap_seconds": [0.010 * slow],
            "0/weights_read_seconds": [0.004 * slow, 0.005 * slow, 0.005 * slow],
            "1/weights_read_seconds": [0.006 * slow, 0.006 * slow, 0.006 * slow],
        }
        found.append(measured(two, block, workload=DECODE, tp=2))
        plain = DECODE.model_copy(update={"read_probe": False})
        for fields, seconds in (
            ({"engine": "transformers"}, 0.036),
            ({"engine": "transformers", "engine_mode": "compiled"}, 0.011),
            ({"engine": "transformers", "tp": 2}, 0.060),
        ):
            found.append(measured({"0/gap_seconds": [seconds * slow]}, block, workload=plain, **fields))
    rows = inference_rows(found)
    eager = row(rows, "decode, batch 1, one rank, against transformers eager")
    assert eager.value == pytest.approx(3.0) and eager.word == "met"
    assert eager.interval == pytest.approx((3.0, 3.0)) and eager.repeats == BLOCKS
    assert row(rows, "decode, batch 1, one rank, against transformers compiled").word == "missed"
    static = row(rows, "decode, batch 1, one rank, against transformers static")
    assert (static.word, static.note) == ("not measured", "no such cell was measured")
    shares = [found for found in rows if "share of" in found.what]
    assert [found.value for found in shares] == pytest.approx([0.75, 0.6]), "the slowest rank's read counts"
    assert [found.word for found in shares] == ["met", "missed"]
    assert row(rows, "the same, against transformers tp=2").value == pytest.approx(6.0)


def test_a_cell_that_failed_leaves_its_reason_in_the_table() -> None:
    failed = measured({}, workload=DECODE, engine="deepspeed", tp=2)
    broken = failed.record.model_copy(update={"status": Status.UNSUPPORTED, "failure": Failure(message="no compiler")})
    rows = inference_rows([Measured(broken, {})])
    assert row(rows, "the same, against DeepSpeed").note == "no compiler"
    assert "| not measured: no compiler |" in table_text(rows)


def test_the_best_micro_batch_of_each_side_counts() -> None:
    found = []
    for pp, sizes in ((1, {16: 4.0, 64: 3.0}), (2, {16: 1.5, 32: 2.5})):
        for size, seconds in sizes.items():
            work = GenerateWorkload(num_prompts=64, batch_size=64, micro_batch_size=size)
            ranks = {f"{rank}/pass_seconds": [seconds - 0.1 * rank] for rank in range(pp)}
            found += [measured(ranks, block, workload=work, pp=pp) for block in range(BLOCKS)]
    many = row(inference_rows(found), "pp=2, 64 sequences")
    assert many.value == pytest.approx(2.0) and many.word == "met"
    assert many.note == "micro-batches of 16 on two stages, of 64 on one rank"


def test_loads_are_taken_from_the_measurement_that_loaded() -> None:
    found = []
    for block in range(BLOCKS):
        bytes_asked = {"load_asked_bytes": [51.0, 50.0], "load_seconds": [0.10, 0.09], "load_device_bytes": [60, 44]}
        load = {"load_bytes": 100}
        found.append(measured({}, block, load, bytes_asked, workload=MANY, tp=2))
        found.append(measured({}, block, {"load_seconds": None, "load_bytes": None}, workload=DECODE, tp=2))
        cold = load | {"raw_read_seconds": 0.1}
        same = {name: values for name, values in bytes_asked.items() if name != "load_device_bytes"}
        cold |= {"load_device_bytes": 52}  # of each rank: what ranks have in common is kept once
        found.append(measured({}, block, cold, same, workload=DECODE, tp=2, page_cache="cold"))
        theirs = {"load_seconds": 0.15}
        found.append(measured({}, block, theirs, workload=DECODE, tp=2, engine="transformers"))
    for one in found:  # no timings in these: only the loads are asked for
        assert isinstance(one.samples, dict)
        one.samples.update(dict.fromkeys(("0/gap_seconds", "0/ttft_seconds", "0/weights_read_seconds"), np.ones(2)))
    rows = inference_rows(found)
    assert [row(rows, start).value for start in ("bytes asked", "bytes from the device")] == pytest.approx([0.51, 1.04])
    assert row(rows, "bytes from the device").word == "met"
    warm = row(rows, "load to ready at tp=2, warm, against transformers tp=2")
    assert warm.value == pytest.approx(1.5) and warm.word == "missed" and warm.repeats == BLOCKS
    assert row(rows, "load to ready at tp=2, cold").value == pytest.approx(1.0)


def test_the_first_token_is_counted_from_the_first_read() -> None:
    found = []
    for block in range(BLOCKS):
        own = {"load_seconds": 0.02, "first_ttft_seconds": 0.08}
        found.append(measured({"0/warmup_ttft_seconds": [9.0]}, block, own, workload=DECODE, tp=2))
        for fields in ({"tp": 2}, {"engine_mode": "static"}):
            theirs = {"0/warmup_ttft_seconds": [0.2, 0.1], "1/warmup_ttft_seconds": [0.1, 0.1]}
            load = {"load_seconds": 0.1}
            found.append(measured(theirs, block, load, workload=DECODE, engine="transformers", **fields))
    for one in found:
        assert isinstance(one.samples, dict)
        one.samples.update(dict.fromkeys(("0/gap_seconds", "0/weights_read_seconds"), np.ones(2)))
    for peer in ("tp=2", "on one rank"):
        first = row(
            inference_rows(found),
            f"load to first token at tp=2, warm, 64 tokens of prompt, against transformers {peer}",
        )
        assert first.value == pytest.approx(3.0) and first.word == "met"


def test_sums_take_the_size_that_is_asked_for() -> None:
    work = CommunicationWorkload(operations=("all_reduce", "broadcast"), sizes_bytes=(1024, 16384))
    samples = {}
    for rank in range(2):
        samples[f"{rank}/operation"] = [0, 0, 0, 3]
        samples[f"{rank}/size_bytes"] = [1024, 16384, 16384, 16384]
        samples[f"{rank}/call_seconds"] = [1e-6, 20e-6 + rank * 4e-6, 20e-6 + rank * 4e-6, 1.0]
    found = [measured(samples, block, workload=work, tp=2, page_cache=None, model=None) for block in range(BLOCKS)]
    sums = row(inference_rows(found), "sum of 16 KB")
    assert sums.value == pytest.approx(24e-6) and sums.word == "met"


def test_answers_are_compared_value_by_value() -> None:
    rng = np.random.default_rng(1)
    logits, cached, tokens = rng.normal(size=600), rng.normal(size=60), np.arange(12)
    logits[5] = 8.0
    one = {"0/answer_logits": logits, "0/cached_logits": cached, "0/answer_tokens": tokens}
    near, far = logits.copy(), cached.copy()
    near[7] += 4e-5
    far[3] += 16e-5
    two = {"0/answer_logits": near, "0/cached_logits": far, "0/answer_tokens": tokens, "1/answer_tokens": tokens}
    staged = {f"1/{name[2:]}": values for name, values in one.items()} | {"0/answer_tokens": tokens}
    common = {"workload": ANSWERS, "dtype": "float32", "page_cache": None}
    found = [measured(one, **common), measured(two, **common, tp=2), measured(staged, **common, pp=2)]
    rows = inference_rows(found)
    tensor = row(rows, "float32 logits, tp=2")
    assert tensor.value == pytest.approx(2e-5, rel=1e-3) and tensor.word == "missed"
    stages = row(rows, "pp=2 against one rank, float32")
    assert (stages.value, stages.word) == (0, "met")
    found[2] = measured(staged | {"1/answer_logits": near}, **common, pp=2)
    assert row(inference_rows(found), "pp=2 against one rank, float32").value == 1


@pytest.mark.parametrize(
    ("value", "interval", "at_most", "word"),
    [
        (2.0, (1.9, 2.1), False, "undecided"),
        (2.2, (2.0, 2.4), False, "met"),
        (1.8, (1.7, 1.9), False, "missed"),
        (1.8, (1.7, 2.0), True, "met"),
        (2.2, (2.1, 2.3), True, "missed"),
        (3.0, None, False, "undecided"),
        (None, None, False, "not measured"),
    ],
)
def test_a_bar_is_met_with_the_whole_interval(value: float, interval: Any, at_most: bool, word: str) -> None:
    assert Row("what", "times", 2.0, at_most, value, interval).word == word


def test_the_shipped_study_has_every_cell_that_the_rows_ask_for() -> None:
    study = load_study(STUDY)
    assert study.measuring.repeats >= 8 and study.measuring.warmup >= 1
    model = PlannedModel(name="llama-200m", identity="synthetic:llama-200m@0", manifest="m.json")
    plan = expand(study, [model], {}, lambda work: 0)
    cells = list(plan.cells.values())
    assert {work_of(cell) for cell in cells} == {"decode", "prefill", "many", "answers", "sums"}
    complete = []
    for cell in cells:
        ranks = range(cell.layout.ranks)
        columns = {
            "gap_seconds": np.ones(2),
            "ttft_seconds": np.ones(2),
            "warmup_ttft_seconds": np.ones(2),
            "pass_seconds": np.ones(2),
            "weights_read_seconds": np.ones(2),
            "operation": np.zeros(2),
            "size_bytes": np.full(2, 16384),
            "call_seconds": np.ones(2),
            "answer_logits": np.ones(2),
            "cached_logits": np.ones(2),
            "answer_tokens": np.ones(2),
        }
        names = ("load_seconds", "load_bytes", "load_asked_bytes", "load_device_bytes", "raw_read_seconds")
        figures = dict.fromkeys((*names, "first_ttft_seconds"), 1.0)
        samples = {f"{rank}/{name}": values for rank in ranks for name, values in columns.items()}
        blank = measured({}, workload=cell.workload, tp=cell.layout.ranks, page_cache=cell.page_cache).record
        for block in range(plan.repeats[cell.key]):
            record = blank.model_copy(update={"cell": cell, "key": cell.key, "repeat": block, "figures": figures})
            complete.append(Measured(record, samples))
    unmeasured = [row.what for row in inference_rows(complete) if row.value is None]
    assert not unmeasured


def test_the_table_of_an_empty_run_says_that_nothing_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    RunPaths(tmp_path).records.mkdir()
    monkeypatch.setattr(sys, "argv", ["bench_inference", "--table", str(tmp_path)])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 20
    assert all("not measured" in line for line in lines[2:])


@pytest.mark.slow
def test_the_model_is_written_in_files_with_an_index(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.peers.checkpoint", "llama-1m", "0", str(tmp_path / "m"), "3"]
    subprocess.run(command, check=True)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_bytes())
    sizes = [(tmp_path / "m" / name).stat().st_size for name in sorted(set(index["weight_map"].values()))]
    assert len(sizes) == 3 and max(sizes) < 0.6 * sum(sizes)
    assert sum(sizes) == pytest.approx(index["metadata"]["total_size"], rel=0.02)
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and "not written over" in again.stderr


@pytest.mark.slow
def test_products_of_two_checkouts_are_compared_in_speed_and_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """Against itself: the bits are the same."""
    here = Path(__file__).resolve().parents[2]
    assert kernels.main([str(here), "--formats", "int8", "--rows", "1", "--rounds", "1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert line[:2] == ["int8", "1"] and "same" in line and all(float(rate) > 0 for rate in line[2:5])
