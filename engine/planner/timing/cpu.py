"""Predict times on a calibrated CPU by sums of measured operators (GPUs use a roofline).

    time = measured_generation_time(setup)     # InferenceSetup -> GenerationTime; the machine has `operators`
    step = measured_step_time(setup)           # TrainingSetup -> StepTime
    can_measure(architecture, accelerator)

On a core, a product of few rows reaches neither peak arithmetic nor memory bandwidth: PyTorch's bfloat16 product of one
row reads its weights at a quarter of what a plain read reaches. The time of a product is therefore interpolated by its
rows, linearly in time (reading weights costs the same for any rows, arithmetic grows with them). Other operators are
issued one by one and take a minimum time each (`layer_seconds`; in a decode step, which is recorded,
`recorded_layer_seconds`), and grow with rows x hidden (`element_seconds`). Training steps may use any data-parallel
strategy: `timing.waiting` predicts the exposed communication.
"""

from collections.abc import Mapping
from itertools import pairwise
from math import log2

from configs.hardware.hardware import Accelerator, NumberFormat, OperatorRates
from engine.planner.architecture import Architecture
from engine.planner.flops import FUSED_BACKWARD, model_flops
from engine.planner.results import GenerationTime, StepTime
from engine.planner.setup import InferenceSetup, TrainingSetup
from engine.planner.timing.collectives import all_gather_seconds, all_reduce_seconds, point_to_point_seconds, ring
from engine.planner.timing.waiting import handling_seconds, waits_of

_BYTES: dict[NumberFormat, int] = {"float32": 4, "bfloat16": 2}
_SHARED_CACHE = 8
_WORD_BYTES = 8  # the number of a word, and as much for its logit
_REFERENCE_ROWS = 256
"""Rows at which `training_flops` was measured (`engine.tools.calibration_figures.Sizes.prompt`)."""


def can_measure(architecture: Architecture, accelerator: Accelerator) -> bool:
    """Return whether measured operators cover this model: a dense gated decoder."""
    dense = architecture.kind == "decoder" and architecture.experts == 1 and architecture.gated
    return accelerator.operators is not None and dense


def measured_generation_time(setup: InferenceSetup) -> GenerationTime:
    """Predict prefill and the mean decode step of one batch; the prefill returns the first new token."""
    rates = setup.machine.accelerator.operators
    assert rates is not None
    architecture, batch, number = setup.architecture, setup.batch, _format(setup.compute)
    tp = setup.layout.tp
    table = _products_table(rates, architecture, number, tp)
    rows = batch * setup.prompt_tokens
    least = architecture.layers * rates.layer_seconds + rates.step_seconds
    element = rates.element_seconds[number]
    attention = batch * _attention_flops(architecture, setup.prompt_tokens) / tp / rates.attention_flops[number]
    prefill = _pass(architecture, table, rows, batch, element, tp) + attention + least
    half = setup.prompt_tokens + setup.new_tokens // 2
    context = batch * architecture.cache_elements(half, tp) * _BYTES[number]
    token = _pass(architecture, table, batch, batch, element, tp)
    if _is_recorded(setup):
        token += architecture.layers * rates.recorded_layer_seconds + rates.recorded_step_seconds
    else:
        token += least
    token += context / rates.context_bytes_per_second[number]
    messages = _message_seconds(setup, batch, number)
    sent = _sum_seconds(setup, rows, number) + _message_seconds(setup, rows, number)
    sent_token = _sum_seconds(setup, batch, number) + messages
    return GenerationTime(
        prefill_seconds=prefill + sent,
        token_seconds=token + sent_token,
        prefill_communication_seconds=sent,
        token_communication_seconds=sent_token,
        sequences=batch * setup.layout.dp,
        new_tokens=setup.new_tokens,
        prompt_tokens=setup.prompt_tokens,
        token_message_seconds=messages,
    )


def measured_step_time(setup: TrainingSetup) -> StepTime:
    """Predict one step: forward and backward, loss, recomputation, exchange of gradients and weights, clipping, AdamW.

    Sharded strategies update their own shard only; all-reduces of tensor parallelism are between dependent products.
    """
    rates = setup.machine.accelerator.operators
    assert rates is not None
    architecture, layout = setup.architecture, setup.layout
    number: NumberFormat = "float32" if setup.precision == "float32" else "bfloat16"
    rows, tp = setup.micro_batch * setup.sequence_length, layout.tp
    weights = sum(weight.shard(tp) * weight.products for weight in architecture.weights)
    table = rates.linear[number]
    # With fewer rows than measured, products are slower; the forward's table gives the ratio.
    slower = (seconds_at(table, rows) / rows) / (seconds_at(table, _REFERENCE_ROWS) / _REFERENCE_ROWS)
    products = 6 * rows * weights / rates.training_flops[number] * max(1.0, slower)
    elements = architecture.layers * rows * architecture.hidden * rates.training_element_seconds[number]
    attention = setup.micro_batch * _attention_flops(architecture, setup.sequence_length) / tp
    attention /= rates.attention_flops[number]
    loss = rows * architecture.vocabulary * rates.logit_seconds
    again = _again(setup, products / 3, elements / 3, attention)
    micro_batch = products + elements + (1 + FUSED_BACKWARD) * attention + loss + again
    waits = waits_of(setup, backward_seconds=micro_batch - (products + elements) / 3 - attention - loss / 2)
    owned = architecture.rank_parameters(tp) / (1 if layout.strategy in ("none", "ddp") else setup.shards)
    return StepTime(
        compute_seconds=setup.accumulation * micro_batch + waits.stolen + handling_seconds(setup),
        communication_seconds=waits.transfers,
        exposed_seconds=waits.exposed,
        bubble_seconds=0.0,
        optimizer_seconds=owned * rates.parameter_seconds,
        tokens=setup.trained_tokens,
        model_flops=model_flops(architecture, setup.tokens_per_step, setup.sequence_length),
    )


def _again(setup: TrainingSetup, products: float, elements: float, attention: float) -> float:
    """Return the recomputation of checkpointing, of the forward's parts: all, or all but attention and half of the
    products (the policy of `engine.training.strategies.recompute`). The head is treated as a block.
    """
    if setup.checkpointing == "none":
        return 0.0
    return products + elements + attention if setup.checkpointing == "full" else products / 2 + elements


def seconds_at(table: Mapping[int, float], rows: float) -> float:
    """Interpolate linearly between two measured numbers of rows; above the largest, scale in proportion."""
    known = sorted(table)
    if rows >= known[-1]:
        return table[known[-1]] * rows / known[-1]
    for low, high in pairwise(known):
        if rows <= high:
            share = max(0.0, (rows - low) / (high - low))
            return table[low] + share * (table[high] - table[low])
    return table[known[0]]


def _is_recorded(setup: InferenceSetup) -> bool:
    """Return whether decode steps are replayed from a recording: sums over gloo, between nodes, run in Python."""
    tp = setup.layout.tp
    return tp == 1 or ring(tp, setup.machine).nodes == 1


def _format(compute: str) -> NumberFormat:
    """Return the measured format closest to a computation's."""
    return "float32" if compute == "float32" else "bfloat16"


def _products_table(
    rates: OperatorRates, architecture: Architecture, number: NumberFormat, tp: int
) -> dict[int, float]:
    """Return seconds a weight by rows: cached for a shard that fits a core's private cache, else cold.

    Up to _SHARED_CACHE times its size a mixture of both, linear in the logarithm, because a rank's part of the shared
    cache is unknown (in a cloud, other tenants use it too).
    """
    held = sum(weight.shard(tp) * weight.products for weight in architecture.weights) * _BYTES[number]
    cold = min(1.0, max(0.0, log2(held / rates.cache_bytes) / log2(_SHARED_CACHE)))
    cached_table, cold_table = rates.linear_cached[number], rates.linear[number]
    return {rows: (1 - cold) * seconds_at(cached_table, rows) + cold * seconds for rows, seconds in cold_table.items()}


def _pass(
    architecture: Architecture, table: Mapping[int, float], rows: int, last: int, element: float, tp: int
) -> float:
    """Return products and other operators of one forward; the head multiplies the `last` rows only."""
    products = sum(
        weight.shard(tp) * weight.products * seconds_at(table, last if weight.role == "head" else rows)
        for weight in architecture.weights
        if weight.products
    )
    return products + architecture.layers * rows * architecture.hidden * element


def _sum_seconds(setup: InferenceSetup, rows: int, number: NumberFormat) -> float:
    """Return an all-reduce after each row-parallel product, and the gathered best words of each rank's vocabulary."""
    architecture, tp, machine = setup.architecture, setup.layout.tp, setup.machine
    if tp == 1:
        return 0.0
    split = sum(weight.products for weight in architecture.weights if weight.split == 1)
    message = rows * architecture.hidden * _BYTES[number]
    gathered = all_gather_seconds(2 * tp * setup.batch * _WORD_BYTES, tp, machine)
    return split * all_reduce_seconds(message, tp, machine) + gathered


def _message_seconds(setup: InferenceSetup, rows: int, number: NumberFormat) -> float:
    """Return hidden states sent from stage to stage, and the chosen words back to the first."""
    layout, machine = setup.layout, setup.machine
    if layout.pp == 1:
        return 0.0
    message = rows * setup.architecture.hidden * _BYTES[number]
    onward = point_to_point_seconds(message, layout.pp, machine, stride=layout.tp)
    back = point_to_point_seconds(setup.batch * _WORD_BYTES, layout.pp, machine, stride=layout.tp)
    return (layout.pp - 1) * onward + back


def _attention_flops(architecture: Architecture, tokens: int) -> float:
    """Return FLOPs of one sequence's causal attention, all layers; positions outside a window are not computed."""
    pairs = 0.0
    for layer in range(architecture.layers):
        seen = architecture.attended(layer, tokens)
        pairs += seen * (tokens - seen / 2)
    return 4 * architecture.heads * architecture.head_dim * pairs
