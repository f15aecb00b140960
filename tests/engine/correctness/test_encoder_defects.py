"""Planted defects of encoders and encoder-decoders are called defects, clean runs in every layout are not.

Ranks are threads (encoder_runs.py); what they compute is the engine's.
"""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.support.answers.correctness_runs import Setting
from tests.support.answers.encoder_runs import Encoder, Plant, Planting, bert_case, t5_case

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = (Setting(), Setting(tp=2), Setting(pp=2, batch=6), Setting(tp=2, pp=2), Setting(dp=2, batch=1))
ENCODED, DECODED = "encoder.block.1.", "decoder.block.1."


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_clean_encoders_agree(dtype: str) -> None:
    for layout in LAYOUTS:
        verdict = bert_case(1).verdict(replace(layout, dtype=dtype))
        assert verdict.word == "agrees", (layout, verdict.reason)
        assert verdict.nearest is not None and verdict.nearest.excess < 0.9
        assert verdict.encoded is not None and verdict.encoded.same_nearest == 1.0


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("gated", [False, True], ids=["relu, tied", "gated gelu, untied"])
def test_clean_encoder_decoders_agree(dtype: str, gated: bool) -> None:
    for layout in LAYOUTS:
        verdict = t5_case(1, gated).verdict(replace(layout, dtype=dtype))
        assert verdict.word == "agrees", (layout, verdict.reason)
        assert verdict.nearest is not None and verdict.nearest.excess < 0.9
        assert verdict.ladder is not None and verdict.ladder.prompts == 6


def scaled(name: str, by: float = 1.01) -> Plant:
    def plant(planting: Planting) -> None:
        planting.tensors[name] *= by

    return plant


def rolled(name: str) -> Plant:
    """Every row of a tensor where the next one should be."""

    def plant(planting: Planting) -> None:
        planting.tensors[name] = planting.tensors[name].roll(1, 0)

    return plant


def swapped_columns(name: str) -> Plant:
    """Ranks have each other's columns."""

    def plant(planting: Planting) -> None:
        planting.tensors[name] = planting.tensors[name].roll(planting.tensors[name].shape[1] // 2, 1)

    return plant


def configured(**changes: Any) -> Plant:
    def plant(planting: Planting) -> None:
        planting.config = replace(planting.config, **changes)

    return plant


def on_one_rank(plant: Plant) -> Plant:
    return lambda planting: plant(planting) if planting.grid.tp_rank == 1 else None


def sees_filling(planting: Planting) -> None:
    """The encoder takes what fills a batch up for words of the texts."""
    shard = planting.shards["encoder"]
    original = shard.encode
    shard.encode = lambda inputs, padding=None: original(inputs, None)  # type: ignore[method-assign]


def sees_one_filling(planting: Planting) -> None:
    """Off by one."""
    shard = planting.shards["encoder"]
    original = shard.encode

    def encode(inputs: Tensor, padding: Tensor | None = None) -> Tensor:
        return original(inputs, None if padding is None else (padding - 1).clamp(min=0))

    shard.encode = encode  # type: ignore[method-assign]


ENCODER_DEFECTS: dict[str, tuple[Setting, Plant, Plant | None]] = {
    "one tensor scaled by 1.01": (Setting(), scaled("encoder.layer.1.intermediate.dense.weight"), None),
    "the same on one rank": (
        Setting(tp=2),
        on_one_rank(scaled("encoder.layer.1.attention.self.value.weight")),
        None,
    ),
    "missing bias": (Setting(), scaled("encoder.layer.1.attention.output.dense.bias", 0), None),
    "bias added by every rank": (Setting(tp=2), scaled("encoder.layer.2.output.dense.bias", 2), None),
    "no token types": (Setting(), scaled("embeddings.token_type_embeddings.weight", 0), None),
    "positions off by one": (Setting(), rolled("embeddings.position_embeddings.weight"), None),
    "wrong epsilon": (Setting(), configured(norm_epsilon=1e-5), None),
    "gelu by tanh": (Setting(), configured(activation="gelu_tanh"), None),
    "swapped shards": (Setting(tp=2), swapped_columns("encoder.layer.0.output.dense.weight"), None),
    "norm weight left at one": (Setting(pp=2), scaled("encoder.layer.2.output.LayerNorm.bias", 0), None),
    "filling is seen": (Setting(), scaled("embeddings.LayerNorm.weight", 1), sees_filling),
    "one filling position is seen": (Setting(), scaled("embeddings.LayerNorm.weight", 1), sees_one_filling),
}


@pytest.mark.parametrize("name", sorted(ENCODER_DEFECTS))
def test_defects_of_encoders_are_found(name: str) -> None:
    setting, plant, plant_shards = ENCODER_DEFECTS[name]
    verdict = bert_case(1).verdict(setting, plant, plant_shards or (lambda planting: None))
    assert verdict.word == "defect" and verdict.findings[0].excess > 2, verdict.nearest


def test_pooling_that_counts_filling_is_found_in_the_vectors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Encoder._pooled
    monkeypatch.setattr(
        Encoder, "_pooled", lambda self, states, piece: original(self, states, replace(piece, padding=None))
    )
    verdict = bert_case(1).verdict(Setting())
    assert verdict.word == "defect"
    assert all("embedding" in found.name or found.name == "directions" for found in verdict.findings)


def forgets_filling_of_sources(planting: Planting) -> None:
    """Cross attention takes filling for words of the source."""
    shard = planting.shards["decoder"]
    original = shard.new_cache

    def new_cache(batch: int, capacity: int) -> Any:
        cache = original(batch, capacity)
        take = cache.set_source
        cache.set_source = lambda states, padding: take(states, None)  # type: ignore[method-assign]
        return cache

    shard.new_cache = new_cache  # type: ignore[method-assign]


def keeps_the_first_source(planting: Planting) -> None:
    """The cache of cross attention is not made anew for a request of the same form."""
    shard = planting.shards["decoder"]
    original = shard.new_cache

    def new_cache(batch: int, capacity: int) -> Any:
        cache = original(batch, capacity)
        take, seen = cache.set_source, set[tuple[int, ...]]()

        def set_source(states: Tensor, padding: Tensor | None) -> None:
            if tuple(states.shape) not in seen or cache.source.length != states.shape[1]:
                take(states, padding)
            seen.add(tuple(states.shape))

        cache.set_source = set_source
        return cache

    shard.new_cache = new_cache  # type: ignore[method-assign]


DECODER_DEFECTS: dict[str, tuple[Setting, Plant, Plant | None]] = {
    "one tensor scaled by 1.01": (Setting(), scaled(f"{ENCODED}layer.1.DenseReluDense.wi.weight"), None),
    "cross attention's values scaled": (Setting(), scaled(f"{DECODED}layer.1.EncDecAttention.v.weight"), None),
    "the same on one rank": (
        Setting(tp=2),
        on_one_rank(scaled(f"{DECODED}layer.1.EncDecAttention.k.weight")),
        None,
    ),
    "relative bias of the encoder shifted": (
        Setting(),
        rolled("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        None,
    ),
    "relative bias of the decoder shifted, on the second stage": (
        Setting(pp=2),
        lambda planting: (
            rolled("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")(planting)
            if planting.grid.pp_rank
            else None
        ),
        None,
    ),
    "wrong epsilon": (Setting(), configured(norm_epsilon=1e-5), None),
    "buckets of other distances": (Setting(), configured(relative_distance=24), None),
    "scores scaled": (Setting(), configured(attention_scale=0.25), None),
    "head not scaled": (Setting(), configured(head_scale=1.0), None),
    "wrong first token": (Setting(), configured(start_token=1), None),
    "swapped shards": (Setting(tp=2), swapped_columns(f"{DECODED}layer.0.SelfAttention.o.weight"), None),
    "filling is seen": (Setting(), configured(), sees_filling),
    "filling is seen by cross attention": (Setting(), configured(), forgets_filling_of_sources),
    "a source of an earlier request": (Setting(batch=1), configured(), keeps_the_first_source),
}


@pytest.mark.parametrize("name", sorted(DECODER_DEFECTS))
def test_defects_of_encoder_decoders_are_found(name: str) -> None:
    setting, plant, plant_shards = DECODER_DEFECTS[name]
    verdict = t5_case(1).verdict(setting, plant, plant_shards or (lambda planting: None))
    assert verdict.word == "defect", verdict.nearest
    assert not verdict.findings or verdict.findings[0].excess > 2


def test_coarse_defects_are_found_in_bfloat16_alone() -> None:
    setting = Setting(dtype="bfloat16")
    assert bert_case(1).verdict(setting, lambda planting: None, sees_filling).word == "defect"
    assert t5_case(1).verdict(setting, DECODER_DEFECTS["relative bias of the encoder shifted"][1]).word == "defect"
