"""The benchmark of the Python surface: what it measures, what it refuses, and a launch that fails."""

import json
import os
from typing import Any

import numpy as np
import pytest

from engine.api.inference_benchmark import BenchmarkConfig, DistributedInferenceBenchmark

TINY = BenchmarkConfig(
    model_size="tiny",
    batch_size=2,
    seq_len=16,
    num_layers=2,
    num_attention_heads=4,
    hidden_size=64,
    intermediate_size=96,
    world_size=2,
    vocab_size=128,
    new_tokens=4,
    dtype="float32",
    min_seconds=0.0,
    repeats=1,
)


def changed(**changes: Any) -> BenchmarkConfig:
    return BenchmarkConfig(**{**TINY.__dict__, **changes})


def test_integers_of_numpy_are_integers() -> None:
    config = DistributedInferenceBenchmark(
        changed(batch_size=np.int64(2), hidden_size=np.int32(64), world_size=1)
    ).config
    assert config == changed(world_size=1) and json.dumps(config.__dict__)


@pytest.mark.nightly
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_the_benchmark_runs_the_engine() -> None:
    results = DistributedInferenceBenchmark(TINY).run_comprehensive_benchmark()
    assert results.speedup_factor == results.throughput / results.single_rank_throughput > 0
    assert 0 < results.ttft_p50 < results.latency_p50 <= results.latency_p99
    assert 0 < results.token_latency_p50 <= results.token_latency_p99
    assert results.requests == 2  # two passes of one batch
    assert results.environment["tensor_transport"] != "none" and results.environment["torch"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(world_size=3), "3 ranks cannot share 4 attention heads"),
        (
            changed(hidden_size=256, num_attention_heads=64, world_size=64),
            "world_size: 64 ranks (outnumber the|need an accelerator)",
        ),
        (changed(num_layers=100, hidden_size=1 << 17), "GB of memory are free; use a smaller shape"),
        (changed(repeats=0), "repeats: expected a whole number from 1, got 0"),
        (changed(repeats=1.5), "repeats: expected a whole number from 1, got 1.5"),
        (changed(new_tokens=1), "new_tokens: expected a whole number from 2, got 1"),
        (changed(batch_size=0), "batch_size: expected a whole number from 1, got 0"),
        (changed(seq_len=0), "seq_len: expected a whole number from 1, got 0"),
        (changed(min_seconds=-1.0), "min_seconds: expected seconds from 0, got -1.0"),
        (changed(timeout_seconds=float("nan")), "timeout_seconds: expected seconds above 0, got nan"),
        (changed(timeout_seconds=0), "timeout_seconds: expected seconds above 0, got 0"),
        (changed(dtype="int8"), "dtype: 'int8' is not one of float32, bfloat16, float16"),
    ],
)
def test_what_cannot_be_measured_is_refused(config: BenchmarkConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedInferenceBenchmark(config)


@pytest.mark.slow
def test_a_launch_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.api.inference_benchmark._check", lambda config: None)
    benchmark = DistributedInferenceBenchmark(changed(world_size=1, num_attention_heads=3))
    with pytest.raises(RuntimeError, match="rank 0 of 1: failed: "):
        benchmark.run_comprehensive_benchmark()
