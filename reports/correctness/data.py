"""Parse a cell's answers from its record, by prompt. Columns are described in engine/correctness/answers.py and
engine/correctness/noise.py.

answers = answers_of(samples, vocabulary)
noise = noise_of(samples, vocabulary, "bfloat16")      # of the reference's samples
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats, Ints
from configs.common.execution import Dtype
from configs.records.rates import Column

_PARTS = ("nll", "nll_prompts", "logits", "logit_prompts", "logit_positions")
ANSWER_COLUMNS = (
    "answer_prompts",
    "answer_tokens",
    *(f"answer_{name}" for name in _PARTS),
    "answer_gaps",
    "answer_top_tokens",
    "answer_top_logits",
    *(f"cached_{name}" for name in (*_PARTS, "nll_positions")),
)
_NOISE_PARTS = ("nll", "rms", "largest", "kl", "flips", "columns", "gaps", "chain")


def noise_columns(dtype: Dtype) -> tuple[str, ...]:
    """Names of the columns that hold the noise of a dtype."""
    return tuple(f"noise_{dtype}_{name}" for name in _NOISE_PARTS)


@dataclass(frozen=True)
class Scored:
    """By prompt: likelihoods in nats, and where; logits [rows, vocabulary], and where."""

    nll: dict[int, Floats] = field(default_factory=dict)
    nll_positions: dict[int, Ints] = field(default_factory=dict)
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    positions: dict[int, Ints] = field(default_factory=dict)


@dataclass(frozen=True)
class Answers:
    """What a cell answered, by prompt.

    tokens: greedy, [new]. gaps: largest logit less the decoded token's, [new]. top_tokens, top_logits: [new, T].
    unequal: prompts that ranks of one replica answered differently.
    """

    tokens: dict[int, Ints]
    prefill: Scored = field(default_factory=Scored)
    cached: Scored = field(default_factory=Scored)
    gaps: dict[int, Floats] = field(default_factory=dict)
    top_tokens: dict[int, Ints] = field(default_factory=dict)
    top_logits: dict[int, Floats] = field(default_factory=dict)
    unequal: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReductionNoise:
    """Changes in K orders of reduction, by prompt: nll [K, tokens]; rms, largest, kl, flips [K, rows];
    gaps [K, new, T - 1]. columns: [K, vocabulary]. chain: error of sums in one long chain over that of these, [K].
    """

    nll: dict[int, Floats]
    rms: dict[int, Floats]
    largest: dict[int, Floats]
    kl: dict[int, Floats]
    flips: dict[int, Floats]
    gaps: dict[int, Floats]
    columns: Floats
    chain: Floats

    @property
    def orders(self) -> int:
        """K."""
        return len(self.columns)


def answers_of(samples: dict[str, Column], vocabulary: int | None) -> Answers:
    """Answers of all ranks, by prompt. Raises ValueError where the columns do not fit each other."""
    tokens: dict[int, Ints] = {}
    unequal: set[int] = set()
    gaps: dict[int, Floats] = {}
    tops: dict[int, Ints] = {}
    values: dict[int, Floats] = {}
    for rank in _ranks(samples, "answer_tokens"):
        prompts = _ints(samples, f"{rank}/answer_prompts")
        for prompt, mine in _shared_out(samples, f"{rank}/answer_tokens", prompts).items():
            known = tokens.setdefault(prompt, mine.astype(np.int64))
            if not np.array_equal(known, mine):
                unequal.add(prompt)
        if f"{rank}/answer_gaps" not in samples:
            continue
        # The words of the rank that speaks for its replica count; the others' tokens are compared with them.
        gaps |= {p: each.astype(np.float64) for p, each in _of(samples, rank, "answer_gaps", prompts).items()}
        for prompt, flat in _of(samples, rank, "answer_top_tokens", prompts).items():
            tops[prompt] = flat.reshape(len(tokens[prompt]), -1).astype(np.int64)
        for prompt, flat in _of(samples, rank, "answer_top_logits", prompts).items():
            values[prompt] = flat.reshape(len(tokens[prompt]), -1).astype(np.float64)
    prefill, cached = _scored(samples, "answer", vocabulary), _scored(samples, "cached", vocabulary)
    return Answers(tokens, prefill, cached, gaps, tops, values, tuple(sorted(unequal)))


def _of(samples: dict[str, Column], rank: int, name: str, prompts: Ints) -> dict[int, Column]:
    return _shared_out(samples, f"{rank}/{name}", prompts)


def _ranks(samples: dict[str, Column], column: str) -> list[int]:
    return sorted(int(key.partition("/")[0]) for key in samples if key.partition("/")[2] == column)


def column_of(samples: dict[str, Column], key: str) -> Column:
    """Return a column. Raises ValueError if the record has none of this name."""
    if key not in samples:
        raise ValueError(f"samples: there is no column {key} beside the other answers")
    return samples[key]


def _ints(samples: dict[str, Column], key: str) -> Ints:
    return column_of(samples, key).astype(np.int64)


def _shared_out(samples: dict[str, Column], key: str, prompts: Ints) -> dict[int, Column]:
    """A column cut into equal parts, one for each prompt."""
    flat = column_of(samples, key)
    if len(prompts) == 0 or len(flat) % len(prompts):
        raise ValueError(f"samples: {key} has {len(flat)} values, which is no multiple of its {len(prompts)} prompts")
    return dict(zip(prompts.tolist(), flat.reshape(len(prompts), -1), strict=True))


def _scored(samples: dict[str, Column], prefix: str, vocabulary: int | None) -> Scored:
    found = Scored()
    for rank in _ranks(samples, f"{prefix}_nll"):
        start = f"{rank}/{prefix}_"
        nll, owners = column_of(samples, start + "nll"), _ints(samples, start + "nll_prompts")
        given = samples.get(start + "nll_positions")
        if len(nll) != len(owners):
            raise ValueError(f"samples: {start}nll has {len(nll)} values, but {len(owners)} prompts")
        for prompt in np.unique(owners).tolist():
            mine = owners == prompt
            found.nll[prompt] = nll[mine].astype(np.float64)
            found.nll_positions[prompt] = np.arange(mine.sum()) if given is None else given[mine].astype(np.int64)
        _read_logits(found, samples, start, vocabulary)
    return found


def _read_logits(found: Scored, samples: dict[str, Column], start: str, vocabulary: int | None) -> None:
    flat, owners = column_of(samples, start + "logits"), _ints(samples, start + "logit_prompts")
    positions = _ints(samples, start + "logit_positions")
    if len(flat) != len(owners) * (vocabulary or 0) or len(positions) != len(owners):
        raise ValueError(f"samples: the {len(flat)} values of {start}logits are no {len(owners)} rows of {vocabulary}")
    rows = flat.reshape(len(owners), -1) if len(owners) else np.empty((0, 0), dtype=np.float32)
    for prompt in np.unique(owners).tolist():
        found.logits[prompt] = rows[owners == prompt]
        found.positions[prompt] = positions[owners == prompt]


def noise_of(samples: dict[str, Column], reference: Answers, dtype: Dtype) -> ReductionNoise | None:
    """The noise that the reference's one rank measured; None where it measured none of this dtype."""
    start = f"0/noise_{dtype}_"
    if start + "nll" not in samples:
        return None
    words = next((rows.shape[1] for rows in reference.prefill.logits.values()), 0)
    columns = column_of(samples, start + "columns").astype(np.float64)
    orders = len(columns) // words if words else 0
    if not orders or len(columns) % words:
        raise ValueError(f"samples: {start}columns has {len(columns)} values, which is no multiple of {words} words")
    tokens = {prompt: len(values) for prompt, values in reference.prefill.nll.items()}
    rows = {prompt: len(values) for prompt, values in reference.prefill.positions.items()}
    leads = {prompt: values.size - len(values) for prompt, values in reference.top_tokens.items()}
    gaps = _by_prompt(samples, start + "gaps", leads, orders)
    return ReductionNoise(
        nll=_by_prompt(samples, start + "nll", tokens, orders),
        gaps={p: each.reshape(orders, len(reference.tokens[p]), -1) for p, each in gaps.items()},
        columns=columns.reshape(orders, words),
        chain=column_of(samples, start + "chain").astype(np.float64),
        **{name: _by_prompt(samples, start + name, rows, orders) for name in ("rms", "largest", "kl", "flips")},
    )


def _by_prompt(samples: dict[str, Column], key: str, sizes: dict[int, int], orders: int) -> dict[int, Floats]:
    """Columns [orders x sum of sizes] by prompt, in the order of the prompts."""
    flat, total = column_of(samples, key), sum(sizes.values())
    if len(flat) != orders * total:
        raise ValueError(f"samples: {key} has {len(flat)} values instead of {orders} x {total}")
    table, found, start = flat.reshape(orders, total).astype(np.float64), {}, 0
    for prompt, size in sorted(sizes.items()):
        found[prompt] = table[:, start : start + size]
        start += size
    return found
