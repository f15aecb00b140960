"""Run ONNX graphs in ONNX Runtime: greedy decoding with a cache in the runtime's memory, states, and scores.

The cache's tensors are passed from step to step as the runtime's values, without numpy; the graph concatenates old and
new ones, a copy per step.

    model = OnnxDecoder(folder, threads=1)
    results = model.decode(batch, new_tokens=32)
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as state  # type: ignore[import-untyped]
from torch import Tensor

from engine.correctness.answers import Consume
from engine.peers.onnx.graphs import GraphOptimization
from engine.prompts.decoded import Decoded
from engine.prompts.tokens import PromptBatch

_LEVELS = {
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_PIECE_BYTES = 32 * 1024 * 1024  # of float32 logits passed on at once
OrtValue = Any
"""A tensor of ONNX Runtime."""


class Graph:
    """One optimised graph. Raises NotImplementedError for a graph that the runtime rejects."""

    def __init__(self, path: Path, threads: int, optimization: GraphOptimization = "all") -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.graph_optimization_level = _LEVELS[optimization]
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except (state.Fail, state.InvalidGraph, state.NotImplemented) as error:
            reason = " ".join(str(error).split())[:200]
            raise NotImplementedError(f"ONNX Runtime cannot load the graph {path.name}: {reason}") from error
        self.inputs = {each.name: each for each in self._session.get_inputs()}
        self.outputs = [each.name for each in self._session.get_outputs()]

    def run(self, given: dict[str, OrtValue]) -> dict[str, OrtValue]:
        """Return outputs by name; inputs unknown to the graph are ignored."""
        used = {name: value for name, value in given.items() if name in self.inputs}
        return dict(zip(self.outputs, self._session.run_with_ort_values(self.outputs, used), strict=True))

    def empty_cache(self, rows: int) -> dict[str, OrtValue]:
        """Return past keys and values of no position."""
        return {
            name: _value(np.empty((rows, each.shape[1], 0, each.shape[3]), _TYPES[each.type]))
            for name, each in self.inputs.items()
            if name.startswith("past.")
        }


def _value(array: np.ndarray) -> OrtValue:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


@dataclass
class Cache:
    """Cache of one batch: number of `known` positions, mask of positions without padding, and the runtime's tensors."""

    known: int
    padding: np.ndarray
    past: dict[str, OrtValue]
    source: dict[str, OrtValue]


class OnnxDecoder:
    """A decoder, or the encoder and decoder of an encoder-decoder, as written by `engine.peers.onnx.graphs`.

    start_token: the first token of an encoder-decoder's decoder. Also implements `engine.correctness.answers.Scorer`.
    """

    def __init__(
        self, folder: Path, threads: int, optimization: GraphOptimization = "all", start_token: int | None = None
    ) -> None:
        self._decoder = Graph(folder / "decoder.onnx", threads, optimization)
        self._encoder = None if start_token is None else Graph(folder / "encoder.onnx", threads, optimization)
        self._start_token = start_token

    def decode(self, batch: PromptBatch, new_tokens: int) -> list[Decoded]:
        """Decode a batch of prompts, or of sources, greedily; the clock starts here."""
        began = time.perf_counter()
        stamps, tokens = np.empty(new_tokens), np.empty((len(batch.tokens), new_tokens), dtype=np.int64)
        if self._start_token is not None:
            batch = PromptBatch(torch.full((len(batch.tokens), 1), self._start_token), None, batch)
        cache = self._begin(batch)
        fed = batch.tokens.numpy()
        for place in range(new_tokens):
            logits = self._feed(cache, fed, slice(fed.shape[1] - 1, None))
            tokens[:, place] = logits[:, -1].argmax(-1)
            stamps[place] = time.perf_counter()
            fed = tokens[:, place : place + 1]
        return [Decoded(began, stamps, torch.from_numpy(tokens))]

    def prefill(self, batch: PromptBatch, consume: Consume) -> None:
        """Compute logits of all columns, by one prefill of the batch."""
        _give(self._feed(self._begin(batch), batch.tokens.numpy(), slice(None)), 0, consume)

    def cached(self, batch: PromptBatch, steps: int, consume: Consume) -> None:
        """Compute logits of the last `steps` columns: the others are prefilled, then one token a call."""
        tokens, cache = batch.tokens.numpy(), self._begin(batch)
        first = tokens.shape[1] - steps
        self._feed(cache, tokens[:, :first], slice(first - 1, None))
        for column in range(first, tokens.shape[1]):
            _give(self._feed(cache, tokens[:, column : column + 1], slice(None)), column, consume)

    def _begin(self, batch: PromptBatch) -> Cache:
        rows = len(batch.tokens)
        padding = np.zeros(rows, dtype=np.int64) if batch.padding is None else batch.padding.numpy()
        source: dict[str, OrtValue] = {}
        if self._encoder is not None:
            assert batch.source is not None
            mask = _value(batch.source.real.long().numpy())
            ids = _value(np.ascontiguousarray(batch.source.tokens.numpy()))
            source = self._encoder.run({"input_ids": ids, "attention_mask": mask}) | {"source_mask": mask}
        return Cache(0, padding, self._decoder.empty_cache(rows), source)

    def _feed(self, cache: Cache, tokens: np.ndarray, wanted: slice) -> np.ndarray:
        """Return logits [rows, wanted columns, words] of tokens appended to the cache."""
        length = tokens.shape[1]
        places = np.arange(cache.known + length) - cache.padding[:, None]
        positions = np.ascontiguousarray(places[:, cache.known :].clip(min=0))
        given = {
            "input_ids": _value(np.ascontiguousarray(tokens)),
            "attention_mask": _value((places >= 0).astype(np.int64)),
            "position_ids": _value(positions),
            "columns": _value(np.arange(length)[wanted]),
        }
        found = self._decoder.run(given | cache.past | cache.source)
        logits: np.ndarray = found.pop("logits").numpy()
        cache.past = {name.replace("present", "past"): value for name, value in found.items()}
        cache.known += length
        return logits


class OnnxEncoder:
    """An encoder as written by `engine.peers.onnx.graphs`."""

    def __init__(self, folder: Path, threads: int, optimization: GraphOptimization = "all") -> None:
        self._graph = Graph(folder / "encoder.onnx", threads, optimization)

    def states(self, batch: PromptBatch) -> Tensor:
        """Return last hidden states [rows, length, width]; undefined at padding."""
        real = batch.real.long()
        given = {
            "input_ids": batch.tokens.contiguous(),
            "attention_mask": real,
            "position_ids": (real.cumsum(1) - 1).clamp(min=0),
        }
        found = self._graph.run({name: _value(tensor.numpy()) for name, tensor in given.items()})
        return torch.from_numpy(found["states"].numpy())


def _give(logits: np.ndarray, first: int, consume: Consume) -> None:
    """Pass on in pieces, because readers work in float64."""
    found = torch.from_numpy(logits)
    width = max(1, _PIECE_BYTES // (4 * len(logits) * logits.shape[-1]))
    for start in range(0, logits.shape[1], width):
        consume(first + start, found[:, start : start + width].float())
