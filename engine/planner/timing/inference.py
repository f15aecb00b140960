"""Predict generation time: the prompt at once (prefill), then one token after another (decode).

    time = generation_time(setup)                 # InferenceSetup -> GenerationTime
    time.tokens_per_second, time.token_seconds

Every matrix product takes the longer of its arithmetic and of reading its weights (roofline, Williams et al., CACM
52(4), 2009); the kernel's start, fill and drain time is added (`Accelerator.kernel_seconds`), and an all-reduce follows
every row-parallel product (Megatron-LM, arXiv 1909.08053). Decode is dominated by reading weights and cache, kernels
and all-reduces; prefill by arithmetic. With micro-batches all pipeline stages work at once, else one after another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from configs.hardware.hardware import Accelerator, Machine
from engine.planner.architecture import Architecture, Weight
from engine.planner.memory.stored import (
    BYTES,
    QUANTISED,
    activated_width,
    is_quantised,
    shard_elements,
    slowest_stage,
    stored_bytes,
    stored_stage_layers,
)
from engine.planner.results import GenerationTime
from engine.planner.setup import InferenceSetup
from engine.planner.timing.collectives import all_gather_seconds, all_reduce_seconds, point_to_point_seconds
from engine.planner.timing.constants import DeviceConstants, attention_flops, constants_for, product_flops
from engine.planner.timing.cpu import can_measure, measured_generation_time


@dataclass(frozen=True)
class KernelConstants:
    """Constants of inference besides `timing.constants`.

    dequantised: by storage format, the share of the usual bandwidth at which weights narrower than the products are
    read. block, gate, root: kernels of a block, more where its feed-forward is gated, and of a token's rest (table,
    last norm, head, sampling).
    """

    dequantised: Mapping[str, float]
    block: int
    gate: int
    root: int


def kernel_constants(accelerator: Accelerator) -> KernelConstants:
    """Return fixed priors, justified as follows.

    GPU, dequantised 0.75: an A100's multiprocessor converts 16 numbers and multiplies 64 in a cycle (CUDA C++
    Programming Guide, throughput of native arithmetic instructions, compute capability 8.0), so converting int8 takes
    0.7 of the time of reading it; half of that hidden gives 0.74. int4 has fewer bytes and cheaper tricks a weight and
    comes to about the same. Kernels of a compiled and captured graph: norm, QKV, rotation with the cache's update,
    attention in two (the context is split and combined), output, norm, up with gate and activation, down.
    CPU with byte products (its catalogue row names a rate for int8): the engine's kernels read int8 at 0.9 and int4 at
    0.78 of the bandwidth of packed bfloat16 (2816 x 1024 weights, one row: 104, 69 and 191 microseconds,
    docs/reference/compression.md). Other CPUs widen the weights first, which costs what fewer bytes save: each format
    takes the time of 16 bits. PyTorch without compilation runs about 40 operators a block, two more with a gate
    (`engine.models.llama`).
    """
    if accelerator.kind != "cpu":
        return KernelConstants(dict.fromkeys(QUANTISED, 0.75), 9, 0, 10)
    has_byte_products = "int8" in accelerator.peak_flops
    return KernelConstants({"int8": 0.9, "int4": 0.78} if has_byte_products else {"int8": 0.5, "int4": 0.28}, 40, 2, 20)


_HOP_SECONDS = 1e-6
"""Latency of a store to a neighbour's memory over NVLink or Infinity Fabric: assumption."""
_PEER_BYTES_PER_SECOND = 1e11
"""Links at least this fast connect memories that kernels address directly."""
_EXPERT_KERNELS = 4  # router, choice, gathering, weighted sum
_PRODUCTS, _CROSS_PRODUCTS = (
    4,
    2,
)  # the engine's, of a layer and each step: QKV, output, gate and up, down; query, output
_CROSS_KERNELS = 5  # norm, query, attention in two, output


def generation_time(setup: InferenceSetup, constants: DeviceConstants | None = None) -> GenerationTime:
    """Predict prefill and the mean decode step. An encoder has only a prefill (`new_tokens` 0, `token_seconds` 0).

    A calibrated CPU is predicted from its measured operators where they suffice (`timing.cpu`). Raises ValueError for
    ranks that no known link joins, and for more pipeline stages than layers.
    """
    stored_stage_layers(setup)
    if setup.at_once < setup.batch:
        return _in_micro_batches(setup, constants)
    plain = setup.weights not in QUANTISED
    if constants is None and plain and can_measure(setup.architecture, setup.machine.accelerator):
        return measured_generation_time(setup)
    architecture, layout, device = setup.architecture, setup.layout, setup.machine.accelerator
    rates = _Rates(setup, constants or constants_for(device), kernel_constants(device))
    seconds, communication = rates.prefill()
    token_seconds = token_communication = messages = 0.0
    new_tokens = setup.new_tokens if architecture.decoder_layers else 0
    if new_tokens:
        token_seconds, token_communication = rates.token()
        messages = rates.hand_over(setup.batch)
    return GenerationTime(
        prefill_seconds=seconds + communication,
        token_seconds=token_seconds + token_communication,
        prefill_communication_seconds=communication,
        token_communication_seconds=token_communication,
        sequences=setup.batch * layout.dp,
        new_tokens=new_tokens,
        prompt_tokens=setup.prompt_tokens,
        token_message_seconds=messages,
    )


def _in_micro_batches(setup: InferenceSetup, constants: DeviceConstants | None) -> GenerationTime:
    """Predict a batch split into micro-batches.

    A decode step takes as long as the busiest stage computes, and at least one micro-batch's time through all stages,
    messages included: those of one micro-batch are hidden behind the work on others, where there are enough. A prefill
    takes its first micro-batch's time through all stages, plus the busiest stage's time for each of the others.
    """
    count = -(-setup.batch // setup.at_once)
    one = generation_time(setup.replace(batch=setup.at_once, micro_batch=None), constants)
    busiest = slowest_stage(setup)
    prefill, pieces = 1 + (count - 1) * busiest, count * busiest
    sums = one.token_communication_seconds - one.token_message_seconds
    computing = (one.token_seconds - one.token_message_seconds) * pieces
    hidden = computing >= one.token_seconds
    return replace(
        one,
        prefill_seconds=one.prefill_seconds * prefill,
        token_seconds=max(one.token_seconds, computing),
        prefill_communication_seconds=one.prefill_communication_seconds * prefill,
        token_communication_seconds=sums * pieces if hidden else one.token_communication_seconds,
        token_message_seconds=0.0 if hidden else one.token_message_seconds,
        sequences=setup.batch * setup.layout.dp,
    )


def touched_experts(share: float, tokens: float) -> float:
    """Return the expected share of experts used by at least one of `tokens`, under random routing."""
    return 1.0 if share >= 1 else 1 - (1 - share) ** max(1.0, tokens)


def small_all_reduce_seconds(message_bytes: float, ranks: int, machine: Machine, share: float = 1.0) -> float:
    """Predict an all-reduce within a step: the faster of a ring or tree and, between directly joined GPUs, of one shot.

    One shot: every rank reads all others' parts in one kernel, after one exchange of flags and before another
    (TensorRT-LLM, vLLM and PyTorch's symmetric memory do so for small messages).
    """
    if ranks == 1:
        return 0.0
    usual = all_reduce_seconds(message_bytes, ranks, machine, share=share)
    link, accelerator = machine.neighbour, machine.accelerator
    joined = link is not None and link.bytes_per_second >= _PEER_BYTES_PER_SECOND and ranks <= machine.joined_ranks
    if link is None or not joined or accelerator.kind == "cpu":
        return usual
    moved = (ranks - 1) * message_bytes / (link.bytes_per_second * share)
    return min(usual, accelerator.kernel_seconds + 2 * _HOP_SECONDS + moved)


@dataclass(frozen=True)
class _Rates:
    """A setup and its efficiency shares."""

    setup: InferenceSetup
    constants: DeviceConstants
    kernels: KernelConstants

    def prefill(self) -> tuple[float, float]:
        """Return compute and communication seconds for the prompt and the first new token."""
        setup, architecture = self.setup, self.setup.architecture
        prompt, batch = setup.prompt_tokens, setup.batch
        tokens = batch * prompt
        both = architecture.kind == "encoder_decoder"
        main = batch if both else tokens
        computing = self._products("main", main) + self._products("source", tokens if both else 0)
        computing += self._prompt_attention(prompt, both)
        computing += tokens * _touched_elements(architecture, setup.layout.tp) * self._element / self._bandwidth
        computing += self._kernels(architecture.layers)
        summing = self._sums("main", main) + self._sums("source", tokens if both else 0)
        return computing, summing + self.hand_over(tokens)

    def token(self) -> tuple[float, float]:
        """Return compute and communication seconds for one more token of each sequence, at the mean context."""
        batch, layers = self.setup.batch, self.setup.architecture.decoder_layers
        computing = self._products("main", batch) + self._cached_attention() + self._kernels(layers)
        return computing, self._sums("main", batch) + self.hand_over(batch)

    @property
    def _element(self) -> float:
        return BYTES[self.setup.compute]

    @property
    def _bandwidth(self) -> float:
        return self.setup.machine.accelerator.bytes_per_second * self.constants.memory

    def _products(self, stream: str, tokens: int) -> float:
        """Predict all matrix products with `tokens` rows; in generation the head's with one row of a sequence."""
        if not tokens:
            return 0.0
        weights = [w for w in self.setup.architecture.weights if w.products and w.stream == stream]
        return sum(self._product(weight, tokens) for weight in weights)

    def _product(self, weight: Weight, tokens: int) -> float:
        setup = self.setup
        generates = setup.architecture.decoder_layers > 0
        rows = setup.batch if weight.per_sequence or (weight.role == "head" and generates) else tokens
        touched = touched_experts(weight.share, rows)
        each = rows * weight.share / touched
        elements = shard_elements(weight, setup)
        inner = elements // weight.shape[0] if weight.split == 1 else weight.size // weight.shape[0]
        peak = product_flops(setup.machine.accelerator, setup.compute, self.constants)
        arithmetic = 2 * each * elements / (peak * inner / (inner + self.constants.product_depth))
        share = self.kernels.dequantised[setup.weights] if is_quantised(weight, setup) else 1.0
        reading = stored_bytes(weight, setup) / (self._bandwidth * share)
        return weight.products * touched * max(arithmetic, reading)

    def _prompt_attention(self, prompt: int, both: bool) -> float:
        """Predict scores and mixtures: 2 x heads x (head_dim + value_dim) FLOPs for each attended pair of tokens."""
        architecture, setup = self.setup.architecture, self.setup
        heads = -(-architecture.heads // setup.layout.tp)
        pairs = 0.0
        for layer in range(architecture.layers):
            seen = architecture.attended(layer, prompt)
            causal = architecture.kind == "decoder"
            if both and layer >= architecture.layers - architecture.decoder_layers:
                pairs += prompt  # one query to the source
            else:
                pairs += seen * (prompt - seen / 2) if causal else seen * prompt
        depth = architecture.head_dim + (architecture.value_dim or architecture.head_dim)
        flops = 2 * setup.batch * heads * depth * pairs
        return flops / attention_flops(setup.machine.accelerator, setup.compute, self.constants)

    def _cached_attention(self) -> float:
        """Predict reading keys and values for one token, at the mean context."""
        architecture, setup = self.setup.architecture, self.setup
        half = setup.new_tokens // 2
        own = half if architecture.kind == "encoder_decoder" else setup.prompt_tokens + half
        tp, source = setup.layout.tp, setup.prompt_tokens
        elements = architecture.cache_elements(max(1, own), tp) + architecture.cross_cache_elements(source, tp)
        form = BYTES[setup.cache or setup.compute]
        return setup.batch * elements * form / self._bandwidth

    def _kernels(self, layers: int) -> float:
        architecture = self.setup.architecture
        block = self.kernels.block + self.kernels.gate * architecture.gated
        block += _EXPERT_KERNELS if architecture.experts > 1 else 0
        crossed = architecture.decoder_layers if architecture.kind == "encoder_decoder" else 0
        count = layers * block + crossed * _CROSS_KERNELS + self.kernels.root
        count += (_PRODUCTS * layers + _CROSS_PRODUCTS * crossed + 1) * self.setup.product_operators
        return count * self.setup.machine.accelerator.kernel_seconds

    def _sums(self, stream: str, tokens: int) -> float:
        """Predict the all-reduces: one per row-parallel product, one for the table, and the gathered logits.

        What shared experts make is added to what the routed ones make before both are summed over ranks.
        """
        setup, architecture, tp = self.setup, self.setup.architecture, self.setup.layout.tp
        if tp == 1 or not tokens:
            return 0.0
        link = self.constants.link
        split = [w for w in architecture.weights if w.role == "matrix" and w.split == 1 and w.stream == stream]
        apart = [w for w in split if not w.name.startswith("shared_")]
        count = sum(w.products / (architecture.experts if w.share < 1 else 1) for w in apart)
        gather = 0.0
        if stream == "main" and setup.sharded_vocabulary:
            count += 1
            logits = setup.batch * architecture.vocabulary * self._element
            gather = all_gather_seconds(logits, tp, setup.machine, share=link)
        message = tokens * architecture.hidden * self._element
        return count * small_all_reduce_seconds(message, tp, setup.machine, link) + gather

    def hand_over(self, tokens: int) -> float:
        """Predict transfers between stages, and of the chosen token back to the first."""
        setup, layout = self.setup, self.setup.layout
        if layout.pp == 1:
            return 0.0
        message = tokens * setup.architecture.hidden * self._element

        def once(message_bytes: float) -> float:
            return point_to_point_seconds(message_bytes, layout.pp, setup.machine, stride=layout.tp)

        return (layout.pp - 1) * once(message) + once(8 * setup.batch)


def _touched_elements(architecture: Architecture, tp: int) -> float:
    """Return elements a token that elementwise operators read and write, over all layers.

    Residual stream: eight at two norms and two sums. Feed-forward: its gate, its other half and their product.
    """
    wide = (3 if architecture.gated else 2) * activated_width(architecture) / tp
    return architecture.layers * (8 * architecture.hidden + wide)
