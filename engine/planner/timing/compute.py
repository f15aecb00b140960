"""Compute time of one micro-batch on one rank: products, attention, elementwise kernels, logits, optimizer.

    blocks = block_seconds(setup, constants)        # a stage's blocks
    blocks.forward, blocks.backward, blocks.again   # `again`: recomputation by checkpointing

A roofline per kind of kernel: max(FLOPs over the rate for its shape, bytes over the memory bandwidth), and at least the
device's minimum kernel time.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.planner.architecture import Architecture, Weight
from engine.planner.flops import FUSED_BACKWARD, attention_pairs, recomputed_share
from engine.planner.memory.stored import activated_width
from engine.planner.setup import TrainingSetup
from engine.planner.timing.constants import DeviceConstants, attention_flops, product_flops

_TILE = 128  # rows and columns of scores that fused attention computes at once; tiles on the diagonal are whole
_EAGER_SCORE_BYTES = 20  # scores written, scaled and masked, normalised in float32, read for the second product
# Of a float32 parameter: 7 accesses of an AdamW in one kernel or 20 of torch's foreach AdamW, and 3 of clipping.
_ADAMW_BYTES, _FOREACH_ADAMW_BYTES = 40, 92
_OFFLOADS_WEIGHTS = ("fsdp", "zero3")
_SGD_BYTES = 24  # the same of plain SGD: 3 accesses, 3 of clipping
_FLOAT8_CAST_BYTES = 4  # of an operand: read in 16 bits, written in 8 as is and transposed for the backward
# Of a logit, both ways: written, then read and written in float32 by cast, log-softmax, its gradient and cast back.
_LOGIT_BYTES, _COMPILED_LOGIT_BYTES = 30, 14
PRODUCT_FORMAT = {
    "float32": "float32",
    "bfloat16_autocast": "bfloat16",
    "bfloat16_mixed": "bfloat16",
    "float16_mixed": "float16",
    "float8_mixed": "float8",
}


@dataclass(frozen=True)
class Seconds:
    """Seconds of one micro-batch: forward, backward, and recomputation."""

    forward: float
    backward: float
    again: float = 0.0


def block_seconds(setup: TrainingSetup, constants: DeviceConstants) -> Seconds:
    """Predict the blocks of the fullest pipeline stage."""
    architecture = setup.architecture
    products = _products(setup, constants, (weight for weight in architecture.weights if weight.block))
    attention = _attention(setup, constants)
    elementwise = _elementwise(setup, constants)
    forward = products.forward + attention.forward + elementwise.forward
    backward = products.backward + attention.backward + elementwise.backward
    again = 0.0
    if setup.checkpointing == "full":
        again = forward * constants.recomputed
    elif setup.checkpointing == "selective":  # attention's output is kept, unless it is several operators
        scores = attention.forward if setup.attention == "eager" else 0.0
        again = products.forward * recomputed_share(architecture, selective=True)
        again += (elementwise.forward + scores) * constants.recomputed
    layers = max(1, architecture.layers)
    stage = -(-layers // setup.layout.pp) / layers
    return Seconds(forward * stage, backward * stage, again * stage)


def root_seconds(setup: TrainingSetup, constants: DeviceConstants) -> Seconds:
    """Predict the head, the logits and the loss, on a pipeline's last stage."""
    architecture = setup.architecture
    roots = [weight for weight in architecture.weights if not weight.block]
    products = _products(setup, constants, roots)
    logits = sum(
        _rows(setup, weight) * -(-weight.shape[0] // setup.layout.tp) for weight in roots if weight.role == "head"
    )
    touched = (_COMPILED_LOGIT_BYTES if setup.compiled else _LOGIT_BYTES) * logits
    loss = constants.passes * touched / _bandwidth(setup, constants)
    return Seconds(products.forward + loss / 2, products.backward + loss / 2)


def optimizer_seconds(setup: TrainingSetup, constants: DeviceConstants) -> float:
    """Predict the update of one rank's parameters; over the host's link if states are offloaded."""
    layout = setup.layout
    owned = setup.architecture.rank_parameters(layout.tp) / layout.pp
    if layout.strategy in ("fsdp", "zero1", "zero2", "zero3"):
        owned /= setup.shards
    adamw = setup.optimizer == "adamw"
    if setup.offload == "none":
        of_adamw = _ADAMW_BYTES if setup.fused_optimizer else _FOREACH_ADAMW_BYTES
        return owned * (of_adamw if adamw else _SGD_BYTES) / _bandwidth(setup, constants)
    # A fused update on the host reads and writes each state once; gradients come down and weights go up for it, unless
    # they are transferred in every micro-batch (`offload_seconds`).
    carried = 0 if layout.strategy in _OFFLOADS_WEIGHTS else 4 + 4
    seconds = owned * (carried + (28 if adamw else 12)) / constants.host_bytes_per_second
    if setup.offload == "nvme":
        states = 12 if adamw else 4  # master weights and moments, read and written
        seconds += owned * 2 * states / constants.storage_bytes_per_second
    return seconds


def offload_seconds(setup: TrainingSetup, constants: DeviceConstants) -> Seconds:
    """Predict the transfer of one micro-batch's shards: weights up for the forward and the backward, gradients down.

    FSDP2 transfers float32 shards and gradients, ZeRO-3 16-bit ones, from NVMe if they are stored there. Other
    strategies keep their weights on the device.
    """
    layout = setup.layout
    if setup.offload == "none" or layout.strategy not in _OFFLOADS_WEIGHTS:
        return Seconds(0.0, 0.0)
    owned = setup.architecture.rank_parameters(layout.tp) / layout.pp / setup.shards
    moved = owned * (4 if layout.strategy == "fsdp" or setup.precision == "float32" else 2)
    up = moved / constants.host_bytes_per_second
    if setup.offload == "nvme":
        up += moved / constants.storage_bytes_per_second
    return Seconds(up, (up if setup.reshard else 0.0) + moved / constants.host_bytes_per_second)


def _bandwidth(setup: TrainingSetup, constants: DeviceConstants) -> float:
    return setup.machine.accelerator.bytes_per_second * constants.memory


def _rows(setup: TrainingSetup, weight: Weight) -> float:
    """Return the rows that one micro-batch multiplies with a weight (for experts: with each of them)."""
    return setup.micro_batch * (1.0 if weight.per_sequence else setup.sequence_length * weight.share)


def _products(setup: TrainingSetup, constants: DeviceConstants, weights: Iterable[Weight]) -> Seconds:
    """Predict all products with these weights; with float8, heads stay in bfloat16."""
    device, tp = setup.machine.accelerator, setup.layout.tp
    bandwidth, least = _bandwidth(setup, constants), device.kernel_seconds
    forward = backward = 0.0
    for weight in weights:
        if not weight.products:
            continue
        number = PRODUCT_FORMAT[setup.precision]
        if number == "float8" and weight.role == "head":
            number = "bfloat16"
        element = {"float32": 4, "float8": 1}.get(number, 2)
        elements = weight.shard(tp)
        outputs = weight.shape[0] if weight.split != 0 else elements // (weight.size // weight.shape[0])
        inputs, rows = elements // outputs, _rows(setup, weight)
        arithmetic = 2 * rows * elements / product_flops(device, number, constants)
        touched = (rows * (inputs + outputs) + elements) * element / bandwidth
        # Filling a tile's pipeline takes the same bytes of the inner dimension in any format.
        depth = constants.product_depth * 2 / element
        # Backward: gradients of the inputs (inner length: outputs), and of the weights (inner length: rows).
        by_inputs, by_outputs, by_rows = (
            max(arithmetic * (1 + depth / inner), touched, least) for inner in (inputs, outputs, rows)
        )
        forward += weight.products * by_inputs
        backward += weight.products * (by_outputs + by_rows)
        if number == "float8":
            cast = _FLOAT8_CAST_BYTES / bandwidth
            forward += weight.products * (rows * inputs + elements) * cast
            backward += weight.products * rows * outputs * cast
    return Seconds(forward, backward)


def _attention(setup: TrainingSetup, constants: DeviceConstants) -> Seconds:
    """Predict scores and weighted values; eager attention computes all of them and stores them in memory."""
    architecture, device = setup.architecture, setup.machine.accelerator
    number = PRODUCT_FORMAT[setup.precision]
    number = "bfloat16" if number == "float8" else number
    dim = (architecture.head_dim + (architecture.value_dim or architecture.head_dim)) / 2
    heads = setup.micro_batch * -(-architecture.heads // setup.layout.tp)
    if not dim or not heads:
        return Seconds(0.0, 0.0)
    scores = heads * _pairs(architecture, setup.sequence_length, fused=setup.attention == "fused")
    if setup.attention == "eager":
        touched = _EAGER_SCORE_BYTES * scores / _bandwidth(setup, constants)
        products = 4 * dim * scores / product_flops(device, number, constants) * (1 + constants.product_depth / dim)
        return Seconds(products + touched, 2 * products + 1.5 * touched)
    shallow = (1 + constants.head_depth / dim) / (1 + constants.head_depth / 128)
    least = architecture.layers * device.kernel_seconds
    forward = max(4 * dim * scores / attention_flops(device, number, constants) * shallow, least)
    return Seconds(forward, FUSED_BACKWARD * forward)


def _pairs(architecture: Architecture, length: int, *, fused: bool) -> float:
    """Return the query-key pairs computed for one sequence and head, all layers together.

    A fused kernel skips masked pairs, except in tiles on the mask's edge. An encoder-decoder has equally many tokens on
    both sides.
    """
    decoders = architecture.decoder_layers
    encoders = architecture.layers - decoders
    pairs = float(encoders * length * length)
    if architecture.kind == "encoder_decoder":
        pairs += decoders * length * length
    windows = Counter(architecture.windows[encoders:]) if architecture.windows else Counter({None: decoders})
    for window, layers in windows.items():
        causal = attention_pairs(length, 0, window, causal=True) + length * min(_TILE, length) / 2
        pairs += layers * (min(causal, length * length) if fused else length * length)
    return pairs


def _elementwise(setup: TrainingSetup, constants: DeviceConstants) -> Seconds:
    """Predict norms, residual sums and activation functions: bytes over bandwidth.

    Forward, in elements a token: two norms read and write h, two sums read 2h and write h, the activation reads and
    writes f (gated: five times f in two kernels), f being the width of all experts that a token goes to. Backward about
    one and a half times that. A compiler fuses sums with norms, and gates.
    """
    architecture, device, tp = setup.architecture, setup.machine.accelerator, setup.layout.tp
    tokens = setup.micro_batch * setup.sequence_length
    residual = 6 if setup.compiled else 10
    active = (3 if setup.compiled else 5) if architecture.gated else 2
    elements = residual * architecture.hidden + active * activated_width(architecture) / tp
    # Under autocast norms and residual sums are in float32, the rest in bfloat16: three bytes on average.
    element = {"float32": 4, "bfloat16_autocast": 3}.get(setup.precision, 2)
    kernels = (4 if setup.compiled else 8) * device.kernel_seconds
    touched = constants.passes * tokens * elements * element
    forward = architecture.layers * max(touched / _bandwidth(setup, constants), kernels)
    cast = 0.0
    if setup.precision == "bfloat16_autocast":  # weights read in float32 and written in bfloat16, once a micro-batch
        cast = 6 * architecture.rank_parameters(tp) / _bandwidth(setup, constants)
    return Seconds(forward + cast, 1.5 * forward)
