"""Predict saturated serving: the most output tokens a second of each device, with as many sequences as memory allows.

    rate = output_tokens_per_second(service, constants)     # of each device
    sequences(service)                                      # at once, on a replica

In the steady state every sequence's prompt is computed once, and decode steps run with the batch that the cache holds:
a device computes prompts and steps in turn, so the time of N new tokens of n sequences is N steps and n prompts.
`tp` ranks share all weights; with data-parallel attention and expert parallelism (`dep`) each rank holds attention for
its own sequences and a share of the experts, which see the tokens of all ranks.

Six constants are fitted (`SATURATED`); fixed: 0.8 of the memory's bandwidth, attention of a prompt at half the 16-bit
peak, 0.3 of a link and 12 microseconds an all-reduce (TensorRT-LLM's rows of `inference_throughput.csv`). gpt-oss
stores its experts in MXFP4 whatever the products' format (model card, arXiv 2508.10925); the cache is in 8 bits
(TensorRT-LLM's performance overview).
"""

from dataclasses import dataclass
from math import inf

from configs.hardware.hardware import Accelerator
from engine.planner.architecture import Architecture
from engine.planner.fitting.few import Constants, FewConstants
from engine.planner.flops import prompt_attention_flops

_MEMORY, _ATTENTION, _LINK, _MESSAGE_SECONDS = 0.8, 0.5, 0.3, 1.2e-5
_WORKSPACE_BYTES, _CACHE_SHARE = 3.5e9, 0.9
_CACHE_BYTES, _WIDE_BYTES = 1.0, 2.0
_WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}  # fp4: a scale of 8 bits for 16 numbers (NVFP4)
_MXFP4_BYTES = 0.53  # 4.25 bits: a scale for 32 numbers
_MOST_SEQUENCES = 2048  # TensorRT-LLM's default max_batch_size
_CACHE_READS = 0.8
_LATENT_RATIO = 16.0  # multi-head latent attention multiplies each cached vector with all heads: assumption
SCATTER = 0.25


@dataclass(frozen=True)
class SaturatedServer:
    """A model served by replicas of `ranks` devices. expert_parallel: attention is data-parallel, experts are split."""

    architecture: Architecture
    device: Accelerator
    ranks: int
    expert_parallel: bool
    precision: str  # bf16, fp8, fp4
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class _Sizes:
    """Of one rank: elements of weights multiplied with each token, of the head, and of experts held and used."""

    dense: float
    head: float
    experts: float
    routed: float
    share: float


def _sizes(service: SaturatedServer) -> _Sizes:
    architecture = service.architecture
    tp = 1 if service.expert_parallel else service.ranks
    matrices = [weight for weight in architecture.weights if weight.products]
    heads = sum(weight.shard(tp) * weight.products for weight in matrices if weight.role == "head")
    dense = sum(w.shard(tp) * w.products for w in matrices if w.share >= 1 and w.role != "head")
    routed = [weight for weight in matrices if weight.share < 1]
    experts = sum(weight.size * weight.products for weight in routed)
    share = routed[0].share if routed else 1.0
    return _Sizes(dense, heads, experts / service.ranks, experts * share / tp, share)


def _bytes(service: SaturatedServer) -> tuple[float, float]:
    """Return bytes of a rank's weights: all but experts, and experts. Tables and heads are in 16 bits."""
    sizes, mixed = _sizes(service), service.architecture.model_type == "gpt_oss"
    element = _WEIGHT_BYTES[service.precision]
    dense = sizes.dense * (_WIDE_BYTES if mixed else element) + sizes.head * _WIDE_BYTES
    return dense, sizes.experts * (min(_MXFP4_BYTES, element) if mixed else element)


def sequences(service: SaturatedServer) -> float:
    """Return how many sequences a rank of data-parallel attention, or a replica, decodes at once.

    Raises ValueError if the weights and one sequence do not fit.
    """
    dense, experts = _bytes(service)
    tp = 1 if service.expert_parallel else service.ranks
    table = service.architecture.vocabulary * service.architecture.hidden * _WIDE_BYTES / tp
    left = service.device.memory_bytes - dense - experts - table - _WORKSPACE_BYTES
    context = service.prompt_tokens + service.new_tokens
    each = service.architecture.cache_elements(context, tp) * _CACHE_BYTES
    if left * _CACHE_SHARE < each:
        raise ValueError(
            f"layout: {(dense + experts + table) / 1e9:.0f} GB of weights a device and a sequence of {context} tokens "
            f"do not fit in the {service.device.memory_bytes / 1e9:.0f} GB of {service.device.name}"
        )
    return min(float(_MOST_SEQUENCES), left * _CACHE_SHARE / each if each else inf)


def output_tokens_per_second(service: SaturatedServer, constants: Constants) -> float:
    """Return new tokens a second of each device at the largest batch."""
    return saturated(service, constants, sequences(service))[0]


def saturated(service: SaturatedServer, constants: Constants, batch: float) -> tuple[float, float]:
    """Return new tokens a second of each device, and seconds of a decode step, with `batch` sequences at once."""
    step = step_seconds(service, constants, batch)
    seconds = service.new_tokens * step + batch * service.prompt_tokens * prompt_token_seconds(service, constants)
    groups = 1 if service.expert_parallel else service.ranks
    return batch * service.new_tokens / seconds / groups, step


def _peaks(service: SaturatedServer, constants: Constants) -> tuple[float, float]:
    """Return FLOP/s that products of dense weights and of experts reach."""
    peak = service.device.flops({"bf16": "bfloat16"}.get(service.precision, "float8"))
    wide = service.device.flops("bfloat16")
    if service.precision == "fp4":
        narrow = service.device.peak_flops.get("float4", 0.0)
        peak *= 1 + constants["float4_gain"] * max(0.0, narrow / peak - 1)
    dense = wide if service.architecture.model_type == "gpt_oss" and service.precision != "fp4" else peak
    return dense * constants["matmul"], peak * constants["expert_matmul"]


def step_seconds(service: SaturatedServer, constants: Constants, batch: float) -> float:
    """Return the seconds of a decode step at the mean context."""
    architecture, device, sizes = service.architecture, service.device, _sizes(service)
    dense, experts = _bytes(service)
    dense_rate, expert_rate = _peaks(service, constants)
    bandwidth = device.bytes_per_second
    step = _blend(dense / (bandwidth * _MEMORY), 2 * batch * (sizes.dense + sizes.head) / dense_rate)
    if experts:
        tokens = batch * (service.ranks if service.expert_parallel else 1)
        touched = 1 - (1 - sizes.share) ** max(1.0, tokens)
        step += _blend(experts * touched / (bandwidth * _MEMORY), 2 * batch * sizes.routed / expert_rate)
    tp = 1 if service.expert_parallel else service.ranks
    cached = architecture.cache_elements(service.prompt_tokens + service.new_tokens // 2, tp) * _CACHE_BYTES
    latent = architecture.kv_elements_per_token is not None
    ratio = _LATENT_RATIO if latent else architecture.heads / architecture.kv_heads
    step += batch * cached * (_CACHE_READS + constants["query_reads"] * ratio) / bandwidth
    step += constants["sequence_seconds"] * batch + architecture.layers * constants["layer_seconds"]
    if service.ranks > 1:
        message = batch * architecture.hidden * 2 * _WIDE_BYTES / (_link(device) * _LINK)
        step += 2 * architecture.layers * (_MESSAGE_SECONDS + message)
    return step


def prompt_token_seconds(service: SaturatedServer, constants: Constants) -> float:
    """Return the seconds that one token of a prompt takes a rank (of its replica)."""
    architecture, sizes = service.architecture, _sizes(service)
    dense_rate, expert_rate = _peaks(service, constants)
    tp = 1 if service.expert_parallel else service.ranks
    attention = -(-architecture.heads // tp) * prompt_attention_flops(architecture, service.prompt_tokens)
    seconds = 2 * sizes.dense / dense_rate + 2 * sizes.routed / expert_rate
    seconds += attention / (service.device.flops("bfloat16") * _ATTENTION)
    if tp > 1:
        message = architecture.hidden * _WIDE_BYTES * 2 * (tp - 1) / tp / (_link(service.device) * _LINK)
        seconds += 2 * architecture.layers * message
    return seconds


def _link(device: Accelerator) -> float:
    if device.link is None:
        raise ValueError(f"layout: no link between devices of {device.name} is known; use one device")
    return device.link.bytes_per_second


def _blend(reading: float, multiplying: float) -> float:
    return float((reading**3 + multiplying**3) ** (1 / 3))


SATURATED: FewConstants[SaturatedServer] = FewConstants(
    priors={
        "matmul": (0.65, 0.2),
        "expert_matmul": (0.15, 0.5),  # many small products
        "query_reads": (0.2, 0.5),  # attention kernels that share keys among query heads (XQA)
        "sequence_seconds": (1.5e-5, 0.7),
        "float4_gain": (0.5, 0.4),  # of the doubling of the peak
        "layer_seconds": (3e-5, 0.5),
    },
    formula=output_tokens_per_second,
    scatter=lambda _: SCATTER,
)
