"""Weights and configurations that differ from the checkpoint."""

from dataclasses import replace

import torch

from configs.families.config import ModelConfig
from engine.parallel.grid import Grid
from tests.support.planted_defects.planting import LAYER, Tensors, on_config, on_tensors, tensor_parallel


@on_tensors("swapped shard of one down projection", tensor_parallel)
def _swapped(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    name = f"{LAYER}mlp.down_proj.weight"
    tensors[name] = tensors[name].roll(config.feed_forward // grid.tp, 1)


@on_tensors("swapped shard of one output projection on one rank", tensor_parallel)
def _swapped_output(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    if grid.tp_rank == 0:
        name = f"{LAYER}self_attn.o_proj.weight"
        tensors[name] = tensors[name].roll(config.heads * config.head_dim // grid.tp, 1)


@on_tensors("one tensor scaled by 1.01")
def _scaled(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    tensors[f"{LAYER}mlp.up_proj.weight"] *= 1.01


@on_tensors("one tensor scaled by 1.01 on one rank", tensor_parallel)
def _scaled_on_one(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    if grid.tp_rank == 1:
        tensors[f"{LAYER}self_attn.v_proj.weight"] *= 1.01


@on_tensors("one row of a tensor zero")
def _zero_row(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    tensors[f"{LAYER}mlp.gate_proj.weight"][3] = 0


@on_tensors("one element of a tensor wrong")
def _one_element(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    tensors[f"{LAYER}self_attn.o_proj.weight"][5, 7] += 1.0


@on_tensors("one tensor rounded to bfloat16")
def _rounded(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    name = f"{LAYER}self_attn.q_proj.weight"
    tensors[name] = tensors[name].bfloat16().to(tensors[name].dtype)


@on_tensors("norm weight of one layer left at one")
def _norm_weight(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    tensors[f"{LAYER}post_attention_layernorm.weight"].fill_(1)


@on_tensors("norm of the wrong layer")
def _norm_of_other(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    tensors[f"{LAYER}input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"].clone()


@on_tensors("key heads in the wrong order", lambda config, setting: config.kv_heads > 1)
def _key_heads(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    for kind in ("weight", "bias"):
        name = f"{LAYER}self_attn.k_proj.{kind}"
        if name in tensors:
            tensors[name] = tensors[name].roll(config.head_dim, 0)


@on_tensors("wrong key and value head on one rank", lambda c, setting: c.kv_heads > 1 and setting.tp > 1)
def _kv_head(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    if grid.tp_rank == 0:
        for part in ("k_proj", "v_proj"):
            for kind in ("weight", "bias"):
                name = f"{LAYER}self_attn.{part}.{kind}"
                if name in tensors:
                    tensors[name] = tensors[name].roll(config.head_dim, 0)


@on_tensors("queries paired with the wrong keys", lambda config, setting: 1 < config.kv_heads < config.heads)
def _grouping(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    # Interleaved instead of grouped: query head i uses key head i % kv_heads.
    order = torch.arange(config.heads).view(config.kv_heads, -1).t().flatten()
    weight = tensors[f"{LAYER}self_attn.q_proj.weight"]
    heads = weight.view(config.heads, config.head_dim, -1)[order]
    tensors[f"{LAYER}self_attn.q_proj.weight"] = heads.reshape(weight.shape).contiguous()


@on_tensors("missing bias of queries, keys and values on one rank", lambda config, s: config.qkv_bias)
def _missing_bias(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    if grid.tp_rank == grid.tp - 1:
        tensors[f"{LAYER}self_attn.q_proj.bias"].zero_()


@on_tensors("bias added on every rank", lambda config, setting: config.output_bias and setting.tp > 1)
def _bias_twice(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    tensors[f"{LAYER}self_attn.o_proj.bias"] *= grid.tp


@on_tensors("two head rows exchanged at the border of two shards")
def _head_rows(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    border = config.vocabulary // 2
    tensors[name][[border - 1, border]] = tensors[name][[border, border - 1]]


@on_tensors("head rows shifted by one on the last rank")
def _head_shift(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    border = config.vocabulary // 2
    tensors[name][border:] = tensors[name][border:].roll(1, 0)


@on_tensors("norm of the query heads left out", lambda config, setting: config.head_norms)
def _head_norm(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    tensors[f"{LAYER}self_attn.q_norm.weight"].fill_(1)


@on_tensors("one layer skipped")
def _skipped(tensors: Tensors, grid: Grid, config: ModelConfig) -> None:
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        for kind in ("weight", "bias"):
            if f"{LAYER}{part}.{kind}" in tensors:
                tensors[f"{LAYER}{part}.{kind}"].zero_()


@on_config("epsilon of the norms ten times as large")
def _epsilon(config: ModelConfig) -> ModelConfig:
    return replace(config, norm_epsilon=config.norm_epsilon * 10)


@on_config("wrong base of the rotary positions")
def _theta(config: ModelConfig) -> ModelConfig:
    return replace(config, rope=replace(config.rope, theta=config.rope.theta * 1.05))


@on_config("sliding window one too long", lambda config, setting: any(config.windows))
def _window(config: ModelConfig) -> ModelConfig:
    return replace(config, windows=tuple(None if each is None else each + 1 for each in config.windows))


@on_config("sliding window ignored in one layer", lambda config, setting: any(config.windows))
def _no_window(config: ModelConfig) -> ModelConfig:
    return replace(config, windows=(*config.windows[:-1], None))
