"""Whole runs of tiny models through the command line: compressed weights, and embeddings on two ranks."""

from pathlib import Path

import pytest
import yaml

from configs.plans.paths import RunPaths
from reports.correctness.section import judge_experiment
from reports.experiments.compression import compression
from reports.reading.load import StudyResult, load_run
from tests.support.run_folders.reports import whole_report
from tests.support.run_folders.studies import rankwise

pytestmark = pytest.mark.slow

COMPRESSION = """
study: s
models: [{id: "synthetic:llama-1m@0"}]
workload: {kind: generate, num_prompts: 3, prompt_tokens: 12, new_tokens: 4, batch_size: 1}
dtype: bfloat16
experiments: {small: {kind: compression, passes: [int8]}}
"""
EMBEDDINGS = """
study: s
models: [{id: "synthetic:bert-1m@0"}]
workload: {kind: encode, num_prompts: 4, prompt_tokens: 12, batch_size: 2}
experiments:
  right: {kind: correctness, prompts: 4, layouts: [{tp: 2}], noise_orders: 3}
  pooled: {kind: sweep, over: {pooling: [mean]}}
"""


def run(folder: Path, study: str) -> StudyResult:
    rules = {"repeats": 1, "memory": False, "min_seconds": 0.05, "min_passes": 2}
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(study), "measuring": rules}, sort_keys=False))
    finished = rankwise("run", path, "--no-calibrate", cwd=folder)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return load_run(RunPaths(folder / "runs" / "s"))


def test_compressed_weights_are_fewer_bytes_and_answer_nearly_the_same(tmp_path: Path) -> None:
    study = run(tmp_path, COMPRESSION)
    base, int8 = compression(study, study.plan.experiments[0]).rows
    assert base.base and int8.resolved == "int8" and int8.throughput is not None
    assert int8.share is not None and 0.3 < int8.share < 1
    assert int8.quality is not None and abs(int8.quality.loss) < 0.05
    assert "## Compression" in whole_report(RunPaths(study.folder))


def test_embeddings_on_two_ranks_agree_with_the_reference(tmp_path: Path) -> None:
    study = run(tmp_path, EMBEDDINGS)
    _, (candidate,) = judge_experiment(study, study.plan.experiments[0])
    assert candidate.verdict.word == "agrees", candidate.verdict
    (timed,) = study.points(study.plan.experiments[1])
    rates = timed.values("embeddings_per_second")
    assert rates and timed.values("throughput") == rates
    text = whole_report(RunPaths(study.folder))
    assert "embeddings/s" in text and "cosine distance of the worst of 4 embeddings" in text
