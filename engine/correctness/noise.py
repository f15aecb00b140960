"""Measure the effect of the reduction order on a model: the noise level for judging answers.

The reference model computes the same prompts several times, each in another order (`engine.correctness.reordered`). The
method is independent of the model's architecture.

    samples |= measure_noise(in_dtype, ModelScorer, sequences, baseline, ("float32", "bfloat16"), 4, device)
    samples |= measure_state_noise(in_dtype, EncodeScorer, prompts, baseline, workload, device)        # of an encoder

Columns, for each dtype, K orders, rows as in `engine.correctness.answers` (N likelihoods, R rows of logits, P prompts):

  noise_<dtype>_nll [K x N] float32        change of the likelihood of every prompt token, nats
  noise_<dtype>_rms, _largest, _kl [K x R] float64  differences of the rows of logits (configs.common.differences)
  noise_<dtype>_flips [K x R] int32        1 where the most likely token is another one
  noise_<dtype>_columns [K x V] float32    mean square of the change by word
  noise_<dtype>_gaps [K x P x new x (T - 1)] float32  change of the lead of the first over the other top tokens
  noise_<dtype>_chain [K] float64          error of sums taken one product after the other, over that of these sums

and of an encoder, rows as in `engine.correctness.embeddings` (R rows of states, P vectors, of size H):

  noise_<dtype>_state_rms, _state_largest [K x R] float64, _state_columns [K x H] float32
  noise_<dtype>_vector_rms, _vector_largest, _vector_cosine [K x P] float64, _vector_columns [K x H] float32
  noise_<dtype>_chain [K] float64

The chain value bounds the noise of a correct kernel: torch sums in blocks, with a smaller error than one long chain.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.common.differences import VectorDifferences, row_differences, vector_differences
from configs.common.execution import Dtype
from configs.workloads.encode import EncodeWorkload
from engine.context import Samples
from engine.correctness.answers import Scorer, Scores, Sequence
from engine.correctness.embeddings import EncodeScorer, KeptStates, pooled
from engine.correctness.reordered import Reordered
from engine.models.weights import DTYPES
from engine.prompts.tokens import PromptBatch, Prompts, padded_batch


def measure_noise(
    in_dtype: Callable[[Dtype], Any],
    scorer_of: Callable[[Any], Scorer],
    sequences: list[Sequence],
    baseline: list[Scores],
    dtypes: tuple[Dtype, ...],
    orders: int,
    device: torch.device,
) -> Samples:
    """Return columns for all dtypes. in_dtype: the model in a precision (`converted`). baseline: scores of the
    sequences by the model in float32, one at a time, unchanged.
    """
    samples: Samples = {}
    for dtype in dtypes:
        changed = in_dtype(dtype)
        scorer = scorer_of(changed)
        found = [_one_order(scorer, sequences, baseline, order, device) for order in range(orders)]
        del scorer, changed
        samples |= {f"noise_{dtype}_{name}": np.concatenate([each[name] for each in found]) for name in found[0]}
    return samples


def converted(model: torch.nn.Module, name: Dtype) -> torch.nn.Module:
    """Return the model with its parameters in a precision: the model itself if they already are.

    Tables that a model computes (rotary frequencies) are unchanged, as when it is loaded in that dtype.
    """
    dtype = DTYPES[name]
    if all(parameter.dtype == dtype for parameter in model.parameters()):
        return model
    stored = set(model.state_dict())
    # Found in deepcopy's memory, so that no tensor is first copied in its own precision.
    changed: dict[int, Any] = {
        id(parameter): torch.nn.Parameter(parameter.data.to(dtype), requires_grad=False)
        for parameter in model.parameters()
    }
    for buffer_name, buffer in model.named_buffers():
        if buffer_name in stored and buffer.is_floating_point():
            changed[id(buffer)] = buffer.to(dtype)
    return copy.deepcopy(model, changed)


def _one_order(
    scorer: Scorer, sequences: list[Sequence], baseline: list[Scores], order: int, device: torch.device
) -> Samples:
    """Run all sequences once in one order."""
    nll, gaps, rows, flips = [], [], [], []
    columns, counted = np.zeros(0), 0
    with Reordered(order, rounded_scores=order % 2 == 1) as mode:
        for sequence, base in zip(sequences, baseline, strict=True):
            scores, lead = _scored(scorer, sequence, base, device)
            nll.append(np.concatenate(scores.nll or [np.empty(0)]) - np.concatenate(base.nll or [np.empty(0)]))
            gaps.append(lead)
            if base.logits:
                kept, moved = np.stack(base.logits), np.stack(scores.logits)
                differences = row_differences(kept, moved)
                rows.append(differences)
                flips.append(kept.argmax(1) != moved.argmax(1))
                columns = differences.columns * len(kept) + (columns if counted else 0.0)
                counted += len(kept)
    empty = np.empty(0)
    return {
        "nll": np.concatenate(nll).astype(np.float32),
        "rms": np.concatenate([each.rms for each in rows] or [empty]),
        "largest": np.concatenate([each.largest for each in rows] or [empty]),
        "kl": np.concatenate([each.kl for each in rows] or [empty]),
        "flips": np.concatenate(flips or [empty]).astype(np.int32),
        "columns": (columns / max(counted, 1)).astype(np.float32),
        "gaps": np.concatenate([each.ravel() for each in gaps]).astype(np.float32),
        "chain": np.array([mode.chain]),
    }


def _scored(scorer: Scorer, sequence: Sequence, base: Scores, device: torch.device) -> tuple[Scores, np.ndarray]:
    """Return scores at the baseline's positions, and the change of the leads at decoded tokens [new, T - 1]."""
    scores = Scores()
    leads: list[np.ndarray] = []
    tokens = torch.from_numpy(np.concatenate(base.top_tokens)).to(device)
    values = torch.from_numpy(np.concatenate(base.top_logits)).to(device)
    source = None if sequence.source is None else padded_batch([sequence.source], device)

    def reader(part: Sequence, keep: set[int]) -> Callable[[int, Tensor], None]:
        start = len(part.ids) - 1

        def consume(first: int, logits: Tensor) -> None:
            scores.read(part, first, logits[0], keep)
            decoded = logits[0, max(start - first, 0) :]
            if part.decoded and len(decoded):
                place = slice(max(first - start, 0), max(first - start, 0) + len(decoded))
                moved = decoded.gather(1, tokens[place]) - values[place]
                leads.append((moved[:, 1:] - moved[:, :1]).cpu().numpy())

        return consume

    for number, part in enumerate(sequence.parts()):
        fed = torch.tensor([part.ids + part.decoded[:-1]], device=device)
        scorer.prefill(PromptBatch(fed, None, source), reader(part, set() if number else set(base.logit_positions)))
    return scores, np.concatenate(leads)


def measure_state_noise(
    in_dtype: Callable[[Dtype], Any],
    scorer_of: Callable[[Any], EncodeScorer],
    prompts: Prompts,
    baseline: tuple[list[KeptStates], np.ndarray],
    workload: EncodeWorkload,
    device: torch.device,
) -> Samples:
    """Return an encoder's columns for the workload's `noise_dtypes` and `noise_orders`.

    in_dtype, baseline: as `measure_noise`; kept states and vectors [P, E] of the prompts.
    """
    samples: Samples = {}
    for dtype in workload.noise_dtypes:
        changed = in_dtype(dtype)
        scorer = scorer_of(changed)
        orders = range(workload.noise_orders)
        found = [_one_state_order(scorer, prompts, baseline, workload, order, device) for order in orders]
        del scorer, changed
        samples |= {f"noise_{dtype}_{name}": np.concatenate([each[name] for each in found]) for name in found[0]}
    return samples


def _one_state_order(
    scorer: EncodeScorer,
    prompts: Prompts,
    baseline: tuple[list[KeptStates], np.ndarray],
    workload: EncodeWorkload,
    order: int,
    device: torch.device,
) -> Samples:
    """Run all prompts once in one order."""
    kept, known = baseline
    moved, vectors = [], []
    with Reordered(order, rounded_scores=order % 2 == 1) as mode:
        for ids, base in zip(prompts.tokens, kept, strict=True):
            states = scorer.states(padded_batch([ids], device))
            assert states is not None
            moved.append(states[0, base.positions].float().cpu().numpy())
            vectors.append(pooled(states, None, workload.pooling, workload.normalize).cpu().numpy())
    states_moved = vector_differences(np.concatenate([each.values for each in kept]), np.concatenate(moved))
    vectors_moved = vector_differences(known, np.concatenate(vectors))
    return {
        **_state_columns("state", states_moved),
        **_state_columns("vector", vectors_moved),
        "vector_cosine": vectors_moved.cosine,
        "chain": np.array([mode.chain]),
    }


def _state_columns(name: str, found: VectorDifferences) -> Samples:
    return {
        f"{name}_rms": found.rms,
        f"{name}_largest": found.largest,
        f"{name}_columns": found.columns.astype(np.float32),
    }
