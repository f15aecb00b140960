"""Answers of encoders and encoder-decoders, ours and the reference's, in one process, as in `correctness_runs`.

    case = bert_case(seed=1)                              # a tiny model, prompts, reference with noise
    verdict = case.verdict(Setting(tp=2, dtype="bfloat16"), plant)
    case = t5_case(seed=1)

A defect is a function that changes what a rank has, before anything is computed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.families.config import ModelConfig
from configs.workloads.encode import EncodeWorkload
from engine.correctness.answers import FORCED_TOKENS, collect_answers, columns, read_prefill, sequences_of
from engine.correctness.embeddings import collect_embeddings, embedding_columns, pooled, read_states
from engine.correctness.noise import converted, measure_noise, measure_state_noise
from engine.correctness.scoring import ModelEncodeScorer, Seq2SeqScorer
from engine.inference.model import Shard
from engine.inference.pipeline import Replica, micro_batches
from engine.inference.weights import shards_of
from engine.models.weights import DTYPES
from engine.parallel.grid import Grid
from engine.prompts.tokens import Prompts, batches
from engine.workloads.encode import Encoder
from reports.correctness.data import Answers, ReductionNoise, answers_of, noise_of
from reports.correctness.embeddings import EmbeddingNoise, Embeddings, embedding_noise_of, embeddings_of
from reports.correctness.embeddings_judge import judge_embeddings
from reports.correctness.judge import CorrectnessVerdict, judge_answers
from tests.support.answers.correctness_runs import CPU, Groups, Setting, on_threads, share_of

DTYPE_NAMES: tuple[Any, ...] = ("float32", "bfloat16")
WORK = EncodeWorkload(noise_dtypes=DTYPE_NAMES)
NEW_TOKENS = 8


@dataclass
class Planting:
    """What a defect may change on a rank: the whole model's tensors and its configuration; later the shards."""

    grid: Grid
    config: ModelConfig
    tensors: dict[str, Tensor]
    shards: dict[str, Shard]


Plant = Callable[[Planting], None]


def nothing(planting: Planting) -> None:
    """No defect."""


@dataclass
class EncoderCase:
    """A model, its prompts, the reference's answers and noise."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    prompts: list[list[int]]
    reference: Embeddings
    noise: dict[str, EmbeddingNoise | None]

    def verdict(self, setting: Setting, plant: Plant = nothing, plant_shards: Plant = nothing) -> CorrectnessVerdict:
        """Our engine judged."""

        def work(grid: Grid, groups: Groups) -> dict[str, np.ndarray]:
            planting, prompts = _planted(self, setting, grid, groups, plant, plant_shards)
            with torch.inference_mode():
                size = -(-setting.batch // setting.pp)
                encoder = Encoder(planting.shards["encoder"], _pipeline(grid, groups), size, WORK)
                requests = batches(prompts.tokens, setting.batch, CPU)
                found = [each.vectors for batch in requests for each in encoder.encode(batch)]
                vectors = [each for each in found if each is not None]
                pieces = [piece for batch in requests for piece in micro_batches(batch, size)]
                context: Any = SimpleNamespace(grid=grid)
                return collect_embeddings(prompts, torch.cat(vectors) if vectors else None, encoder, pieces, context)[1]

        return judge_embeddings(self.reference, embeddings_of(on_threads(setting, work)), self.noise[setting.dtype])


@dataclass
class Seq2SeqCase:
    """The same of an encoder-decoder."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    prompts: list[list[int]]
    reference: Answers
    noise: dict[str, ReductionNoise | None]

    def verdict(self, setting: Setting, plant: Plant = nothing, plant_shards: Plant = nothing) -> CorrectnessVerdict:
        """Our engine judged."""

        def work(grid: Grid, groups: Groups) -> dict[str, np.ndarray]:
            planting, prompts = _planted(self, setting, grid, groups, plant, plant_shards)
            with torch.inference_mode():
                size = -(-setting.batch // setting.pp)
                shards, capacity = planting.shards, 1 + FORCED_TOKENS
                stages = _pipeline(grid, groups)
                # Recording a step changes libraries that all threads share.
                alone = grid.world_size == 1
                replica = Replica(
                    shards["decoder"], stages, size, setting.batch, capacity, shards["encoder"], recorded=alone
                )
                requests = batches(prompts.tokens, setting.batch, CPU)
                decoded = [part for batch in requests for part in replica.decode(batch, NEW_TOKENS)]
                tokens = torch.cat([each.tokens for each in decoded])
                pieces = [piece for batch in requests for piece in micro_batches(batch, size)]
                context: Any = SimpleNamespace(grid=grid)
                start = planting.config.start_token
                return collect_answers(prompts, tokens, replica, pieces, context, start_token=start)[1]

        answers = answers_of(on_threads(setting, work), self.config.vocabulary)
        return judge_answers(self.reference, answers, self.noise[setting.dtype])


def _planted(
    case: EncoderCase | Seq2SeqCase, setting: Setting, grid: Grid, groups: Groups, plant: Plant, plant_shards: Plant
) -> tuple[Planting, Prompts]:
    mine = share_of(len(case.prompts), grid.dp_rank, grid.dp)
    prompts = Prompts(mine.start, [case.prompts[index] for index in mine], [None] * len(mine), len(case.prompts))
    tensors = {name: tensor.to(DTYPES[setting.dtype], copy=True) for name, tensor in case.tensors.items()}
    planting = Planting(grid, case.config, tensors, {})
    plant(planting)
    ranks = tuple(grid.tensor_ranks)
    group: Any = groups[ranks].of(ranks.index(grid.rank))
    planting.shards = dict(shards_of(planting.config, grid, group, tensors))
    plant_shards(planting)
    return planting, prompts


def _pipeline(grid: Grid, groups: Groups) -> Any:
    ranks = tuple(grid.pipeline_ranks)
    return groups[ranks].of(ranks.index(grid.rank))


def random_weights(model: Any, seed: int, spread: float = 1.0) -> Any:
    """Weights that make attention, norms, biases and tables matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            table = any(word in name for word in ("embedding", "shared", "relative", "embed"))
            if parameter.dim() == 2 and not table:
                parameter.copy_(drawn * spread / parameter.shape[1] ** 0.5)
            elif parameter.dim() == 2:
                parameter.copy_(drawn * 0.5)
            else:
                parameter.copy_(drawn * 0.2 + (1.0 if "norm" in name.lower() and "bias" not in name else 0.0))
        for name, parameter in model.named_parameters():
            if ".q." in name or "query.weight" in name:
                parameter *= 0.3  # T5 does not scale its scores; a softmax that sees one token alone hides much
    return model.eval()


def some_prompts(vocabulary: int, seed: int, count: int = 6) -> list[list[int]]:
    """Of many lengths."""
    random = np.random.default_rng([seed, 1])
    lengths = random.choice([2, 3, 5, 9, 17, 24, 40], count)
    return [random.integers(1, vocabulary, length).tolist() for length in lengths]


def bert_model(seed: int) -> Any:
    """A tiny BERT of transformers."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    return random_weights(BertModel(config, add_pooling_layer=False), seed)


def t5_model(seed: int, gated: bool = False) -> Any:
    """A tiny T5 of transformers: of the first version (relu, tied) or of the second (gated gelu, untied)."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=97,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_heads=4,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return random_weights(T5ForConditionalGeneration(config), seed)


def _parts(model: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = ModelConfig.parse(json.loads(json.dumps(model.config.to_dict())))
    wanted = config.tensor_shapes()
    found = {}
    for name, value in model.state_dict().items():
        for prefix in ("", "bert."):
            if prefix + name in wanted:
                found[prefix + name] = value.detach().clone()
    assert set(found) == set(wanted), set(wanted) ^ set(found)
    return config, found


@cache
def bert_case(seed: int) -> EncoderCase:
    """A tiny BERT with its reference."""
    model = bert_model(seed)
    return encoder_case(model, some_prompts(97, seed))


@torch.inference_mode()
def encoder_case(model: Any, prompts: list[list[int]]) -> EncoderCase:
    """The reference's answers, one prompt at a time, and its noise."""
    config, tensors = _parts(model)
    ranked = reference_embeddings(model, prompts)
    reference = embeddings_of(ranked)
    noise = {dtype: embedding_noise_of(ranked, reference, dtype) for dtype in DTYPE_NAMES}
    return EncoderCase(config, tensors, prompts, reference, noise)


def reference_embeddings(model: Any, prompts: list[list[int]]) -> dict[str, np.ndarray]:
    """Columns of the reference, noise included."""
    given = Prompts(0, prompts, [None] * len(prompts), len(prompts))
    singles, scorer = batches(prompts, 1, CPU), ModelEncodeScorer(model)
    kept = read_states(scorer, given, singles)
    vectors = torch.cat([pooled(scorer.states(one), None, WORK.pooling, WORK.normalize) for one in singles]).numpy()
    samples = embedding_columns(0, vectors, kept)
    samples |= measure_state_noise(partial(converted, model), ModelEncodeScorer, given, (kept, vectors), WORK, CPU)
    return {f"0/{name}": column for name, column in samples.items()}


@cache
def t5_case(seed: int, gated: bool = False) -> Seq2SeqCase:
    """A tiny T5 with its reference."""
    model = t5_model(seed, gated)
    return seq2seq_case(model, some_prompts(97, seed))


@torch.inference_mode()
def seq2seq_case(model: Any, prompts: list[list[int]]) -> Seq2SeqCase:
    """The reference's answers, one source at a time, and its noise."""
    config, tensors = _parts(model)
    ranked = reference_samples(model, prompts, config.start_token)
    reference = answers_of(ranked, config.vocabulary)
    noise = {dtype: noise_of(ranked, reference, dtype) for dtype in DTYPE_NAMES}
    return Seq2SeqCase(config, tensors, prompts, reference, noise)


def reference_samples(model: Any, prompts: list[list[int]], start: int) -> dict[str, np.ndarray]:
    """Columns of the reference, noise included."""
    given = Prompts(0, prompts, [None] * len(prompts), len(prompts))
    singles, scorer = batches(prompts, 1, CPU), Seq2SeqScorer(model)
    decoded = torch.cat([_greedy(model, one.tokens, start) for one in singles])
    sequences = sequences_of(given, decoded, start)
    baseline = read_prefill(scorer, sequences, singles, len(prompts))
    samples = {"answer_prompts": np.arange(len(prompts)), "answer_tokens": decoded.flatten().numpy()}
    samples |= columns(sequences, baseline, [])
    samples |= measure_noise(partial(converted, model), Seq2SeqScorer, sequences, baseline, DTYPE_NAMES, 4, CPU)
    return {f"0/{name}": column for name, column in samples.items()}


def _greedy(model: Any, source: Tensor, start: int) -> Tensor:
    known = torch.tensor([[start]])
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=source, decoder_input_ids=known).logits
        known = torch.cat([known, logits[:, -1:].argmax(-1)], dim=1)
    return known[:, 1:]
