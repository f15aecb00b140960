"""Parse an encoder's answers from its record, by prompt. Columns are described in engine/correctness/embeddings.py and
noise.py.

answers = embeddings_of(samples)
noise = embedding_noise_of(samples, answers, "bfloat16")      # of the reference's samples
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats, Ints
from configs.common.execution import Dtype
from configs.records.rates import Column
from reports.correctness.data import column_of

VectorRows = NDArray[np.float32]

EMBEDDING_COLUMNS = (
    "answer_prompts",
    "answer_vectors",
    "answer_states",
    "answer_state_prompts",
    "answer_state_positions",
)
_NOISE_PARTS = (
    *(f"state_{name}" for name in ("rms", "largest", "columns")),
    *(f"vector_{name}" for name in ("rms", "largest", "cosine", "columns")),
    "chain",
)


def embedding_noise_columns(dtype: Dtype) -> tuple[str, ...]:
    """Names of the columns that hold the noise of a dtype."""
    return tuple(f"noise_{dtype}_{name}" for name in _NOISE_PARTS)


@dataclass(frozen=True)
class Embeddings:
    """By prompt: its vector [size]; hidden states [rows, size], and the positions of the rows."""

    vectors: dict[int, VectorRows] = field(default_factory=dict)
    states: dict[int, VectorRows] = field(default_factory=dict)
    positions: dict[int, Ints] = field(default_factory=dict)


@dataclass(frozen=True)
class EmbeddingNoise:
    """Changes in K orders of reduction.

    state_*: [K, rows], in the order of prompts and positions; vector_*: [K, prompts], in their order; *_columns:
    [K, size]; chain: error of sums in one long chain over that of these, [K].
    """

    state_rms: Floats
    state_largest: Floats
    state_columns: Floats
    vector_rms: Floats
    vector_largest: Floats
    vector_cosine: Floats
    vector_columns: Floats
    chain: Floats

    @property
    def orders(self) -> int:
        """K."""
        return len(self.chain)


def embeddings_of(samples: dict[str, Column]) -> Embeddings:
    """Answers of all ranks that keep some. Raises ValueError where the columns do not fit each other."""
    found = Embeddings()
    for key in sorted(samples):
        rank, _, name = key.partition("/")
        if name != "answer_vectors":
            continue
        prompts = column_of(samples, f"{rank}/answer_prompts").astype(np.int64)
        vectors = _rows(samples, key, len(prompts))
        found.vectors.update(zip(prompts.tolist(), vectors, strict=True))
        owners = column_of(samples, f"{rank}/answer_state_prompts").astype(np.int64)
        positions = column_of(samples, f"{rank}/answer_state_positions").astype(np.int64)
        if len(positions) != len(owners):
            raise ValueError(f"samples: {rank}/answer_state_positions has {len(positions)} values, not {len(owners)}")
        states = _rows(samples, f"{rank}/answer_states", len(owners))
        for prompt in np.unique(owners).tolist():
            found.states[prompt] = states[owners == prompt]
            found.positions[prompt] = positions[owners == prompt]
    return found


def embedding_noise_of(samples: dict[str, Column], reference: Embeddings, dtype: Dtype) -> EmbeddingNoise | None:
    """The noise that the reference's one rank measured; None where it measured none of this dtype."""
    start = f"0/noise_{dtype}_"
    if start + "chain" not in samples:
        return None
    orders = len(samples[start + "chain"])
    sizes = {
        "state": sum(len(rows) for rows in reference.states.values()),
        "vector": len(reference.vectors),
        "columns": next((len(vector) for vector in reference.vectors.values()), 0),
        "chain": 1,
    }
    found = {}
    for name in _NOISE_PARTS:
        size = sizes["columns" if name.endswith("columns") else name.partition("_")[0]]
        values = column_of(samples, start + name).astype(np.float64)
        if len(values) != orders * size:
            raise ValueError(f"samples: {start}{name} has {len(values)} values instead of {orders} x {size}")
        found[name] = values.reshape(orders, size)
    return EmbeddingNoise(**{**found, "chain": found["chain"][:, 0]})


def _rows(samples: dict[str, Column], key: str, count: int) -> VectorRows:
    flat = column_of(samples, key)
    if count == len(flat) == 0:  # a replica whose prompts are beyond those that keep states
        return np.empty((0, 0), dtype=np.float32)
    if count == 0 or len(flat) % count:
        raise ValueError(f"samples: {key} has {len(flat)} values, which is no multiple of {count} rows")
    return flat.reshape(count, -1).astype(np.float32)
