"""Predict large-scale training: dense models and experts over tp, pp with interleaving, cp, ep and data parallelism.

    rate = tokens_per_second_per_device(run, constants)

Device seconds of a token, all layers: products of dense weights and of experts, attention, elementwise kernels by their
bytes, routing of tokens (permutation in memory, all-to-all over the domain of NVLink or between domains), launches of
kernels a layer and micro-batch, all-reduces of tensor parallelism; times the bubble of an interleaved pipeline, 1 +
(p - 1) / (v m) (Narayanan et al., arXiv 2104.04473).

Five constants are fitted (`PRETRAINING`). Fixed, chosen with the 13 published rows in view: attention at 0.45 of the
16-bit peak, less for heads narrower than 128; experts at half depth 1,024 of their inner width; 60 accesses of the
hidden state a layer; 30 (60 with current scaling, which reads a tensor for its maximum first) of routed tokens;
launches of a layer with experts cost eight times a dense one's, and 0.3 of it on GB devices, whose published recipes
replay graphs.
"""

from dataclasses import dataclass

from configs.hardware.hardware import Accelerator
from engine.planner.architecture import Architecture
from engine.planner.fitting.few import Constants, FewConstants

_ATTENTION, _WIDE_HEAD = 0.45, 128
_HALF_DEPTH, _REFERENCE_WIDTH = 1024.0, 2048.0
_ELEMENTWISE_BYTES = 2 * 60
_ROUTED_ACCESSES, _CURRENT_SCALING_ACCESSES = 30, 60
_EXPERT_LAUNCHES, _GRAPH_LAUNCHES = 8.0, 0.3
_INSIDE, _TP_LINK, _TP_EXPOSED = 0.5, 0.6, 0.5
_MESSAGES = 8  # tensor parallel: 4 a layer forward and backward, each with a gather and a scatter of half the bytes
_ALL_TO_ALLS = 4  # dispatch and combine, forward and backward
_DENSE_SCATTER, _EXPERT_SCATTER = 0.07, 0.2
DEFAULT_PORT_BYTES_PER_SECOND = 50e9  # 400 Gbit/s a device (NVIDIA DGX H100 and GB200 NVL72)


@dataclass(frozen=True)
class Run:
    """One step of training. micro_batches: of a pipeline in a step. domain: devices joined by NVLink."""

    architecture: Architecture
    device: Accelerator
    domain: int
    precision: str  # bf16, fp8_cs, fp8_mx, fp8, fp4
    sequence_length: int
    micro_batch: int
    micro_batches: float
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vp: int = 1
    ep: int = 1
    port_bytes_per_second: float = DEFAULT_PORT_BYTES_PER_SECOND

    @property
    def has_experts(self) -> bool:
        """Whether tokens are routed."""
        return self.architecture.experts > 1


def tokens_per_second_per_device(run: Run, constants: Constants) -> float:
    """Return tokens a second of each device."""
    bubble = 1 + (run.pp - 1) / (run.vp * max(1.0, run.micro_batches))
    return 1 / (token_seconds(run, constants) * bubble)


def token_seconds(run: Run, constants: Constants) -> float:
    """Return device seconds of one token, forward and backward, all layers; without the pipeline's bubble."""
    architecture, device = run.architecture, run.device
    wide, peak = device.flops("bfloat16"), _peak(run)
    matrices = [weight for weight in architecture.weights if weight.products]
    head = sum(weight.size * weight.products for weight in matrices if weight.role == "head")
    dense = sum(w.size * w.products for w in matrices if w.share >= 1 and w.role != "head")
    layers, hidden = architecture.layers, architecture.hidden
    seconds = 6 * (dense / peak + head / wide) / constants["matmul"]
    seconds += _attention(run) / wide
    seconds += layers * hidden * constants["passes"] * _ELEMENTWISE_BYTES / device.bytes_per_second
    if run.has_experts:
        seconds += _experts(run, constants)
    launches = (_EXPERT_LAUNCHES if run.has_experts else 1.0) * constants["launch_seconds"]
    if run.has_experts and device.name.startswith("gb"):
        launches *= _GRAPH_LAUNCHES
    seconds += layers * launches * run.tp * run.cp / (run.micro_batch * run.sequence_length)
    if run.tp > 1:
        moved = _MESSAGES * (run.tp - 1) / run.tp * hidden * 2
        seconds += layers * moved * _TP_EXPOSED / (_link(run) * _TP_LINK)
    return seconds


def _peak(run: Run) -> float:
    if run.precision.startswith("fp4"):
        return run.device.peak_flops.get("float4", run.device.flops("float8"))
    return run.device.flops("float8" if run.precision.startswith("fp8") else "bfloat16")


def _attention(run: Run) -> float:
    """Return FLOPs of a token over the share of the peak that attention reaches."""
    architecture = run.architecture
    dim = (architecture.head_dim + (architecture.value_dim or architecture.head_dim)) / 2
    attended = sum(architecture.attended(layer, run.sequence_length) for layer in range(architecture.layers))
    share = _ATTENTION * min(1.0, dim / _WIDE_HEAD)
    return 6 * attended * architecture.heads * dim / share


def _experts(run: Run, constants: Constants) -> float:
    architecture, device = run.architecture, run.device
    routed = [weight for weight in architecture.weights if weight.products and weight.share < 1]
    elements = sum(weight.size * weight.products * weight.share for weight in routed)
    width = min(min(weight.shape) for weight in routed)
    depth = width / (width + _HALF_DEPTH) * (1 + _HALF_DEPTH / _REFERENCE_WIDTH)
    # Grouped products of narrow formats gain nothing over 16 bits in the published rows: their casts take it back.
    seconds = 6 * elements / (device.flops("bfloat16") * constants["expert_matmul"] * depth)
    accesses = _CURRENT_SCALING_ACCESSES if run.precision == "fp8_cs" else _ROUTED_ACCESSES
    link = _link(run) * _INSIDE if run.ep <= run.domain else run.port_bytes_per_second
    each = accesses / device.bytes_per_second + _ALL_TO_ALLS * (run.ep - 1) / run.ep / link
    routed_bytes = architecture.experts_per_token * architecture.hidden * 2
    return seconds + architecture.layers * constants["routing"] * routed_bytes * each


def _link(run: Run) -> float:
    if run.device.link is None:
        raise ValueError(f"gpu: no link between devices of {run.device.name} is known")
    return run.device.link.bytes_per_second


PRETRAINING: FewConstants[Run] = FewConstants(
    priors={
        "matmul": (0.65, 0.2),
        "passes": (1.0, 0.5),
        "expert_matmul": (0.5, 0.5),
        "routing": (1.0, 0.7),
        "launch_seconds": (1e-3, 0.7),
    },
    formula=tokens_per_second_per_device,
    scatter=lambda run: _EXPERT_SCATTER if run.has_experts else _DENSE_SCATTER,
)
