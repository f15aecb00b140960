"""Constants of the time model: the share of a device's peak figures that real work reaches.

    constants_for(accelerator)      # used for planning: priors, corrected by published training runs (LEARNT)
    prior_for(accelerator)          # before anything is measured; what `timing.fitting` starts from

Each has a physical meaning and a prior with a source; a device with measured rates (`Accelerator.measured`) has shares
of 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from configs.hardware.hardware import Accelerator


@dataclass(frozen=True)
class DeviceConstants:
    """Shares of the device's peak figures, and overlap.

    matmul: of peak FLOP/s, by a large product. tiles: the same on a CPU in formats that it multiplies in tiles (AMX),
    whose peak memory and clock cannot feed. attention: of peak FLOP/s, by fused attention with heads of 128, of the
    FLOPs that a causal mask leaves. memory: of the memory's bandwidth. link: of the links' rates. passes: real memory
    traffic of elementwise kernels over the bytes that `timing.compute` counts (biases, casts and copies are not
    counted). overlap: share of compute behind which FSDP's or DDP's communication can hide. contention: cost of hidden
    communication, as a share of its time (its kernels hold multiprocessors and memory bandwidth, also while they wait).
    product_depth: inner length at which a product reaches half of its rate (filling and emptying the pipeline of a
    tile, writing its result). head_depth: head length at which attention reaches half of its rate (the exponentials are
    as many for short heads as for long ones). recomputed: share of a forward's time that checkpointing adds (under 1:
    torch stops early, for the last product of a block need not be computed again).
    """

    matmul: float = 0.65
    tiles: float = 1.0
    attention: float = 0.35
    memory: float = 0.8
    link: float = 0.8
    passes: float = 1.0
    overlap: float = 0.9
    contention: float = 0.3
    product_depth: float = 128.0
    head_depth: float = 64.0
    recomputed: float = 1.0
    host_bytes_per_second: float = 25e9  # a GPU's way to host memory: PCIe 4.0 x16, 32 GB/s less protocol
    storage_bytes_per_second: float = 3e9  # one NVMe drive, shared by nobody

    def replace(self, **changes: float) -> "DeviceConstants":
        """Return the constants with some changed."""
        return replace(self, **changes)


def product_flops(device: Accelerator, number: str, constants: DeviceConstants) -> float:
    """Return the FLOP/s of a large product. Raises ValueError for a format whose rate is not known."""
    return device.flops(number) * (constants.tiles if device.multiplies_in_tiles(number) else constants.matmul)


def attention_flops(device: Accelerator, number: str, constants: DeviceConstants) -> float:
    """Return the FLOP/s of fused attention with heads of 128. Raises ValueError as `product_flops` does."""
    share = constants.tiles if device.multiplies_in_tiles(number) else 1.0
    return device.flops(number) * share * constants.attention


LEARNT: Mapping[str, float] = {
    "matmul": 0.94, "passes": 1.37, "contention": 2.34, "product_depth": 1.63, "recomputed": 0.63,
}  # fmt: skip
"""Multiples of the priors that `timing.fitting` finds on docs/measurements/published/mpt_training_throughput.csv, 81
runs of llm-foundry on A100 and H100 in 2023. Attention is left out, because kernels have become faster. `python -m
benchmarks.planner.bench throughput` prints them; a test compares these with its output.
"""


def constants_for(accelerator: Accelerator) -> DeviceConstants:
    """Return the constants for planning: for a data-sheet device, priors times the factors from published runs."""
    prior = prior_for(accelerator)
    if accelerator.measured or accelerator.kind == "cpu":
        return prior
    return prior.replace(**{name: getattr(prior, name) * times for name, times in LEARNT.items()})


def prior_for(accelerator: Accelerator) -> DeviceConstants:
    """Return a device's priors, before any measurement."""
    if accelerator.measured:
        return _CPU
    if accelerator.kind == "cpu":
        return _CPU_BY_NAME
    for prefix, constants in _PRIORS.items():
        if accelerator.name.startswith(prefix):
            return constants
    return _ROCM if accelerator.kind == "rocm" else DeviceConstants()


_CPU = DeviceConstants(
    matmul=1.0, attention=0.7, memory=1.0, link=1.0, overlap=0.0, contention=0.0, product_depth=16.0, head_depth=16.0
)
"""Measured rates; the communicating core also computes, so nothing is hidden (overlap 0)."""
_CPU_BY_NAME = _CPU.replace(matmul=DeviceConstants.matmul, memory=DeviceConstants.memory, tiles=0.15)
"""Peaks of cores, clock and width, and the socket's memory: real work reaches as little of them as of a GPU's.

tiles: 20 TFLOP/s were measured of a Sapphire Rapids and 40 of a Granite Rapids (LIA, ISCA 2025, abstract), of 135 to
157 by cores and clock of those in the catalog.
"""
_PRIORS = {
    # Large cuBLAS products reach about 250 of 312 TFLOP/s on A100, and about 650 of 989 on H100, which its power limits
    # (common microbenchmarks, from memory).
    # FlashAttention-2: 50 to 73 % of peak on A100 (arXiv 2307.08691), 35 % on H100 (arXiv 2407.08608), abstracts.
    "a100": DeviceConstants(matmul=0.80, attention=0.50),
    "h100": DeviceConstants(matmul=0.66, attention=0.35),
    "h200": DeviceConstants(matmul=0.66, attention=0.35),
}
_PRIORS |= {"a800": _PRIORS["a100"], "h800": _PRIORS["h100"]}  # the same but for their links
_ROCM = DeviceConstants(matmul=0.55, attention=0.3)
