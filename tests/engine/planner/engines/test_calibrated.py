"""Constants are found again from rows made with them, priors hold before any row, intervals hold what they promise."""

from pathlib import Path

import numpy as np
import pytest

from configs.hardware.catalog import accelerator, catalog
from configs.hardware.hardware import Machine
from engine.planner.catalog import find_model
from engine.planner.check.generation import measured_points
from engine.planner.check.table import read_published_rows
from engine.planner.engines.calibrated import CalibratedEngines, fit_engines
from engine.planner.engines.constants import _CLOCK_HERTZ, engine_name, log_prior
from engine.planner.engines.fit import predicted_logs, sensitivities
from engine.planner.engines.levels import LevelBasis, names
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.saved import SHIPPED, read, shipped, write
from engine.planner.engines.schedule import cache_tokens
from engine.planner.engines.work import PhaseWork, seconds

PUBLISHED = Path(__file__).parents[4] / "docs" / "measurements" / "published" / "inference_throughput.csv"


def point(
    engine: str = "vllm", device: str = "h100-80gb", tp: int = 1, batch: int = 8, model: str = "llama-3-8b"
) -> BatchPoint:
    found = accelerator(device)
    machine = Machine(name=device, accelerator=found, accelerators=8)
    return BatchPoint(engine, find_model(model), machine, tp, batch, 256, 256)


def test_constants_are_found_again() -> None:
    points = [
        point(engine, tp=tp, batch=batch, model=model)
        for engine in ("vllm", "tensorrt-llm") for tp in (1, 2, 4) for batch in (1, 8, 64)
        for model in ("llama-3-8b", "llama-2-7b", "qwen2-7b")
    ]  # fmt: skip
    order = names(points)
    truth = np.zeros(len(order))
    truth[order.index("memory")], truth[order.index("sequence_seconds|vllm")] = -1.0, 1.5
    measured = seconds(PhaseWork.of(points), LevelBasis(points, order).constants(truth))
    others = [point(tp=2, batch=32, model="mistral-7b"), point("tensorrt-llm", batch=1, model="mistral-7b")]
    wanted = seconds(PhaseWork.of(others), LevelBasis(others, order).constants(truth))
    found = fit_engines(points, measured).forecast(others)
    for forecast, figure in zip(found, wanted, strict=True):
        assert forecast.seconds == pytest.approx(figure, rel=0.05) and forecast.low < figure < forecast.high


def test_slopes_are_those_of_each_deviation_on_its_own() -> None:
    fitted, points = shipped().fitted, [point(), point("sglang", "mi300x", tp=2), point(device="h200", batch=64)]
    work = PhaseWork.of(points)
    logs, slopes, _ = sensitivities(fitted, points)
    assert predicted_logs(fitted, points, work).tolist() == logs.tolist()
    order = list(dict.fromkeys([*fitted.order, *names(points)]))
    deviations = np.concatenate([fitted.deviations, np.zeros(len(order) - len(fitted.order))])
    basis = LevelBasis(points, order)
    assert len(order) > len(basis.moving) > 0
    for index in range(len(order)):
        moved = deviations + 1e-4 * (np.arange(len(order)) == index)
        slope = (np.log(seconds(work, basis.constants(moved))) - logs) / 1e-4
        assert slopes[:, index] == pytest.approx(slope, abs=1e-3), order[index]


def test_what_was_never_measured_is_wider_and_says_so() -> None:
    known = point()
    calibrated = shipped()
    cases = [known, point(device="h200"), point("sglang"), point("sglang", "mi300x"), point("vllm", "mi300x")]
    found = calibrated.forecast(cases)
    spreads = [forecast.high / forecast.seconds for forecast in found]
    assert spreads[0] < spreads[1] and spreads[0] < spreads[2] < spreads[3]
    assert "none of llama-3-8b" in found[0].support and "none of h200" in found[1].support
    assert found[2].support.startswith("data sheets and priors alone")
    assert found[4].support == "120 measured points of llama-3-8b on mi300x with vllm"
    bare = CalibratedEngines.none().forecast([known])[0]
    assert bare.high / bare.seconds > 1.5 and bare.support.startswith("data sheets")


def test_a_batch_that_nearly_fills_the_cache_may_queue() -> None:
    """Weights of 70 billion parameters leave little of 4 x 40 GB: the interval counts what the engine takes of it."""
    engine, device, model = "tensorrt-llm", "a100-40gb", "llama-2-70b"
    small, nearly = (point(engine, device, 4, batch, model) for batch in (1, 64))
    assert 0.6 < nearly.tokens / cache_tokens(nearly) < 1
    found = shipped().forecast([small, nearly])
    assert found[0].high / found[0].seconds < 1.2 < found[1].high / found[1].seconds


def test_longer_batches_and_prompts_take_longer() -> None:
    found = shipped().forecast([point(batch=batch) for batch in (1, 2, 4, 8, 16, 32, 64)])
    times = [forecast.seconds for forecast in found]
    assert times == sorted(times)


def test_the_shipped_constants_predict_the_rows_that_they_were_fitted_on() -> None:
    rows, _, _ = read_published_rows(PUBLISHED)
    points, measured = measured_points(rows)
    found = shipped().forecast(points)
    errors = [abs(figure / forecast.seconds - 1) for figure, forecast in zip(measured, found, strict=True)]
    assert len(points) == 879 and float(np.median(errors)) < 0.02 and float(np.percentile(errors, 90)) < 0.06


def test_a_left_out_pair_is_predicted_and_its_interval_holds() -> None:
    """The table of all pairs is `benchmarks.planner.engines`; this is one, of every fourth row."""
    rows, _, _ = read_published_rows(PUBLISHED)
    points, measured = measured_points(rows[::4])
    left = np.array([one.pair == ("llama-2-7b", "h100-80gb") for one in points])
    kept = np.flatnonzero(~left)
    found = fit_engines([points[at] for at in kept], measured[kept]).forecast(
        [points[at] for at in np.flatnonzero(left)]
    )
    pairs = list(zip(measured[left], found, strict=True))
    assert float(np.median([abs(figure / forecast.seconds - 1) for figure, forecast in pairs])) < 0.07
    assert sum(forecast.low <= figure <= forecast.high for figure, forecast in pairs) >= 0.85 * len(pairs)


def test_a_written_file_predicts_the_same(tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    calibrated = shipped()
    write(calibrated, path, "docs/measurements/published/inference_throughput.csv")
    cases = [point(), point("tensorrt-llm", "a100-40gb", tp=4)]
    assert [one.seconds for one in read(path).forecast(cases)] == pytest.approx(
        [one.seconds for one in calibrated.forecast(cases)], rel=1e-3
    )
    assert path.read_text().count("\n") == SHIPPED.read_text().count("\n")


def test_every_gpu_of_the_catalog_has_its_clock() -> None:
    """An A10G (AWS's G5), an RTX PRO 6000 or an RTX 4090 had the clock, and so the launches, of an A100."""
    gpus = [name for name, device in catalog().accelerators().items() if device.kind in ("cuda", "rocm", "xpu")]
    assert {name.split("-")[0] for name in gpus} == set(_CLOCK_HERTZ)
    assert all(1.3e9 < hertz < 2.7e9 for hertz in _CLOCK_HERTZ.values())
    step = [log_prior("step_seconds", "vllm", name, "cuda") for name in ("a100-80gb", "a10g", "rtxpro6000")]
    assert step == sorted(step, reverse=True) and len(set(step)) == 3


def test_engines_are_named() -> None:
    assert engine_name(" TensorRT_LLM ") == "tensorrt-llm" and engine_name("vLLM") == "vllm"
    with pytest.raises(ValueError, match="framework: 'tgi' is not known; use one of: vllm"):
        engine_name("tgi")
