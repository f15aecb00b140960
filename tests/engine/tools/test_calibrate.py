"""Measuring this machine: a quick pass with tiny probes, the line through all-reduces, and what becomes a machine."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.planner.cells import made_up_calibration
from configs.hardware.calibration import (
    MEASURED_FORMATS,
    CalibratedFigure,
    Calibration,
    Fingerprint,
    MeasuredLink,
    Spread,
    calibration_path,
    read_calibration,
)
from engine.planner.local import local_machine, this_fingerprint
from engine.tools import calibrate as engine_calibrate
from engine.tools.calibrate_probes import measure_rank
from engine.tools.calibration_figures import QUICK, Sizes, attention_flops, derived_figures, layer_weights
from flows.cli.doctor.calibrate import CalibrationError, calibrate_now, ensure_calibration, print_calibration


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Calibration, Path]:
    """A calibration with probes too small to mean anything, made as a user makes it, and its cache."""
    cache = tmp_path_factory.mktemp("cache")
    return calibrate_now(cache, patience_seconds=60, quick=True), cache


def test_it_measures_every_figure_that_a_machine_is_made_of(quick: tuple[Calibration, Path]) -> None:
    calibration, cache = quick
    assert calibration.fingerprint == this_fingerprint()
    assert read_calibration(calibration_path(cache, this_fingerprint())) == calibration
    machine = local_machine(cache).while_busy(1)
    device = machine.accelerator
    assert device.measured and device.operators is not None and "measured here" in device.source
    assert machine.accelerators == calibration.fingerprint.cores
    assert 1e8 < device.flops("float32") < 1e13
    assert 1e8 < device.bytes_per_second < 1e12
    assert 1e-7 < device.kernel_seconds < 1e-2
    assert set(device.operators.linear["float32"]) == set(QUICK.rows)
    assert 50 << 20 < calibration.framework_bytes < 2 << 30
    assert calibration.framework_bytes < calibration.training_framework_bytes < 4 << 30


def test_ranks_that_compute_together_are_measured_and_linked(quick: tuple[Calibration, Path]) -> None:
    calibration, _ = quick
    if calibration.ranks < 2:
        pytest.skip("one core")
    assert all(figure.together is not None for figure in calibration.figures.values())
    assert calibration.links[0].ranks == 2
    link = calibration.to_machine(2).neighbour
    assert link is not None and 1e-8 < link.latency_seconds < 1.0 and link.message_seconds
    assert {one.transport for one in calibration.links} == {"gloo", "shared memory"}


def test_the_printed_table_names_figures_units_and_the_rest(
    quick: tuple[Calibration, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    print_calibration(quick[0])
    said = capsys.readouterr().out
    assert "GFLOP/s" in said and "memory read, GB/s" in said and "a process without its model" in said
    assert "from CPU flags" in said


def test_all_reduces_of_a_known_line_give_latency_and_bandwidth_back() -> None:
    latency, rate, ranks = 5e-4, 2e9, 4
    sizes = (4096, 65536, 1 << 20, 1 << 24)
    seconds = {str(size): 2 * 3 * latency + 2 * 3 / 4 * size / rate for size in sizes}
    link = engine_calibrate.fitted_link(ranks, seconds, (1e-3, 2e-4))
    assert link.latency_seconds == pytest.approx(latency)
    assert link.bytes_per_second == pytest.approx(rate)
    assert link.error == pytest.approx(0.0, abs=1e-9)


def test_a_line_that_would_fall_still_gives_figures_above_nothing() -> None:
    link = engine_calibrate.fitted_link(2, {"4096": 3e-3, "1048576": 2e-3, "4194304": 1e-3}, (1e-3, 2e-4))
    assert link.latency_seconds > 0 and link.bytes_per_second > 0


def test_figures_in_between_are_interpolated_and_ranks_share_memory() -> None:
    def spread(seconds: float) -> Spread:
        return Spread(median=seconds, low=seconds, high=seconds, rounds=1)

    made = made_up_calibration()
    line: dict[str, Any] = {"seconds": {}, "bytes_per_second": 1e9, "error": 0}
    figures = made.figures | {"read": CalibratedFigure(alone=spread(1e-10), together=spread(4e-10))}
    four = made.model_copy(
        update={
            "fingerprint": Fingerprint(cpu_model="x", cores=4, torch="2"),
            "ranks": 4,
            "figures": figures,
            "links": (
                MeasuredLink(**line, ranks=2, latency_seconds=1e-3, sum_seconds=4e-3, message_seconds=1e-4),
                MeasuredLink(**line, ranks=4, latency_seconds=2e-3, sum_seconds=18e-3, message_seconds=1e-4),
            ),
        }
    )
    rates = [four.to_machine(ranks).accelerator.bytes_per_second for ranks in (1, 2, 3, 4, 9)]
    assert rates == pytest.approx([1e10, 1 / 2e-10, 1 / 3e-10, 1 / 4e-10, 1 / 4e-10])
    assert four.to_machine(4).accelerator.memory_bytes == four.memory_bytes // 4
    links = [four.to_machine(ranks).neighbour for ranks in (2, 3, 4)]
    # Of a sum after work, a hop's part: two ranks have two hops, four have six.
    assert [link.latency_seconds for link in links if link] == pytest.approx([2e-3, 3e-3, 3e-3])
    one = four.to_machine(4, computing=1)  # stages that take turns
    assert one.accelerator.bytes_per_second == pytest.approx(1e10) and one.neighbour == links[2]


def test_a_file_of_another_version_or_a_torn_one_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    assert read_calibration(path) is None
    data = json.loads(made_up_calibration().model_dump_json())
    path.write_text(json.dumps(data))
    assert read_calibration(path) == made_up_calibration()
    path.write_text(json.dumps(data | {"calibration_version": 999}))
    assert read_calibration(path) is None
    path.write_text(json.dumps(data)[:100])
    assert read_calibration(path) is None
    path.write_text(json.dumps(data | {"figures": {"read": data["figures"]["read"]}}))
    assert read_calibration(path) is None


def test_a_busy_machine_is_told() -> None:
    busy = made_up_calibration().model_copy(update={"others_cpu_share": 0.4})
    assert busy.disturbed and "other processes used 40% of the CPU" in busy.to_machine(1).accelerator.source
    assert not made_up_calibration().disturbed


def test_a_rank_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import sys\nif '--rank' in sys.argv: raise SystemExit('no luck')\n")
    monkeypatch.setenv("RANKWISE_CALIBRATE", "1")
    with pytest.raises(CalibrationError, match="calibration failed"):
        calibrate_now(tmp_path / "cache", patience_seconds=60, quick=True)


def test_a_study_of_noops_or_a_known_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.support.run_folders.predicted_plans import plan_of

    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path))
    monkeypatch.setattr("flows.cli.doctor.calibrate.calibrate_now", lambda *_, **__: pytest.fail("it was measured"))
    said: list[str] = []
    monkeypatch.delenv("RANKWISE_CALIBRATE")
    ensure_calibration(plan_of("noop"), said.append)
    path = calibration_path(tmp_path, this_fingerprint())
    path.parent.mkdir()
    path.write_text(made_up_calibration().model_dump_json())
    ensure_calibration(plan_of("generate"), said.append)
    monkeypatch.setenv("RANKWISE_CALIBRATE", "0")
    path.unlink()
    ensure_calibration(plan_of("generate"), said.append)
    assert said == []


def test_a_machine_that_another_run_calibrates_meanwhile_is_not_measured_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second of two first runs at once measured all of it again, or said that a study held the machine."""
    from tests.support.run_folders.predicted_plans import plan_of

    monkeypatch.setenv("RANKWISE_LOCKS", str(tmp_path))
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RANKWISE_CALIBRATE")
    known = made_up_calibration().model_copy(update={"fingerprint": this_fingerprint()})
    measured, said = list[bool](), list[str]()

    def measure(target: Path, quick: bool) -> Calibration:
        measured.append(quick)
        time.sleep(0.5)
        return known

    monkeypatch.setattr("flows.cli.doctor.calibrate._measured", measure)
    runs = [threading.Thread(target=ensure_calibration, args=(plan_of("generate"), said.append)) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert measured == [False]
    assert [line for line in said if "warning" in line] == []
    calibrate_now(tmp_path / "cache", patience_seconds=60)
    assert len(measured) == 2  # as asked for


def test_measuring_that_fails_is_a_warning_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.support.run_folders.predicted_plans import plan_of

    def fail(*_: object, **__: object) -> Calibration:
        raise CalibrationError("no luck")

    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path))
    monkeypatch.delenv("RANKWISE_CALIBRATE")
    monkeypatch.setattr("flows.cli.doctor.calibrate.calibrate_now", fail)
    said: list[str] = []
    ensure_calibration(plan_of("generate"), said.append)
    assert "calibrating this machine" in said[0] and "warning" in said[1] and "no luck" in said[1]


def test_probes_are_told_apart_by_name_and_all_are_above_nothing() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank
    try:
        figures = measure_rank(replace(QUICK, rounds=2), lambda: None)
    finally:
        torch.set_num_threads(threads)
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in figures.values())
    wanted = {"read", "operator", "layer", "step", "recorded_layer", "recorded_step", "logit", "parameter"}
    for number in MEASURED_FORMATS:
        wanted |= {f"{name}/{number}" for name in ("square", "attention", "context", "element")}
        wanted |= {f"{name}/{number}" for name in ("training", "training_element")}
        wanted |= {f"linear/{number}/{place}/{rows}" for place in ("cold", "cached") for rows in QUICK.rows}
    assert set(figures) == wanted


def test_the_parts_of_a_trained_layer_add_up_to_the_measured_one() -> None:
    """Attention was in the time of elements and was added to it: a layer of the probes' shape was predicted slower."""
    sizes = Sizes()
    raw = {probe: [1e-6] for probe in ("operator", "read", "logit", "parameter")}
    raw |= {f"{probe}/{layers}": [layers * 1e-4] for probe in ("decode", "recorded") for layers in (2, 10)}
    for number in MEASURED_FORMATS:
        raw |= {f"linear/{number}/{place}/{rows}": [1e-5] for place in ("cold", "cached") for rows in sizes.rows}
        raw |= {f"{probe}/{number}": [1e-3] for probe in ("square", "context", "layer_linear")}
        raw |= {f"attention/{number}": [2e-3], f"layer/{number}": [1e-2]}
        raw |= {f"train_layer/{number}": [4e-2], f"train_linear/{number}": [2e-3]}
    figures = {name: seconds[0] for name, seconds in derived_figures(raw, sizes).items()}
    for number in MEASURED_FORMATS:
        products = 6 * sizes.prompt * layer_weights(sizes.hidden) * figures[f"training/{number}"]
        elements = sizes.prompt * sizes.hidden * figures[f"training_element/{number}"]
        attention = attention_flops(sizes.prompt, sizes.hidden) * figures[f"attention/{number}"]
        assert elements > 0.1 * products
        assert products + elements + 3.5 * attention == pytest.approx(4e-2), "as `measured_step_time` adds them"


def test_a_cache_of_which_only_the_level_is_told_is_of_a_typical_size(tmp_path: Path) -> None:
    """As on ARM machines whose firmware does not describe the caches."""
    for name, level in (("index0", "1"), ("index1", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "level").write_text(f"{level}\n")
    assert engine_calibrate.private_cache_bytes(tmp_path) == 1 << 20
    (tmp_path / "index1" / "size").write_text("512K\n")
    assert engine_calibrate.private_cache_bytes(tmp_path) == 512 << 10


def test_a_job_with_little_memory_is_calibrated_with_as_many_ranks_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def start(ranks: int, quick: bool, folder: Path) -> None:
        raise Started(ranks)

    monkeypatch.setattr(engine_calibrate, "_run_ranks", start)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    for free, ranks in ((100 << 20, 1), (3 << 30, 3), (64 << 30, 16)):
        monkeypatch.setattr(engine_calibrate, "host_memory_available", lambda free=free: free)
        with pytest.raises(Started, match=f"^{ranks}$"):
            engine_calibrate.measure_operators()


def test_a_calibration_that_takes_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calibrate, "LIMIT_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="did not end within 0 s"):
        engine_calibrate._run_ranks(1, True, tmp_path)
