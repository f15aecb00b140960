"""Answers on the device against transformers, for every family and dtype, and CUDA graphs against eager steps.

Decoders get the verdict that a study's correctness section gives (`reports.correctness.judge`): against transformers in
float32 on the same device, judged by the noise of the order of reduction measured there. Encoders and encoder-decoders
are held against the hidden states and logits. Each family's decode step is replayed and compared with its eager
computation bit by bit.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.tiny_models import DECODERS, ENCODER_DECODERS, ENCODERS, VOCABULARY, make_model, manifest_of
from configs.common.execution import Dtype
from configs.hardware.quantised_products import why_not_multiplied
from engine.correctness.answers import collect_answers, columns, read_prefill, sequences_of
from engine.correctness.noise import converted, measure_noise
from engine.correctness.scoring import ModelScorer
from engine.inference.graphs import static_decode
from engine.inference.model import Shard
from engine.inference.pipeline import Replica
from engine.inference.weights import LoadedShard, read_shard
from engine.kernels.quantized import SCHEMES, quantize_linear
from engine.models.weights import DTYPES
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from engine.prompts.tokens import Prompts, batches
from reports.correctness.data import answers_of, noise_of
from reports.correctness.judge import judge_answers

_DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
_ORDERS, _NEW_TOKENS, _BATCH = 4, 8, 4
_LENGTHS = (3, 5, 9, 17, 24, 40)
_RELATIVE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest difference over the largest value; float32 on CPUs stays below 1e-5."""


def run(bench: Bench) -> None:
    """Report verdicts, differences and bit-equality by family; the device's kernels first."""
    torch.backends.cuda.matmul.allow_tf32 = False
    bench.attempt("quantised products", partial(_quantised, bench))
    lengths = _LENGTHS[:3] if bench.rehearsal else _LENGTHS
    for family in DECODERS:
        bench.attempt(family, partial(_decoder, bench, family, lengths))
    for family in ENCODERS:
        bench.attempt(family, partial(_encoder, bench, family))
    for family in ENCODER_DECODERS:
        bench.attempt(family, partial(_encoder_decoder, bench, family))


def load(bench: Bench, folder: Path, dtype: Dtype) -> LoadedShard:
    """Return our engine's shard of a saved model."""
    return read_shard(manifest_of(folder), Grid(1, 1, 1, 0), Communicator((0,), 0), DTYPES[dtype], bench.device)


@torch.inference_mode()
def _decoder(bench: Bench, family: str, lengths: tuple[int, ...]) -> None:
    folder = bench.folder / family
    model = make_model(family, folder, bench.device)
    random = np.random.default_rng(1)
    rows = [random.integers(1, VOCABULARY, length).tolist() for length in lengths]
    prompts = Prompts(0, rows, [None] * len(rows), len(rows))
    reference = _reference(bench, model, prompts)
    vocabulary = model.config.vocab_size
    base = answers_of(reference, vocabulary)
    for dtype in _DTYPES:
        shard = load(bench, folder, dtype).shard
        own = {f"0/{name}": column for name, column in _answers(bench, shard, prompts).items()}
        verdict = judge_answers(base, answers_of(own, vocabulary), noise_of(reference, base, dtype))
        nearest = f"{verdict.nearest.name}: {verdict.nearest.excess:.2g} of its limit" if verdict.nearest else ""
        bench.judged(f"{family} {dtype}: verdict", verdict.word, "agrees", "is", note=nearest or verdict.reason)
        equal = _graph_equals_eager(bench, shard)
        bench.judged(
            f"{family} {dtype}: replayed steps equal to eager ones", equal, 1.0, "is", note="share, bit by bit"
        )


def _reference(bench: Bench, model: Any, prompts: Prompts) -> dict[str, Any]:
    """Return transformers' answers and the noise of both dtypes, as columns of rank 0."""
    scorer = ModelScorer(model)
    decoded = torch.tensor([_greedy(bench, model, ids) for ids in prompts.tokens])
    sequences = sequences_of(prompts, decoded)
    scores = read_prefill(scorer, sequences, batches(prompts.tokens, 1, bench.device), prompts.total)
    samples = {"answer_prompts": np.arange(prompts.total), "answer_tokens": decoded.flatten().numpy()}
    samples |= columns(sequences, scores, [])
    in_dtype = partial(converted, model)
    samples |= measure_noise(in_dtype, ModelScorer, sequences, scores, _DTYPES, _ORDERS, bench.device)
    return {f"0/{name}": column for name, column in samples.items()}


def _greedy(bench: Bench, model: Any, ids: list[int]) -> list[int]:
    known, found = torch.tensor([ids], device=bench.device), []
    for _ in range(_NEW_TOKENS):
        word = model(input_ids=known, use_cache=False).logits[:, -1:].argmax(-1)
        known = torch.cat([known, word], dim=1)
        found.append(int(word))
    return found


def _answers(bench: Bench, shard: Shard, prompts: Prompts) -> dict[str, np.ndarray]:
    """Return our engine's answers in batches with padding, as a study collects them."""
    requests = batches(prompts.tokens, _BATCH, bench.device)
    capacity = max(batch.tokens.shape[1] for batch in requests) + _NEW_TOKENS
    replica = Replica(shard, Communicator((0,), 0), _BATCH, _BATCH, capacity)
    decoded = [part for batch in requests for part in replica.decode(batch, _NEW_TOKENS)]
    tokens = torch.cat([each.tokens for each in decoded]).cpu()
    context: Any = SimpleNamespace(grid=Grid(1, 1, 1, 0))
    return collect_answers(prompts, tokens, replica, requests, context)[1]


def _graph_equals_eager(bench: Bench, shard: Shard, steps: int = 6) -> float:
    """Return the share of decode steps whose hidden states are, bit by bit, those of the same step without a graph."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCABULARY, (2, 9 + steps), generator=generator).to(bench.device)
    padding = torch.tensor([0, 3], device=bench.device)
    cache, same = shard.new_cache(2, 9 + steps), 0
    shard.forward(tokens[:, :9], cache, padding)
    for place in range(9, 9 + steps):
        given = tokens[:, place : place + 1]
        replayed = static_decode(shard, cache, given, padding).clone()
        at = torch.tensor([cache.length], device=bench.device)
        eager = shard.compute(given, cache.static_step(2, at, padding), last_only=True)
        same += int(torch.equal(replayed, eager))
        cache.length += 1
    return same / steps


@torch.inference_mode()
def _encoder(bench: Bench, family: str) -> None:
    folder = bench.folder / family
    model = make_model(family, folder, bench.device)
    tokens, padding, seen = _padded(bench)
    wanted = model(input_ids=tokens, attention_mask=seen, position_ids=_positions(seen)).last_hidden_state
    for dtype in _DTYPES:
        states = load(bench, folder, dtype).shard.encode(tokens, padding)
        _difference(bench, f"{family} {dtype}: hidden states", states[seen.bool()], wanted[seen.bool()], dtype)


@torch.inference_mode()
def _encoder_decoder(bench: Bench, family: str) -> None:
    folder = bench.folder / family
    model = make_model(family, folder, bench.device)
    tokens, padding, seen = _padded(bench)
    forced = tokens[:, -6:]
    wanted = model(input_ids=tokens, attention_mask=seen, decoder_input_ids=forced).logits
    for dtype in _DTYPES:
        shards = load(bench, folder, dtype).shards
        decoder = shards["decoder"]
        cache = decoder.new_cache(len(tokens), forced.shape[1])
        cache.set_source(shards["encoder"].encode(tokens, padding), padding)
        hidden = [decoder.forward(forced[:, :3], cache)]
        hidden += [decoder.forward(forced[:, at : at + 1], cache).clone() for at in range(3, forced.shape[1])]
        logits = decoder.full_logits(decoder.head(torch.cat(hidden, dim=1)))
        _difference(bench, f"{family} {dtype}: logits", logits, wanted, dtype)


def _padded(bench: Bench) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [3, 12], padding at the left [3], and the mask of what is not padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCABULARY, (3, 12), generator=generator).to(bench.device)
    padding = torch.tensor([4, 0, 7], device=bench.device)
    return tokens, padding, (torch.arange(12, device=bench.device)[None] >= padding[:, None]).long()


def _positions(seen: Tensor) -> Tensor:
    return (seen.cumsum(-1) - 1).clamp(min=0)


def _difference(bench: Bench, name: str, own: Tensor, wanted: Tensor, dtype: Dtype) -> None:
    relative = float((own.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    bench.judged(name, relative, _RELATIVE[dtype], "at most", note="largest difference over largest value")


@torch.inference_mode()
def _quantised(bench: Bench) -> None:
    """Each scheme's product on the device against the same scheme's, of the same numbers, in float32 on the CPU."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(shape, generator=generator) for shape in ((192, 256), (8, 256))]
    for scheme in SCHEMES:
        for dtype in _DTYPES:
            capability = torch.cuda.get_device_capability(bench.device) if bench.device.type == "cuda" else None
            if refusal := why_not_multiplied(scheme, dtype, bench.device.type, capability):
                bench.seen(f"{scheme} {dtype}: product", "refused", note=refusal)
                continue
            weight, inputs = (tensor.to(DTYPES[dtype]) for tensor in drawn)
            wanted = quantize_linear(weight.float(), None, scheme)(inputs.float())
            layer = quantize_linear(weight.to(bench.device), None, scheme)
            own = layer(inputs.to(bench.device)).cpu()
            limit = 1e-4 if dtype == "float32" else 1e-2
            error = float((own.float() - wanted).abs().max() / wanted.abs().max())
            note = f"path {layer.path}, against the CPU's float32"
            bench.judged(f"{scheme} {dtype}: product", error, limit, "at most", note=note)
