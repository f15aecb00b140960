"""From config.json and stored tensors to slots, for every family: names, shapes, splits and refusals."""

import os
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.families.checkpoint import check_tensors, with_stored_head
from configs.families.config import ModelConfig
from configs.families.plans import STYLES, splits_of
from configs.families.table import FAMILIES, families
from configs.families.tensors import head_names, is_unused, layer_stacks, names_in_file
from configs.hardware.architectures import ARCHITECTURES, one_of_each_family
from configs.plans.model_manifest import ModelManifest
from engine.api.checkpoint_loader import DistributedCheckpointLoader
from engine.inference.weights import cut
from engine.loading import tensor_locations
from engine.models.slots import Slot, rotary_order, wanted_slots
from engine.models.stages import own_layers
from engine.models.weights import synthetic_tensor, write_folder
from engine.parallel.grid import Grid

NAMES = one_of_each_family()


def config_of(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.parse(ARCHITECTURES[name] | changes)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def reference_of(data: dict[str, Any]) -> Any:
    """transformers' own model of a configuration, without memory for its weights."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    # Reading a configuration changes it.
    data = dict(data)
    config = AutoConfig.for_model(data.pop("model_type"), **data)
    classes = {"bert": AutoModel, "t5": AutoModelForSeq2SeqLM}
    with torch.device("meta"):
        return classes.get(config.model_type, AutoModelForCausalLM).from_config(config)


def sizes_at_random(name: str, generator: random.Random) -> dict[str, Any]:
    """Other sizes of a family, under the names that its config.json has for them."""
    heads = generator.choice([2, 4, 6])
    values: dict[str, int] = {
        "heads": heads,
        "hidden": heads * 8 * generator.randint(1, 3),
        "feed_forward": generator.randint(9, 90),
        "layers": generator.randint(1, 4),
        "encoder_layers": generator.randint(1, 4),
        "vocabulary": generator.randint(50, 300),
    }
    options = FAMILIES[ARCHITECTURES[name]["model_type"]].options
    sizes = {options[field].name: value for field, value in values.items() if hasattr(options[field], "name")}
    if "head_dim" in ARCHITECTURES[name]:
        sizes["head_dim"] = 16
    if "num_key_value_heads" in ARCHITECTURES[name]:
        sizes["num_key_value_heads"] = generator.choice([1, heads])
    if "word_embed_proj_dim" in ARCHITECTURES[name]:
        sizes["word_embed_proj_dim"] = values["hidden"]
    return sizes


def test_each_family_has_a_small_model() -> None:
    assert {ARCHITECTURES[name]["model_type"] for name in NAMES} == set(families())


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_the_names_and_shapes_of_transformers(name: str) -> None:
    generator = random.Random(name)
    for _ in range(2):
        data = ARCHITECTURES[name] | sizes_at_random(name, generator)
        config = ModelConfig.parse(data)
        theirs = {key: tuple(value.shape) for key, value in reference_of(data).state_dict().items()}
        names = names_in_file(config, theirs)
        shapes = config.tensor_shapes()
        assert {ours: theirs[stored] for ours, stored in names.items()} == shapes
        others = set(theirs) - set(names.values()) - (head_names(config) if config.tied else set())
        assert [other for other in others if not is_unused(config, other)] == []


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    """A config.json with the required keys alone means the same as the one that transformers makes of it."""
    from transformers import AutoConfig

    data = ARCHITECTURES[name]
    options = FAMILIES[data["model_type"]].options
    fields = ("vocabulary", "hidden", "feed_forward", "layers", "encoder_layers", "heads", "kv_heads", "head_dim")
    named = {options[field].name for field in fields if hasattr(options.get(field), "name")}
    few = {key: value for key, value in data.items() if key in named or key == "model_type"}
    theirs = AutoConfig.for_model(**few).to_dict()
    assert ModelConfig.parse(few) == ModelConfig.parse({**theirs, "model_type": data["model_type"]})


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_those_of_the_plan_of_transformers(name: str) -> None:
    from transformers import AutoConfig

    data = dict(ARCHITECTURES[name])
    plan = AutoConfig.for_model(**data).base_model_tp_plan
    if plan is None:
        assert data["model_type"] in ("gpt2", "opt", "bert", "t5")  # transformers has none for these
        return
    ours = splits_of(config_of(name))
    assert {entry: ours[entry] in STYLES[style] for entry, style in plan.items()} == dict.fromkeys(plan, True)
    # A plan in config.json itself is read, and one that says otherwise is refused.
    assert config_of(name, base_model_tp_plan=plan) == config_of(name)
    entry = next(entry for entry, style in plan.items() if style.startswith("rowwise"))
    with pytest.raises(ValueError, match=r"base_model_tp_plan has .*'colwise', but it is split by columns here"):
        config_of(name, base_model_tp_plan=plan | {entry: "colwise"})
    with pytest.raises(ValueError, match=r"distributed_config.tp_plan names layers\.\*\.mlp\.router, which is no mod"):
        config_of(name, distributed_config={"tp_plan": {"layers.*.mlp.router": "colwise"}})


def whole_tensors(config: ModelConfig) -> dict[str, Tensor]:
    return {name: synthetic_tensor(config, name, shape, 0) for name, shape in config.tensor_shapes().items()}


def slots_of(config: ModelConfig, grid: Grid, tensors: dict[str, Tensor]) -> dict[str, tuple[Slot, Tensor]]:
    return {
        slot.name: (slot, slot.of(cut(tensors[slot.piece.name], slot.piece))) for slot in wanted_slots(config, grid)
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", [2, 4])
def test_shares_of_all_ranks_joined_are_the_whole(name: str, tp: int) -> None:
    config = config_of(name)
    tensors = whole_tensors(config)
    whole = slots_of(config, Grid(1, 1, 1, 0), tensors)
    shares: defaultdict[str, list[Tensor]] = defaultdict(list)
    for rank in range(tp):
        for slot, (_, tensor) in slots_of(config, Grid(1, tp, 1, rank), tensors).items():
            shares[slot].append(tensor)
    assert shares.keys() == whole.keys()
    for slot, (_, tensor) in whole.items():
        parts = shares[slot]
        if parts[0].shape == tensor.shape:
            # Norms and tables are everybody's; the bias of a product split by columns is the first rank's.
            alone = slot.rpartition(".")[0].endswith(("output", "down")) and slot.endswith(".bias")
            assert len(parts) == (1 if alone else tp), slot
            assert all(torch.equal(part, tensor) for part in parts), slot
            continue
        dimension = next(axis for axis in range(tensor.dim()) if parts[0].shape[axis] != tensor.shape[axis])
        if sum(part.shape[dimension] for part in parts) > tensor.shape[dimension]:
            parts = parts[:: tp // config.kv_heads]  # several ranks hold the same head of keys and values
        assert torch.equal(torch.cat(parts, dimension), tensor), slot


@pytest.mark.parametrize("name", NAMES)
def test_stages_hold_each_slot_of_a_layer_once(name: str) -> None:
    config = config_of(name)
    whole = {slot.name for slot in wanted_slots(config, Grid(1, 1, 1, 0))}
    stages = [{slot.name for slot in wanted_slots(config, Grid(1, 1, 2, stage))} for stage in range(2)]
    assert stages[0] | stages[1] == whole
    # Relative positions are added in every layer.
    assert {slot for slot in stages[0] & stages[1] if not slot.endswith("relative.weight")} == set()
    for stack, layers in layer_stacks(config).items():
        own = [own_layers(config, Grid(1, 1, 2, stage), stack) for stage in range(2)]
        assert [*own[0], *own[1]] == list(range(layers)) and all(own)


def test_a_fused_tensor_goes_to_queries_keys_and_values_of_each_head() -> None:
    """GPT-NeoX has them head by head, GPT-2 side by side and transposed, Phi-3 one below the other."""
    for name, stored in (
        ("gpt-neox-1m", "gpt_neox.layers.1.attention.query_key_value"),
        ("gpt2-1m", "transformer.h.1.attn.c_attn"),
        ("phi3-1m", "model.layers.1.self_attn.qkv_proj"),
    ):
        config = config_of(name)
        tensors = whole_tensors(config)
        found = slots_of(config, Grid(1, 2, 1, 1), tensors)
        matrix = tensors[f"{stored}.weight"]
        size, heads = config.head_dim, config.heads
        if name == "gpt-neox-1m":
            last = matrix[(heads - 1) * 3 * size :].view(3, size, -1)
            query = last[0][rotary_order(size, config.rotary_dim)]
            key, value = last[1][rotary_order(size, config.rotary_dim)], last[2]
        elif name == "gpt2-1m":
            query, key, value = (part[-size:] for part in matrix.t().chunk(3))
        else:
            rows = [heads * size, config.kv_heads * size, config.kv_heads * size]
            query, key, value = (part[-size:] for part in matrix.split(rows))
        for role, expected in (("query", query), ("key", key), ("value", value)):
            assert torch.equal(found[f"decoder.1.{role}.weight"][1][-size:], expected), (name, role)


def test_pairs_that_turn_are_half_a_head_apart() -> None:
    order = rotary_order(16, 4)
    assert sorted(order) == list(range(16))
    # transformers turns the first 4 elements: 0 with 2, 1 with 3.
    assert [(order[0], order[8]), (order[1], order[9])] == [(0, 2), (1, 3)]
    assert rotary_order(16, 16) == list(range(16))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2-1m", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True .* use False"),
        ("gpt2-1m", {"add_cross_attention": True}, "add_cross_attention True is not implemented; use False"),
        ("gpt2-1m", {"activation_function": "gelu_10"}, "activation_function 'gelu_10' is not implemented"),
        ("gpt2-1m", {"n_embd": None}, "n_embd is missing; a gpt2 model needs vocab_size, n_embd, n_layer, n_head"),
        ("opt-1m", {"word_embed_proj_dim": 64}, "word_embed_proj_dim 64 is not implemented; use hidden_size, 128"),
        ("opt-1m", {"do_layer_norm_before": False}, "do_layer_norm_before False is not implemented; use True"),
        ("phi3-1m", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_type 'longrope' is not"),
        ("gpt-neox-1m", {"rotary_pct": 0.03}, "rotary_pct 0.03 turns 0 of 32 elements"),
        ("gpt-neox-1m", {"rotary_pct": 1.5}, "rotary_pct 1.5 is not a share of a head"),
        ("gemma-1m", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not implemented"),
        ("bert-1m", {"position_embedding_type": "relative_key"}, "'relative_key' is not implemented; use 'absolute'"),
        ("bert-1m", {"is_decoder": True}, "is_decoder True is not implemented"),
        ("t5-1m", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj 'gated-tanh' is not implemented"),
        ("t5-1m", {"is_encoder_decoder": False}, "is_encoder_decoder False is not implemented"),
        ("bert-1m", {"quantization_config": {"bits": 8}}, "quantization_config is not implemented"),
        (
            "bert-1m",
            {"model_type": "roberta"},
            "'roberta' is not .*; use one of: .*docs/reference/architectures.md says",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(name, **changes)


def test_a_file_may_have_the_prefix_of_another_class_and_heads_that_are_not_computed() -> None:
    bert, neox = config_of("bert-1m"), config_of("gpt-neox-1m")
    stored = [f"bert.{name}" for name in bert.tensor_shapes()]
    stored = [name.replace("LayerNorm.weight", "LayerNorm.gamma") for name in stored]
    assert set(names_in_file(bert, stored)) == set(bert.tensor_shapes())
    for name in ("bert.pooler.dense.weight", "cls.predictions.bias", "bert.embeddings.position_ids"):
        assert is_unused(bert, name)
    assert not is_unused(bert, "bert.encoder.layer.9.output.dense.weight")
    assert names_in_file(neox, ["embed_out.weight"]) == {"lm_head.weight": "embed_out.weight"}
    assert names_in_file(config_of("gpt2-1m"), ["h.0.ln_1.bias"]) == {"transformer.h.0.ln_1.bias": "h.0.ln_1.bias"}


@pytest.mark.parametrize("name", ["gpt2-1m", "gemma-1m", "bert-1m", "t5-gated-1m"])
def test_a_written_folder_is_read_by_transformers_without_a_tensor_too_few_or_too_many(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    data = ARCHITECTURES[name]
    config = ModelConfig.parse(data)
    write_folder(
        ModelManifest(identity="synthetic:x@5", source="synthetic", folder="", files={}, config=data), tmp_path
    )
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    check_tensors(config, tensor_locations([tmp_path / "model.safetensors"]))
    cls = {"bert": AutoModel, "t5": AutoModelForSeq2SeqLM}.get(data["model_type"], AutoModelForCausalLM)
    model, told = cls.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert {one for one in told["missing_keys"] if "pooler" not in one} == set() == set(told["unexpected_keys"])
    found = model.state_dict()
    for ours, stored in names_in_file(config, found).items():
        assert torch.equal(found[stored], synthetic_tensor(config, ours, config.tensor_shapes()[ours], 5)), ours
    # Norms and biases of these families are scattered: a wrong one would not be seen else.
    assert all(tensor.unique().numel() > 1 for stored, tensor in found.items() if "pooler" not in stored)


def test_the_head_of_an_encoder_decoder_is_the_one_in_the_file() -> None:
    """Newer files of T5 1.1 say that the head is tied, and hold one of its own or none."""
    first, second = config_of("t5-1m"), config_of("t5-gated-1m", tie_word_embeddings=True, scale_decoder_outputs=False)
    assert (first.tied, first.head_scale) == (True, 128**-0.5) and (second.tied, second.head_scale) == (True, 1.0)
    assert config_of("t5-1m", tie_word_embeddings=False) == replace(first, tied=False, head_scale=1.0)
    for config in (first, second):
        both = with_stored_head(config, ["shared.weight", "lm_head.weight"])
        assert both == replace(config, tied=False)
        assert names_in_file(both, ["lm_head.weight"]) == {"lm_head.weight": "lm_head.weight"}
        assert with_stored_head(config, ["shared.weight"]) == config
    said = config_of("t5-1m", tie_word_embeddings=False)
    alone = names_in_file(said, ["shared.weight"])
    assert alone == {"shared.weight": "shared.weight", "lm_head.weight": "shared.weight"}


def test_a_loader_of_tensors_by_name_refuses_fused_ones(tmp_path: Path) -> None:
    for name in ("gpt2-1m", "opt-1m"):
        manifest = ModelManifest(
            identity="synthetic:x@5", source="synthetic", folder="", files={}, config=ARCHITECTURES[name]
        )
        write_folder(manifest, tmp_path / name)
    with pytest.raises(ValueError, match="a gpt2 checkpoint holds queries, keys and values in one tensor"):
        DistributedCheckpointLoader(tmp_path / "gpt2-1m")
    parts = [DistributedCheckpointLoader(tmp_path / "opt-1m", rank, 2).load() for rank in range(2)]
    name = "model.decoder.layers.1.fc2.weight"
    whole = synthetic_tensor(config_of("opt-1m"), name, (128, 512), 5)
    assert torch.equal(torch.cat([part[name] for part in parts], dim=1), whole)
