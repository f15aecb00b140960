"""Collect a rank's answers, token by token, for later comparison by a pure function.

Called after all timed work, with the timed batches. Each prompt is scored by a prefill of prompt and greedy tokens
(`Scorer.prefill`), and its end again token by token through the key-value cache (`Scorer.cached`), which reveals stale
entries.

    figures, samples = collect_answers(prompts, tokens, scorer, pieces, context)

An encoder-decoder is scored by teacher forcing: its first token and then the source's tokens (at most FORCED_TOKENS of
them), so that every engine scores the same decoder input; this replaces the prompt below. Its greedy tokens are scored
by a separate prefill. Encoders: `engine.correctness.embeddings`.

Every rank of a replica calls it, because scoring is collective. Ranks that do not report for the replica keep their
tokens only, so that diverging ranks are detected. Columns (P prompts, index counted over all replicas; position 0 is a
prompt's first token, logits at a position are of the next token):

  answer_prompts [P] int32                index of each prompt
  answer_tokens [P x new] int32           greedy tokens of the timed decode
  answer_nll [N] float64                  -log p of every prompt token after the first, nats, in order
  answer_nll_prompts [N] int32            the prompt that each belongs to
  answer_logits [R x V] float32           logits at chosen positions of the prompts (`kept_positions`)
  answer_logit_prompts, answer_logit_positions [R] int32
  answer_gaps [P x new] float32           largest logit less that of the decoded token, by the prefill
  answer_top_tokens [P x new x T] int32   the T tokens with the largest logits there, largest first,
  answer_top_logits [P x new x T] float32   and their logits
  cached_nll, cached_nll_prompts, cached_nll_positions, cached_logits, cached_logit_prompts,
  cached_logit_positions                  the same of the last positions of the prompts, through the cache
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from configs.common.base import write_atomically
from configs.records.record import Figure
from engine.context import Context, Samples
from engine.models.text_model import TextModel
from engine.prompts.tokenizer import load_tokenizer
from engine.prompts.tokens import PromptBatch, Prompts, padded_batch, tokenizer_path

MAX_LOGIT_BYTES = 64 * 1024 * 1024
"""Maximum bytes of logits in a record over all ranks, including those through the cache."""

CACHED_STEPS = 8
"""Minimum number of last positions of a prompt fed one token at a time; as many as are decoded, if those are more."""

FORCED_TOKENS = 128
"""Maximum number of source tokens used as forced decoder input; fewer if the decoder has fewer positions."""

TOP_TOKENS = 8
_FIRST_POSITIONS = 3
_MOST_ROWS = 64

Consume = Callable[[int, Tensor], None]
"""Takes (first, logits [rows, n, vocabulary] float32): of columns first to first + n - 1 of a batch."""


class Scorer(Protocol):
    """Interface of an engine for scoring answers. Batches are padded at the left, like the timed ones.

    A batch of an encoder-decoder holds the decoder's tokens and has a `source`; a decoder's has none. Both give the
    logits of their columns to `consume`, in order, each once, in pieces that bound memory (32 MiB, or one column), on
    the ranks that report for their replica. Logits at padding positions are undefined. The caches are those of the
    timed decode, and serve batches of different lengths.
    """

    def prefill(self, batch: PromptBatch, consume: Consume) -> None:
        """Compute logits of all columns, by one prefill of the batch."""

    def cached(self, batch: PromptBatch, steps: int, consume: Consume) -> None:
        """Compute logits of the last `steps` columns: the others are prefilled, then one token a call."""


@dataclass(frozen=True)
class Rows:
    """Number of rows of logits kept per prompt: the same for every layout and engine.

    prompts: only those with a smaller index keep any; prefilled, cached: rows of each.
    """

    prompts: int
    prefilled: int
    cached: int

    @classmethod
    def of(cls, vocabulary: int, prompts: int) -> "Rows":
        """Return as many as fit in MAX_LOGIT_BYTES, for this many prompts over all replicas."""
        room = MAX_LOGIT_BYTES // (4 * vocabulary)
        each = max(2, room // prompts)
        cached = max(1, min(CACHED_STEPS, each // 3))
        prefilled = min(_MOST_ROWS, each - cached)
        return cls(max(1, room // (prefilled + cached)), prefilled, cached)


def kept_positions(length: int, rows: Rows) -> list[int]:
    """Return the positions of a prompt of `length` tokens whose logits are kept: the last ones, the first, some
    between.
    """
    if length <= rows.prefilled:
        return list(range(length))
    last = list(range(length - rows.cached, length))
    first = list(range(min(_FIRST_POSITIONS, rows.prefilled - len(last))))
    others = rows.prefilled - len(last) - len(first)
    between = np.linspace(len(first), last[0], others + 2)[1:-1].astype(int).tolist()
    return sorted({*first, *between, *last})


@dataclass(frozen=True)
class Sequence:
    """A sequence to score: a prompt (index over all replicas, ids) and the greedy tokens after it.

    source: of an encoder-decoder; ids are then the forced decoder input, and the greedy tokens follow the first of
    them.
    """

    prompt: int
    ids: list[int]
    decoded: list[int]
    source: list[int] | None = None

    def parts(self) -> "list[Sequence]":
        """Return the parts to prefill together, the part whose logits are kept first."""
        if self.source is None:
            return [self]
        return [replace(self, decoded=[]), replace(self, ids=self.ids[:1])]


@dataclass
class Scores:
    """Values read from one sequence's logits: see the columns of this module."""

    nll: list[np.ndarray] = field(default_factory=list)
    nll_positions: list[np.ndarray] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    logit_positions: list[int] = field(default_factory=list)
    gaps: list[np.ndarray] = field(default_factory=list)
    top_tokens: list[np.ndarray] = field(default_factory=list)
    top_logits: list[np.ndarray] = field(default_factory=list)

    def read(self, sequence: Sequence, first: int, logits: Tensor, keep: set[int]) -> None:
        """Read logits [n, vocabulary] of the positions from `first`, whose successors are all known."""
        known = sequence.ids + sequence.decoded
        targets = torch.tensor(known[first + 1 : first + 1 + len(logits)], device=logits.device)
        chosen = logits[: len(targets)].gather(1, targets[:, None])[:, 0]
        inside = min(max(len(sequence.ids) - 1 - first, 0), len(logits))  # number of successors that are prompt tokens
        if inside:
            sums = logits[:inside].double().logsumexp(-1)
            self.nll.append((sums - chosen[:inside].double()).cpu().numpy())
            self.nll_positions.append(np.arange(first, first + inside))
        if inside < len(targets):
            top = logits[inside:].topk(min(TOP_TOKENS, logits.shape[1]), dim=-1)
            self.gaps.append((top.values[:, 0] - chosen[inside:]).cpu().numpy())
            self.top_tokens.append(top.indices.cpu().numpy())
            self.top_logits.append(top.values.cpu().numpy())
        for position in range(first, first + len(logits)):
            if position in keep:
                # A copy: a view would keep the whole piece alive.
                self.logits.append(logits[position - first].cpu().numpy().copy())
                self.logit_positions.append(position)


def read_prefill(scorer: Scorer, sequences: list[Sequence], pieces: list[PromptBatch], total: int) -> list[Scores]:
    """Return scores of each sequence, prompt and decoded tokens, by prefill.

    `pieces` are batches of the prompts, in order.

    For an encoder-decoder they are batches of the sources.
    """
    scores = [Scores() for _ in sequences]
    start = 0
    for piece in pieces:
        rows = slice(start, start + len(piece.tokens))
        for place, part in enumerate(zip(*(each.parts() for each in sequences[rows]), strict=True)):
            batch = fed_batch(list(part), piece)
            scorer.prefill(batch, _reader(scores[rows], list(part), batch, 0 if place else total, cached=False))
        start = rows.stop
    return scores


def fed_batch(part: list[Sequence], piece: PromptBatch) -> PromptBatch:
    """Return the input that gives logits after every token of these sequences but the last."""
    if part[0].source is not None:
        found = padded_batch([each.ids + each.decoded[:-1] for each in part], piece.tokens.device)
        return replace(found, source=piece)
    decoded = torch.tensor([each.decoded[:-1] for each in part], dtype=torch.int64)
    return replace(piece, tokens=torch.cat([piece.tokens, decoded.to(piece.tokens.device)], dim=1))


def read_cached(scorer: Scorer, sequences: list[Sequence], pieces: list[PromptBatch], total: int) -> list[Scores]:
    """Return scores of the last positions of each prompt through the cache: as many as tokens were decoded, and no less
    than CACHED_STEPS; fewer for short prompts.

    At least one token of each prompt must be prefilled, so short prompts are run separately, and those of one token
    have none.
    """
    scores = [Scores() for _ in sequences]
    most = max(CACHED_STEPS, *(len(each.decoded) for each in sequences))
    start = 0
    for piece in pieces:
        part = [replace(each, decoded=[]) for each in sequences[start : start + len(piece.tokens)]]
        whole = fed_batch(part, piece)
        for chosen in _of_similar_length(part, most):
            mine = [part[row] for row in chosen]
            steps = min([most, *(len(each.ids) - 1 for each in mine)])
            batch, found = whole.rows(chosen), [scores[start + row] for row in chosen]
            scorer.cached(batch, steps, _reader(found, mine, batch, total, cached=True))
        start += len(part)
    return scores


def _of_similar_length(part: list[Sequence], most: int) -> list[list[int]]:
    """Return rows that can take about as many steps, at most `most`; rows of one token are left out."""
    bounds = [1]
    longer = CACHED_STEPS
    while longer < most:
        bounds.append(longer)
        longer *= 2
    bounds.append(most)
    groups: dict[int, list[int]] = {bound: [] for bound in bounds}
    for row, each in enumerate(part):
        if len(each.ids) > 1:
            groups[max(bound for bound in bounds if bound == 1 or bound < len(each.ids))].append(row)
    return [rows for rows in groups.values() if rows]


def _reader(scores: list[Scores], part: list[Sequence], piece: PromptBatch, total: int, cached: bool) -> Consume:
    """Return a function that assigns a batch's logits to positions of its sequences. total: of all prompts; 0: no row
    is kept.
    """
    padding = [0] * len(part) if piece.padding is None else piece.padding.tolist()

    def consume(first: int, logits: Tensor) -> None:
        assert logits.dtype == torch.float32 and logits.shape[0] == len(part)
        rows = Rows.of(logits.shape[-1], total) if total else Rows(0, 0, 0)
        for row, sequence in enumerate(part):
            skip = max(padding[row] - first, 0)
            if skip >= logits.shape[1]:
                continue
            keep = kept_positions(len(sequence.ids), rows) if sequence.prompt < rows.prompts else []
            keep = keep[-rows.cached :] if cached else keep
            scores[row].read(sequence, first + skip - padding[row], logits[row, skip:], set(keep))

    return consume


def collect_answers(
    prompts: Prompts,
    tokens: Tensor,
    scorer: Scorer,
    pieces: list[PromptBatch],
    context: Context,
    start_token: int | None = None,
    through_cache: bool = True,
    forced: int = FORCED_TOKENS,
) -> tuple[dict[str, Figure], Samples]:
    """Return figures and columns of one rank.

    tokens [P, new]: tokens of the timed decode; undefined on a middle stage, which does not receive them.
    pieces: the prompts in order, in batches for `scorer`. start_token, forced: as `sequences_of`.
    through_cache: also score the last positions through the cache.
    """
    grid = context.grid
    sequences = sequences_of(prompts, tokens, start_token, forced)
    prefilled = read_prefill(scorer, sequences, pieces, prompts.total)
    cached = read_cached(scorer, sequences, pieces, prompts.total) if through_cache else []
    samples: Samples = {}
    if grid.is_first_stage or grid.is_last_stage:
        samples["answer_prompts"] = np.array([each.prompt for each in sequences], dtype=np.int32)
        samples["answer_tokens"] = tokens.to(torch.int32).flatten().cpu().numpy()
    if not grid.reports_results:
        return {}, samples
    samples |= columns(sequences, prefilled, cached)
    rows = len(samples["answer_logit_prompts"])
    vocabulary = len(samples["answer_logits"]) // rows if rows else None
    return {"answer_vocabulary": vocabulary, "answer_logit_rows": rows}, samples


def sequences_of(
    prompts: Prompts, tokens: Tensor, start_token: int | None = None, forced: int = FORCED_TOKENS
) -> list[Sequence]:
    """Return prompts with the tokens [P, new] decoded after each.

    start_token: for an encoder-decoder, whose prompts are sources: the decoder's first token, which at most `forced`
    tokens of the source follow.
    """
    pairs = list(enumerate(zip(prompts.tokens, tokens.tolist(), strict=True), start=prompts.first))
    if start_token is None:
        return [Sequence(prompt, ids, decoded) for prompt, (ids, decoded) in pairs]
    return [Sequence(prompt, [start_token, *ids[:forced]], decoded, source=ids) for prompt, (ids, decoded) in pairs]


def forced_tokens(model: TextModel) -> int:
    """Return the maximum number of source tokens that an encoder-decoder's decoder takes after its first token."""
    return FORCED_TOKENS if model.positions == "relative" else min(FORCED_TOKENS, model.max_positions - 1)


def columns(sequences: list[Sequence], prefilled: list[Scores], cached: list[Scores]) -> Samples:
    """Return flat columns of the values read."""
    samples = {f"answer_{name}": column for name, column in _columns(sequences, prefilled).items()}
    del samples["answer_nll_positions"]  # every position has one
    if cached:
        found = _columns(sequences, cached)
        samples |= {f"cached_{name}": column for name, column in found.items() if not name.startswith(("gap", "top"))}
    return samples


def _columns(sequences: list[Sequence], scores: list[Scores]) -> Samples:
    owners = [each.prompt for each in sequences]
    return {
        "nll": _joined([each.nll for each in scores], np.float64),
        "nll_prompts": np.repeat(owners, [sum(map(len, each.nll)) for each in scores]).astype(np.int32),
        "nll_positions": _joined([each.nll_positions for each in scores], np.int32),
        "logits": _joined([each.logits for each in scores], np.float32),
        "logit_prompts": np.repeat(owners, [len(each.logits) for each in scores]).astype(np.int32),
        "logit_positions": np.array([at for each in scores for at in each.logit_positions], dtype=np.int32),
        "gaps": _joined([each.gaps for each in scores], np.float32),
        "top_tokens": _joined([each.top_tokens for each in scores], np.int32),
        "top_logits": _joined([each.top_logits for each in scores], np.float32),
    }


def _joined(parts: list[list[np.ndarray]], dtype: type[np.generic]) -> np.ndarray:
    arrays = [array.ravel() for each in parts for array in each]
    return np.concatenate(arrays or [np.empty(0)]).astype(dtype)


def write_completions(path: Path, prompts: Prompts, tokens: torch.Tensor, context: Context) -> None:
    """Write one JSON object per prompt for reading: prompt_index, prompt, completion, tokens.

    Without a tokenizer of the model, texts are the numbers of the tokens, and nothing is written of random prompts.
    """
    source = tokenizer_path(context)
    if source is None and None in prompts.texts:
        return
    tokenizer = load_tokenizer(source) if source is not None else None

    def text(ids: list[int]) -> str:
        return " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))

    lines = []
    for place, (ids, answer) in enumerate(zip(prompts.tokens, tokens.tolist(), strict=True)):
        lines.append(
            json.dumps(
                {
                    "prompt_index": prompts.first + place,
                    "prompt": text(ids),
                    "completion": text(answer),
                    "tokens": answer,
                },
                ensure_ascii=False,
            )
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(lines) + "\n")
