"""A GPU's state while a cell is measured, by NVML of a stand-in driver."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.profiling.gpu import GpuSampler
from tests.support.nvml import build_driver

SAMPLE_PROGRAM = """
import json, sys, time
from engine.profiling import gpu

gpu.SAMPLE_SECONDS = 0.005
with gpu.GpuSampler(int(sys.argv[1]), sys.argv[2] or None) as sampler:
    time.sleep(float(sys.argv[3]))
print(json.dumps(sampler.figures()))
"""
SLOWED = {
    "STUB_SM_MHZ": "210,1980,1980,1200", "STUB_MEMORY_MHZ": "2619", "STUB_WATTS": "100,700,700,400",
    "STUB_CELSIUS": "40,88,71", "STUB_REASONS": "0x1,0x4,0x24,0x0", "STUB_BUSY": "0,100,100,100,0",
    "STUB_ENERGY_MJ": "2500",
}  # fmt: skip
needs_pynvml = pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver's library that has one GPU, of which the environment says how it is."""
    return build_driver(tmp_path_factory.mktemp("driver"))


def sampled(folder: Path, stub: dict[str, str], index: int = 0, uuid: str = "", seconds: float = 0.3) -> dict[str, Any]:
    """Figures of a fresh process, in which pynvml finds the stub as the system's driver."""
    command = [sys.executable, "-c", SAMPLE_PROGRAM, str(index), uuid, str(seconds)]
    environment = os.environ | stub | {"LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@needs_pynvml
def test_a_gpu_is_sampled_while_it_works(driver: Path) -> None:
    figures = sampled(driver, SLOWED, uuid="GPU-stub")
    samples = figures.pop("gpu_samples")
    assert samples >= 5
    assert figures.pop("gpu_busy_share") == pytest.approx(3 / samples)
    # Of the three samples that are at work; the temperature of all.
    assert figures == {
        "gpu_sm_clock_mhz": 1980, "gpu_memory_clock_mhz": 2619, "gpu_power_watts": 600,
        "gpu_temperature_celsius": 88, "gpu_energy_joules": 2.5, "throttled": True,
        "gpu_throttle_reasons": "software power cap, software thermal slowdown",
    }  # fmt: skip


@needs_pynvml
@pytest.mark.parametrize(
    ("reasons", "throttled", "names"),
    [
        ("0x0", False, ""),
        ("0x2", False, "application clocks"),
        ("0x8", True, "hardware slowdown"),
        ("0x40", True, "hardware thermal slowdown"),
        ("0x80", True, "hardware power brake"),
        ("0x1000", False, "0x1000"),
    ],
)
def test_throttling_has_its_reasons(driver: Path, reasons: str, throttled: bool, names: str) -> None:
    figures = sampled(driver, {"STUB_REASONS": reasons, "STUB_OLD": "1"}, uuid="GPU-stub", seconds=0)
    assert (figures["throttled"], figures["gpu_throttle_reasons"]) == (throttled, names)


@pytest.mark.slow
@needs_pynvml
def test_what_a_gpu_does_not_say_is_unknown(driver: Path) -> None:
    figures = sampled(driver, {}, uuid="GPU-stub", seconds=0)
    assert figures.pop("gpu_samples") >= 1
    assert figures and set(figures.values()) == {None}
    for stub, index, uuid in (({"STUB_INIT": "9"}, 0, ""), ({}, 1, ""), ({}, 0, "GPU-other")):
        figures = sampled(driver, SLOWED | stub, index, uuid, seconds=0)
        assert figures.pop("gpu_samples") == 0 and set(figures.values()) == {None}


POWER_PROGRAM = """
import sys
from engine.profiling.gpu import PowerMeter
meter = PowerMeter([None if uuid == "-" else uuid for uuid in sys.argv[1:]])
print(meter.watts())
"""


@needs_pynvml
@pytest.mark.parametrize(
    ("uuids", "watts"),
    [
        (("GPU-stub", "GPU-stub1"), "750.0"),
        (("GPU-stub", "GPU-stub"), "300.0"),
        (("GPU-stub", "GPU-other"), "None"),
        (("GPU-stub", "-"), "None"),
        ((), "None"),
    ],
)
def test_the_power_of_a_node_is_that_of_all_its_gpus(driver: Path, uuids: tuple[str, ...], watts: str) -> None:
    """The second one draws 450 W; a GPU is counted once, and one that says nothing leaves the sum unknown."""
    command = [sys.executable, "-c", POWER_PROGRAM, *uuids]
    stub = {"LD_LIBRARY_PATH": str(driver), "STUB_GPUS": "2", "STUB_WATTS": "300,450"}
    done = subprocess.run(command, env=os.environ | stub, capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == watts


def test_without_a_driver_there_are_no_figures() -> None:
    with GpuSampler(0) as sampler:
        pass
    figures = sampler.figures()
    assert figures.pop("gpu_samples") == 0 and set(figures.values()) == {None}
