"""Bytes of a model's weights in their storage format, on one rank and pipeline stage.

    stored_bytes(weight, setup)          # of one copy, on the fullest tensor-parallel rank
    stage_layers(setup)                  # [range(0, 40), range(40, 80)]: layers of each pipeline stage

Only matrices of products are quantised; tables, norms and biases stay in the format of the products. int8 has a 16-bit
scale for each output (LLM.int8, arXiv 2208.07339); int4 a 16-bit scale and zero point for each `int4_group` weights
(GPTQ, arXiv 2210.17323; AWQ, arXiv 2306.00978; both name 128 as their usual group).
"""

from collections.abc import Sequence

from configs.common.execution import Dtype, Layout
from configs.common.printable import plural
from engine.planner.architecture import Architecture, Weight
from engine.planner.setup import InferenceSetup, WeightFormat
from engine.planner.stages import balanced_stages

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}
QUANTISED = ("float8", "int8", "int4")
OWN_INT4_GROUP = 32
"""Weights that share a scale in our engine's int4 (docs/reference/compression.md)."""
_SCALE_BYTES = 2


def stored_as(compression: Sequence[str], dtype: Dtype) -> WeightFormat:
    """Return the format in which our engine stores products after passes over them: pruned ones are dense.

    What a level (`balanced`) becomes is known on the machine alone, and counts as no compression.
    """
    passes: dict[str, WeightFormat] = {"int8": "int8", "int8_dynamic": "int8", "int4": "int4", "float8": "float8"}
    return next((passes[one] for one in compression if one in passes), dtype)


def is_quantised(weight: Weight, setup: InferenceSetup) -> bool:
    """Return whether a weight is stored in fewer bits than it is multiplied in."""
    if setup.weights not in QUANTISED:
        return False
    return weight.role == "matrix" or (weight.role == "head" and setup.quantised_head)


def shard_elements(weight: Weight, setup: InferenceSetup) -> int:
    """Return elements of one copy on the fullest tensor-parallel rank."""
    whole = not setup.sharded_vocabulary and not weight.block and weight.role in ("embedding", "head")
    return weight.shard(1 if whole else setup.layout.tp)


def stored_bytes(weight: Weight, setup: InferenceSetup) -> float:
    """Return bytes of one copy on the fullest tensor-parallel rank, scales included."""
    elements = shard_elements(weight, setup)
    if not is_quantised(weight, setup):
        form = setup.compute if setup.weights in QUANTISED else setup.weights
        return elements * BYTES["float32" if weight.wide and form == "float16" else form]
    if setup.weights == "float8":
        return elements + _SCALE_BYTES
    if setup.weights == "int4":
        group_bytes = _SCALE_BYTES * (2 if setup.int4_zero_points else 1)
        return elements / 2 + group_bytes * -(-elements // setup.int4_group)
    rows = weight.shape[0] if weight.split != 0 else elements // (weight.size // weight.shape[0])
    return elements + _SCALE_BYTES * rows


def stored_stage_layers(setup: InferenceSetup) -> list[Sequence[int]]:
    """Return the layers of each pipeline stage, as `stage_layers_of`."""
    return stage_layers_of(setup.architecture, setup.layout)


def stage_layers_of(architecture: Architecture, layout: Layout) -> list[Sequence[int]]:
    """Return the layers of each pipeline stage, as the engine splits them; layers of all kinds count equally.

    It counts elements, whatever the weights become on the ranks. A stage of an encoder-decoder has a slice of both, and
    the tables count towards the decoder's. Raises ValueError for more stages than layers.
    """
    stages = layout.pp
    if stages > architecture.most_stages:
        raise ValueError(
            f"layout.pp: {stages} stages for {plural(architecture.most_stages, 'layer')} of {architecture.name}; use "
            "at most that"
        )
    if stages == 1:
        return [range(architecture.layers)]
    both = architecture.kind == "encoder_decoder"
    encoder = architecture.layers - architecture.decoder_layers if both else 0
    blocks = embedding = head = 0.0
    for weight in architecture.weights:
        if weight.block:
            of_encoder = both and weight.stream == "source" and not weight.name.startswith("cross_")
            blocks += 0.0 if of_encoder else weight.copies * weight.size
        elif weight.name == "embedding":  # of words: `engine.models.stages` counts no other table, and no norm
            embedding += weight.copies * weight.size
        elif weight.role == "head":  # a tied one is a copy on the last stage
            head += max(weight.copies, 1) * weight.size
    first = embedding if layout.stage_balance == "memory" else 0.0
    layers = architecture.layers - encoder
    main = balanced_stages(layers, stages, blocks / max(layers, 1), first, head)
    if not both:
        return list(main)
    slices = balanced_stages(encoder, stages, 1.0, 0.0, 0.0)
    return [[*own, *(encoder + layer for layer in other)] for own, other in zip(slices, main, strict=True)]


def slowest_stage(setup: InferenceSetup) -> float:
    """Return the busiest pipeline stage's share of a forward pass's products."""
    architecture = setup.architecture
    blocks = head = 0.0
    for weight in architecture.weights:
        multiplied = weight.products * stored_bytes(weight, setup)
        blocks, head = (blocks + multiplied, head) if weight.block else (blocks, head + multiplied)
    work = [blocks * len(layers) / max(architecture.layers, 1) for layers in stored_stage_layers(setup)]
    work[-1] += head
    return max(work) / sum(work)


def feed_forward_width(architecture: Architecture) -> int:
    """Return elements a token in the widest feed-forward: a dense one's, of all routed experts, or of all shared ones.

    Shared experts are computed before or after the routed ones.
    """
    return max(_feed_forward_widths(architecture)) or architecture.feed_forward


def activated_width(architecture: Architecture) -> int:
    """Return elements a token that the widest feed-forward activates: routed and shared experts together, or dense."""
    dense, routed, shared = _feed_forward_widths(architecture)
    return max(dense, routed + shared) or architecture.feed_forward


def _feed_forward_widths(architecture: Architecture) -> tuple[int, int, int]:
    """Return elements a token of a dense feed-forward, of its routed experts and of its shared ones; 0: it has none."""
    first = [weight for weight in architecture.weights if "mlp" in weight.name and weight.split == 0]
    routed = max((weight.shape[0] for weight in first if weight.share < 1), default=0) * architecture.experts_per_token
    whole = [weight for weight in first if weight.share == 1]
    shared = max((weight.shape[0] for weight in whole if weight.name.startswith("shared_")), default=0)
    dense = max((weight.shape[0] for weight in whole if not weight.name.startswith("shared_")), default=0)
    return dense, routed, shared
