"""Other engines on each kind of model answer as unmodified transformers does, one prompt at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.records.record import RankPart, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads import Workload
from configs.workloads.encode import EncodeWorkload
from configs.workloads.generate import GenerateWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.context import Context, RankResult
from engine.workloads.other_engines import run
from tests.support.cluster.launches import launch, part

LIMIT_SECONDS = 1500
PROMPTED = {"num_prompts": 3, "batch_size": 2, "prompt_tokens": 9, "answers": True}
KINDS: dict[str, tuple[str, Workload]] = {
    "decoder": ("gpt2-1m", GenerateWorkload(**PROMPTED, new_tokens=5)),
    "encoder": ("bert-1m", EncodeWorkload(**PROMPTED)),
    "encoder_decoder": ("t5-1m", Seq2SeqWorkload(**PROMPTED, new_tokens=5)),
}


def write_job(
    folder: Path, architecture: str, workload: Workload, cache: Path | None = None, **fields: Any
) -> tuple[JobPaths, Job]:
    """A job folder with one measurement of a cell of another engine, of a synthetic model."""
    identity = f"synthetic:{architecture}@1"
    config = ARCHITECTURES[architecture]
    manifest = ModelManifest(identity=identity, source="synthetic", folder="", files={}, config=config)
    measurement = Measurement(cell=Cell(model=identity, workload=workload, **fields), repeat=0, attempt=1)
    paths = JobPaths(folder / "jobs" / f"{measurement.cell.engine}-{measurement.cell.layout.ranks}")
    paths.folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    job = Job(
        name="job",
        study="test",
        measuring_pass="timed",
        measuring=Measuring(warmup=1, min_passes=2, min_seconds=0),
        measurements=(measurement,),
        ranks_per_node=measurement.cell.layout.ranks,
        timeout_seconds=LIMIT_SECONDS,
        manifest=str(folder / "manifest.json"),
        inputs=str(folder),
        cache=str(cache or folder / "cache"),
    )
    paths.job.write_text(job.model_dump_json())
    return paths, job


def run_here(folder: Path, architecture: str, workload: Workload, **fields: Any) -> RankResult:
    """A one-rank cell, measured in this process."""
    paths, job = write_job(folder, architecture, workload, **fields)
    manifest = ModelManifest.model_validate_json((folder / "manifest.json").read_bytes())
    return run(job.measurements[0], Context(job, paths, 0, 1, torch.device("cpu"), manifest, lambda: None))


def run_two_ranks(
    folder: Path, architecture: str, workload: Workload, cache: Path | None = None, **fields: Any
) -> tuple[list[RankPart], RankResult]:
    """Parts of both ranks of a launch of its own, and the samples of the one that speaks."""
    paths, job = write_job(folder, architecture, workload, cache, **fields)
    launch(paths, LIMIT_SECONDS)
    measurement = job.measurements[0]
    outcome = RankResult()
    reports_results = 1 if measurement.cell.layout.pp > 1 else 0
    if (samples := paths.samples(measurement.name, reports_results)).is_file():
        with np.load(samples) as found:
            outcome.samples = dict(found)
    # Where a rank gave up, the other may be ended before it has said so too.
    return [
        part(paths, measurement, rank) for rank in range(2) if paths.part(measurement.name, rank).is_file()
    ], outcome


def same_answers(found: RankResult, expected: RankResult) -> None:
    """Answers agree value by value, and samples have the same columns."""
    assert found.samples.keys() == expected.samples.keys()
    for name, values in expected.samples.items():
        if name.startswith(("answer_", "cached_")) and "top_tokens" not in name:
            assert np.allclose(found.samples[name], values, atol=2e-4), name


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_onnxruntime_answers_like_transformers(tmp_path: Path, kind: str) -> None:
    architecture, workload = KINDS[kind]
    expected = run_here(tmp_path, architecture, workload, engine="transformers")
    found = run_here(tmp_path, architecture, workload, engine="onnxruntime")
    same_answers(found, expected)
    figures = found.figures
    assert figures["onnx_optimization_level"] == "all" and figures["export_seconds"] > figures["load_seconds"] > 0
    assert figures["model_parameters"] == expected.figures["model_parameters"]
    again = run_here(tmp_path, architecture, workload, engine="onnxruntime")
    assert again.figures["export_seconds"] is None, "a second launch exported the model again"


def test_a_static_cache_of_an_encoder_decoder_gives_the_same_answers(tmp_path: Path) -> None:
    architecture, workload = KINDS["encoder_decoder"]
    expected = run_here(tmp_path, architecture, workload, engine="transformers")
    same_answers(run_here(tmp_path, architecture, workload, engine="transformers", engine_mode="static"), expected)


@pytest.mark.parametrize(("kind", "mode"), [("encoder", "static"), ("encoder_decoder", "compiled")])
def test_a_mode_that_the_kind_does_not_have_is_unsupported(tmp_path: Path, kind: str, mode: str) -> None:
    architecture, workload = KINDS[kind]
    with pytest.raises(NotImplementedError, match=f"engine_mode: {mode}"):
        run_here(tmp_path, architecture, workload, engine="transformers", engine_mode=mode)


@pytest.mark.slow
def test_two_stages_of_transformers_answer_like_one(tmp_path: Path) -> None:
    work = GenerateWorkload(**PROMPTED, new_tokens=5)
    expected = run_here(tmp_path, "llama-1m", work, engine="transformers")
    parts, found = run_two_ranks(tmp_path, "llama-1m", work, engine="transformers", layout=Layout(pp=2))
    assert [each.status for each in parts] == [Status.COMPLETED] * 2, parts
    same_answers(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "reason"), [("gpt2-1m", "has no `tp_plan`"), ("one KV head", "is invalid for input of size")]
)
def test_what_transformers_cannot_share_out_is_unsupported(
    tmp_path: Path, architecture: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "one KV head", ARCHITECTURES["llama-1m"] | {"num_key_value_heads": 1})
    work = GenerateWorkload(**PROMPTED, new_tokens=5)
    parts, _ = run_two_ranks(tmp_path, architecture, work, engine="transformers", layout=Layout(tp=2))
    assert parts[0].status is Status.UNSUPPORTED and parts[0].failure is not None
    message = parts[0].failure.message
    assert reason in message and message.endswith("use engine rankwise"), message


@pytest.fixture(scope="module")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSpeed's operator is compiled once for all that use it."""
    pytest.importorskip("deepspeed")
    return tmp_path_factory.mktemp("cache")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["encoder", "encoder_decoder"])
def test_deepspeed_answers_like_transformers(tmp_path: Path, compiled_cache: Path, kind: str) -> None:
    architecture, workload = KINDS[kind]
    expected = run_here(tmp_path, architecture, workload, engine="transformers")
    layout = Layout(tp=2)
    parts, found = run_two_ranks(tmp_path, architecture, workload, compiled_cache, engine="deepspeed", layout=layout)
    assert [each.status for each in parts] == [Status.COMPLETED] * 2, parts
    same_answers(found, expected)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_deepspeed_refuses_gpt2(tmp_path: Path, compiled_cache: Path) -> None:
    architecture, workload = KINDS["decoder"]
    layout = Layout(tp=2)
    parts, _ = run_two_ranks(tmp_path, architecture, workload, compiled_cache, engine="deepspeed", layout=layout)
    assert parts[0].status is Status.UNSUPPORTED and parts[0].failure is not None
    assert "AutoTP not supported" in parts[0].failure.message


def test_onnxruntime_says_what_it_has_no_kernels_for(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="bfloat16"):
        run_here(tmp_path, "bert-1m", KINDS["encoder"][1], engine="onnxruntime", dtype="bfloat16")
