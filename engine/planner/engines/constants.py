"""Constants of an inference engine on a device, their priors, and how far each may move.

    log_prior("memory", "vllm", "l40s", "cuda")     # what a GPU without measured rows is predicted with, its logarithm

A constant's logarithm is the sum of its prior and four deviations: shared by all engines, of an engine, of an engine on
a platform (ROCm), and of an engine on a device. Each deviation has a standard deviation; an unmeasured one stays at 0
and widens the interval by it. Rows of one device therefore teach what they share with others, and no more.

Sources of the priors. memory: STREAM-like copies reach 0.8 to 0.92 of a data sheet's bandwidth on GPUs. matmul: as
`timing.constants`. layer_seconds: nine kernels of about 4.5 microseconds in a captured graph (start, fill and drain).
all_reduce_seconds: one-shot all-reduce, two kernels and two exchanges of flags. The rest are assumptions with a
standard deviation of a factor of 1.5 to 2. The set of constants was chosen with all published rows in view; their
values are fitted.
"""

from dataclasses import dataclass
from math import log

from configs.hardware.hardware import AcceleratorKind


@dataclass(frozen=True)
class Prior:
    """A constant's prior, and standard deviations of its logarithm by level; `rocm`: logarithm added on that platform.

    clocked: a time of kernels or of their launch, shorter on a device with a faster clock.
    """

    value: float
    shared: float
    engine: float
    platform: float
    device: float
    rocm: float = 0.0
    clocked: bool = False


PRIORS: dict[str, Prior] = {
    # Scheduling, sampling and detokenisation: of a step, of each doubling of ranks, and of each sequence in it.
    "step_seconds": Prior(1e-3, 0.5, 0.7, 0.7, 0.4, log(2.0), clocked=True),
    "rank_seconds": Prior(4e-4, 0.5, 0.5, 0.5, 0.4, clocked=True),
    "sequence_seconds": Prior(3e-5, 0.5, 0.7, 0.5, 0.4, log(1.5), clocked=True),
    "layer_seconds": Prior(4e-5, 0.3, 0.3, 0.4, 0.15, clocked=True),
    "memory": Prior(0.85, 0.1, 0.1, 0.2, 0.07),
    "matmul": Prior(0.65, 0.2, 0.2, 0.8, 0.2, log(0.4)),
    # Attention over the cache, as multiples of the time to read it once: by keys and values, and by query heads.
    "cache_reads": Prior(0.9, 0.2, 0.2, 0.5, 0.15, log(1.3)),
    "query_reads": Prior(0.3, 0.4, 0.4, 0.8, 0.3, log(2.0)),
    "paged_times": Prior(1.0, 0.3, 0.0, 0.3, 0.2),
    "undivided_times": Prior(2.0, 0.4, 0.0, 0.3, 0.2),
    "expert_times": Prior(1.4, 0.4, 0.2, 0.2, 0.0),
    "all_reduce_seconds": Prior(1.5e-5, 0.3, 0.3, 0.5, 0.3, clocked=True),
    "link": Prior(0.35, 0.4, 0.4, 0.5, 0.2),
}
_CLOCK_HERTZ = {
    "a100": 1.41e9, "a800": 1.41e9, "h100": 1.98e9, "h800": 1.98e9, "h200": 1.98e9, "gh200": 1.98e9, "h20": 1.98e9,
    "b200": 1.965e9, "gb200": 1.965e9, "b300": 1.965e9, "gb300": 1.965e9, "mi300x": 2.1e9, "mi300a": 2.1e9,
    "mi325x": 2.1e9, "mi350x": 2.2e9, "mi355x": 2.4e9, "mi210": 1.7e9, "mi250": 1.7e9, "mi250x": 1.7e9, "l40s": 2.52e9,
    "l40": 2.49e9, "l4": 2.04e9, "a10": 1.695e9, "a10g": 1.71e9, "a30": 1.44e9, "a40": 1.74e9, "a5000": 1.695e9,
    "a6000": 1.8e9, "v100": 1.53e9, "v100s": 1.597e9, "t4": 1.59e9, "rtx2080ti": 1.545e9, "quadrortx6000": 1.77e9,
    "quadrortx8000": 1.77e9, "rtx3090": 1.695e9, "rtx4090": 2.52e9, "rtx5090": 2.407e9, "rtx6000ada": 2.505e9,
    "rtxpro6000": 2.49e9, "gb10": 2.52e9, "max1550": 1.6e9, "max1100": 1.55e9,
}  # fmt: skip
"""Boost clocks of the makers' data sheets, or what the catalog's peaks follow from (`accelerators.csv`); a device that
is not listed counts as an A100.
"""
ENGINES: dict[str, dict[str, float]] = {
    "vllm": {},
    "tensorrt-llm": {},
    "sglang": {},
    "llama.cpp": {"sequence_seconds": 3.0, "matmul": 0.6},
    "rankwise": {"step_seconds": 0.5},
    "transformers": {"layer_seconds": 12.0, "step_seconds": 2.0},
}
"""Engines by name; factors on the priors of those without published rows: assumptions. transformers launches about 40
operators a layer from Python, at 12 microseconds each (docs/measurements/engines.md has this project's own figures)."""
_ALIASES = {
    "trt-llm": "tensorrt-llm", "tensorrtllm": "tensorrt-llm", "tensorrt_llm": "tensorrt-llm", "trtllm": "tensorrt-llm",
    "hf": "transformers", "llama-cpp": "llama.cpp", "llamacpp": "llama.cpp", "llama_cpp": "llama.cpp",
    "trt": "tensorrt-llm", "ours": "rankwise",
}  # fmt: skip


def engine_name(text: str) -> str:
    """Return an engine's usual name. Raises ValueError listing the known ones."""
    plain = text.strip().lower()
    name = _ALIASES.get(plain, plain)
    if name not in ENGINES:
        raise ValueError(f"framework: {text!r} is not known; use one of: {', '.join(ENGINES)}")
    return name


def log_prior(name: str, engine: str, device: str, platform: AcceleratorKind) -> float:
    """Return the logarithm of a constant's prior for an engine on a device."""
    prior = PRIORS[name]
    found = log(prior.value * ENGINES[engine].get(name, 1.0))
    if platform == "rocm":
        found += prior.rocm
    if prior.clocked:
        found += log(_CLOCK_HERTZ["a100"] / _CLOCK_HERTZ.get(device.split("-")[0], _CLOCK_HERTZ["a100"]))
    return found
