"""Encoders and encoder-decoders in the report: rates, units, latency, cost, from records of known figures."""

import csv
from pathlib import Path

import numpy as np
import pytest

from configs.common.execution import Layout
from configs.hardware.prices import Price, TargetPrices
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.rates import MeasurementSamples, rates_of, whole_figures
from configs.spec.cell import Cell
from configs.workloads.encode import EncodeWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from reports.answer import answer
from reports.correctness.judge import CorrectnessVerdict
from reports.correctness.ladder import EmbeddingLadder
from reports.correctness.section import JudgedCell
from reports.reading.load import load_run
from reports.render import render_report
from tests.support.run_folders.made_studies import cells_of, planned, write_measurements, write_plan
from tests.support.run_folders.reports import whole_report

ENCODE = """
workload: {kind: encode, num_prompts: 8, batch_size: 2}
objectives: {embeddings_per_second: 4, p99_latency_seconds: 9, usd_per_million_embeddings: 1}
experiments:
  strong: {kind: strong, grow: dp, to: 2}
  weak: {kind: weak, grow: dp, to: 2}
  batch: {kind: sweep, over: {batch_size: [1, 2]}}
  pooled: {kind: optimization, baseline: {pooling: mean}, variants: {first: {pooling: first}}}
"""
SEQ2SEQ = ENCODE.replace("kind: encode", "kind: seq2seq, new_tokens: 9").replace("embeddings", "tokens")
SEQ2SEQ = SEQ2SEQ.replace("pooling: mean", "new_tokens: 9").replace("pooling: first", "new_tokens: 5")


def priced(plan: Plan) -> Plan:
    return plan.model_copy(update={"prices": {"local": TargetPrices(price=Price(usd_per_hour=3.6, source="a file"))}})


def rendered(folder: Path, study: str) -> tuple[RunPaths, str]:
    plan = priced(planned(study))
    run = write_plan(folder, plan)
    for number in range(len(plan.experiments)):
        for _, cell in cells_of(plan, number):
            share = (cell.workload.num_prompts or 1) / cell.layout.dp / 8  # type: ignore[union-attr]
            write_measurements(run, cell, share * (1 + 0.2 * (cell.layout.dp > 1)), peak_mib=64)
    render_report(run)
    return run, whole_report(run)


def test_embeddings_are_counted_over_all_replicas() -> None:
    cell = Cell(model="m", workload=EncodeWorkload(num_prompts=8, batch_size=2), layout=Layout(dp=2))
    samples = {f"{rank}/pass_seconds": np.array([1.0, 1.0 + rank]) for rank in range(2)}
    samples |= {f"{rank}/request_seconds": np.array([0.5, 0.5, 0.5, 0.7]) for rank in range(2)}
    samples |= {f"{rank}/batch_sequences": np.array([2.0, 2.0]) for rank in range(2)}
    figures = whole_figures(cell, {"num_prompts": 4, "prompt_tokens": 40}, {"prompt_tokens": [40, 80]})
    assert figures["prompt_tokens"] == 120 and figures["num_prompts"] == 8
    rates = rates_of(MeasurementSamples(cell, samples), figures)
    assert rates.embeddings_per_second == pytest.approx(16 / 3) == rates.throughput
    assert rates.tokens_per_second == pytest.approx(2 * 120 / 3)
    assert rates.latency_seconds == 0.5 and rates.ttft_seconds is None
    assert rates.busy_seconds == pytest.approx(1.25) and rates.waiting_seconds == pytest.approx(0.25)


def test_tokens_of_embeddings_are_unknown_without_their_count() -> None:
    cell = Cell(model="m", workload=EncodeWorkload(num_prompts=2, batch_size=2))
    samples = {"0/pass_seconds": np.ones(1), "0/request_seconds": np.ones(1), "0/batch_sequences": np.full(1, 2.0)}
    rates = rates_of(MeasurementSamples(cell, samples), {})
    assert rates.embeddings_per_second == 2.0 and rates.tokens_per_second is None


def test_prompts_of_tensor_parallel_ranks_count_once() -> None:
    cell = Cell(model="m", workload=Seq2SeqWorkload(num_prompts=4), layout=Layout(dp=2, tp=2))
    figures = whole_figures(cell, {"prompt_tokens": 10}, {"prompt_tokens": [10, 10, 30, 30]})
    assert figures["prompt_tokens"] == 40


@pytest.mark.slow
def test_a_report_of_embeddings(tmp_path: Path) -> None:
    run, text = rendered(tmp_path / "run", ENCODE)
    assert "embeddings/s, median (interval)" in text and "ms a request, median (interval)" in text
    assert "ms TTFT" not in text.split("## Cost")[0]
    assert "USD per million embeddings" in text and "per million tokens (encode)" not in text
    assert "2 ranks give 1.67 times" in text  # 8 prompts, half the work each, a fifth slower
    assert "P99 of a request" in text and "ms a request" in text.split("## Recommendations")[1]
    rows = list(csv.DictReader(run.cells_csv.read_text().splitlines()))
    one = next(row for row in rows if row["ranks"] == "1" and row["workload_batch_size"] == "2")
    assert float(one["embeddings_per_second_median"]) == pytest.approx(8, rel=0.02)
    assert float(one["tokens_per_second_median"]) == pytest.approx(80, rel=0.02)
    assert float(one["usd_per_million_embeddings_median"]) == pytest.approx(1000 / 8, rel=0.02)
    assert one["workload_pooling"] == "mean"
    assert "cost per million embeddings" in text and "missed" in text


@pytest.mark.slow
def test_a_report_of_sequences_has_first_tokens_and_tokens(tmp_path: Path) -> None:
    run, text = rendered(tmp_path / "run", SEQ2SEQ)
    assert "tokens/s, median (interval)" in text and "ms TTFT" in text and "ms TPOT" in text
    assert "USD per million tokens" in text
    rows = list(csv.DictReader(run.cells_csv.read_text().splitlines()))
    one = next(row for row in rows if row["ranks"] == "1" and row["workload_batch_size"] == "2")
    assert float(one["tokens_per_second_median"]) == pytest.approx(8 * int(one["workload_new_tokens"]), rel=0.02)
    study = load_run(run)
    assert all(result.unit == "tokens/s" for result in study.cells.values())


def test_the_answer_says_how_far_embeddings_turn(tmp_path: Path) -> None:
    plan = planned(ENCODE)
    run = write_plan(tmp_path / "run", plan)
    study = load_run(run)
    ladder = EmbeddingLadder(
        state_difference=2e-6,
        state_relative=1e-6,
        vector_difference=1e-7,
        cosine_mean=1e-14,
        cosine_worst=3e-14,
        same_nearest=1.0,
        prompts=12,
    )
    verdict = CorrectnessVerdict("agrees", "", encoded=ladder, encoded_noise=ladder)
    result = next(iter(study.cells.values()))
    told = " ".join(
        sentence.text for sentence in answer(study, [("tiny", JudgedCell("rankwise, tp=2", result, verdict))])
    )
    assert "cosine distance of the worst of 12 embeddings 3.0e-14; largest state difference 2.0e-6" in told
