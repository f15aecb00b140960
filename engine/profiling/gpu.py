"""Sample clocks, power, temperature and throttle reasons of a GPU during work.

    with GpuSampler(index) as sampler:
        work()
    figures = sampler.figures()         # {"gpu_power_watts": 412.0, "throttled": False, ...}

A thread queries NVML (nvidia-ml-py) every 50 ms, at no cost to the GPU. Clocks and power count only samples with a
running kernel, if NVML reports it, because waiting and loading are not work. Unavailable values are None, all of them
without NVML. Meanings and units: https://docs.nvidia.com/deploy/nvml-api (nvmlDeviceQueries).
"""

import importlib
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from configs.records.record import Figure

SAMPLE_SECONDS = 0.05

REASONS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clocks",
}
"""Bits of nvmlClocksEventReasons (nvml.h) -> their names here."""

THROTTLING = 0x004 | 0x008 | 0x020 | 0x040 | 0x080
"""Reasons that reduce a GPU's clocks: heat, the power cap, a slowdown by the hardware."""


@dataclass(frozen=True, slots=True)
class _Sample:
    sm_mhz: int | None
    memory_mhz: int | None
    watts: float | None
    celsius: int | None
    reasons: int | None
    busy_share: float | None


class GpuSampler:
    """Sample one GPU within the context. `index` is CUDA's; the device is found in NVML by its UUID."""

    def __init__(self, index: int, uuid: str | None = None) -> None:
        self._device = _Device.open(index, uuid or _cuda_uuid(index))
        self._samples: list[_Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
        self._joules: float | None = None

    def __enter__(self) -> "GpuSampler":
        if self._device is not None:
            self._joules = self._device.joules()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._device is not None:
            self._thread.join()
            end = self._device.joules()
            self._joules = None if self._joules is None or end is None else end - self._joules
            self._device.close()

    def _run(self) -> None:
        assert self._device is not None
        while True:  # the first sample at once, so that short work has one
            self._samples.append(self._device.sample())
            if self._stop.wait(SAMPLE_SECONDS):
                return

    def figures(self) -> dict[str, Figure]:
        """Return, after the end, median clocks (MHz), mean power (W), largest temperature (°C), energy (J), throttling.

        gpu_busy_share: share of time, 0 to 1, with a running kernel, as sampled by the driver.
        """
        at_work = [sample for sample in self._samples if sample.busy_share] or self._samples
        reasons = [sample.reasons for sample in at_work if sample.reasons is not None]
        seen = 0
        for reason in reasons:
            seen |= reason
        return {
            "gpu_samples": len(self._samples),
            "gpu_busy_share": _of(statistics.fmean, [sample.busy_share for sample in self._samples]),
            "gpu_sm_clock_mhz": _of(statistics.median, [sample.sm_mhz for sample in at_work]),
            "gpu_memory_clock_mhz": _of(statistics.median, [sample.memory_mhz for sample in at_work]),
            "gpu_power_watts": _of(statistics.fmean, [sample.watts for sample in at_work]),
            "gpu_temperature_celsius": _of(max, [sample.celsius for sample in self._samples]),
            "gpu_energy_joules": self._joules,
            "gpu_throttle_reasons": ", ".join(reason_names(seen)) if reasons else None,
            "throttled": bool(seen & THROTTLING) if reasons else None,
        }


def reason_names(reasons: int) -> list[str]:
    """Return the names of the set bits; unknown bits are given as numbers."""
    known = [name for bit, name in REASONS.items() if reasons & bit]
    unknown = reasons & ~sum(REASONS)
    return [*known, hex(unknown)] if unknown else known


def _of(statistic: Callable[[list[Any]], float], values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistic(known)) if known else None


def _cuda_uuid(index: int) -> str | None:
    """Return the UUID: NVML numbers all GPUs, CUDA the visible ones; only the UUID is the same in both."""
    import torch

    if not torch.cuda.is_available():
        return None
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class PowerMeter:
    """Power of several GPUs together, at the time of the call: watts; None unless every one of them says."""

    def __init__(self, uuids: Sequence[str | None]) -> None:
        self._devices = [None if uuid is None else _Device.open(0, uuid) for uuid in dict.fromkeys(uuids)]

    def watts(self) -> float | None:
        """Return the sum."""
        values = [None if device is None else device.watts() for device in self._devices]
        known = [value for value in values if value is not None]
        return sum(known) if known and len(known) == len(values) else None

    def close(self) -> None:
        """Release the GPUs."""
        for device in self._devices:
            if device is not None:
                device.close()
        self._devices = []


class _Device:
    """NVML's handle of one GPU. Unsupported values are None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    @classmethod
    def open(cls, index: int, uuid: str | None) -> "_Device | None":
        """Open the GPU; None if pynvml, the driver or the device is missing."""
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return None
        try:
            find = (nvml.nvmlDeviceGetHandleByIndex, index) if uuid is None else (nvml.nvmlDeviceGetHandleByUUID, uuid)
            return cls(nvml, find[0](find[1]))
        except nvml.NVMLError:
            nvml.nvmlShutdown()
            return None

    def close(self) -> None:
        """Release the handle (NVML counts its users)."""
        self._nvml.nvmlShutdown()

    def sample(self) -> _Sample:
        """Sample all values."""
        utilization = self._ask("nvmlDeviceGetUtilizationRates")
        return _Sample(
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM),
            memory_mhz=self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM),
            watts=self.watts(),
            celsius=self._ask("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU),
            reasons=self._reasons(),
            busy_share=None if utilization is None else utilization.gpu / 100,
        )

    def watts(self) -> float | None:
        """Return the power now; NVML counts in milliwatts."""
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    def _reasons(self) -> int | None:
        reasons: int | None = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        # Drivers before 535 have only this name.
        return self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") if reasons is None else reasons

    def joules(self) -> float | None:
        """Return the energy since the driver was loaded; NVML counts in millijoules, on Volta and later."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None
