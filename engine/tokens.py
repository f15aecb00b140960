"""Prompts as token ids, and each rank's share of them: contiguous blocks over the replicas, whose ranks get the same.

    prompts = prompts_of_rank(workload, context, model.config)

What is trained on is `engine.training.data.examples`'s.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from configs.cell import EncodeWorkload, PromptedWorkload
from configs.prompts import numbered_prompts
from engine.context import Context
from engine.inference.sharding import even_share
from engine.models.config import ModelConfig
from engine.weights import the_manifest

RANDOM_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Prompts:
    """The prompts of a rank's replica: token ids, and the texts they come from (None where they are random).

    `first` is the place of the first one among all replicas' prompts, which are `total`. truncated: so many of this
    replica's are texts longer than the model takes, and were cut.
    """

    first: int
    tokens: list[list[int]]
    texts: list[str | None]
    total: int
    truncated: int = 0


@dataclass(frozen=True)
class Batch:
    """Prompts of one request: tokens [batch, length], filled at the left with `padding` [batch] positions.

    `padding` is None where all prompts have the same length. source: what the encoder reads, where the tokens are
    those of the decoder of an encoder-decoder.
    """

    tokens: torch.Tensor
    padding: torch.Tensor | None
    source: "Batch | None" = None

    def rows(self, chosen: list[int] | slice) -> "Batch":
        """Only these rows, filling and source included."""
        padding = None if self.padding is None else self.padding[chosen]
        return Batch(self.tokens[chosen], padding, self.source and self.source.rows(chosen))

    @property
    def real(self) -> torch.Tensor:
        """True where a position is not filling, [batch, length]."""
        rows, length = self.tokens.shape
        columns = torch.arange(length, device=self.tokens.device)[None].expand(rows, length)
        return columns >= (0 if self.padding is None else self.padding[:, None])


def filled(rows: list[list[int]], device: torch.device) -> Batch:
    """Rows of ids as one batch, the shorter ones filled at the left."""
    longest = max(len(row) for row in rows)
    padding = [longest - len(row) for row in rows]
    tokens = torch.tensor([[0] * fill + row for fill, row in zip(padding, rows, strict=True)], device=device)
    return Batch(tokens, torch.tensor(padding, device=device) if any(padding) else None)


def batches(prompts: list[list[int]], size: int, device: torch.device) -> list[Batch]:
    """Prompts in their order, `size` at a time; the last batch may be smaller."""
    return [filled(prompts[start : start + size], device) for start in range(0, len(prompts), size)]


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer that neither cuts nor fills. Raises ValueError for a file that is none."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: not a tokenizer that can be read ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_path(context: Context, sha256: str | None = None) -> Path | None:
    """The model's own tokenizer.json, else the one named by hash in the inputs, else None."""
    own = Path(the_manifest(context).folder) / "tokenizer.json"
    if own.is_file():
        return own
    return context.inputs / f"{sha256}.json" if sha256 else None


def prompts_of_rank(workload: PromptedWorkload, context: Context, config: ModelConfig) -> Prompts:
    """Tokenise the prompts of this rank's replica; the file is repeated up to `num_prompts`, none: random tokens.

    Special tokens are those that the model's tokenizer adds. A text that is too long for an encoder is cut, as
    sentence-transformers does. Raises ValueError naming the line for a prompt that the model cannot take.
    """
    if workload.prompts is None:
        return _random_prompts(workload, context, config)
    where = context.inputs / f"{workload.prompts}.jsonl"
    lines = numbered_prompts(where, workload.variant, workload.limit)
    path = tokenizer_path(context)
    if path is None:
        raise ValueError(
            f"workload.prompts: {the_manifest(context).identity} brings no tokenizer.json; "
            "leave prompts out to run random tokens"
        )
    tokenizer = load_tokenizer(path)
    if isinstance(workload, EncodeWorkload):
        tokenizer.enable_truncation(longest_text(context, config))
    count = workload.num_prompts or len(lines)
    mine = _my_share(count, context)
    known: dict[int, list[int]] = {}
    cut: set[int] = set()
    for index in mine:
        prompt = lines[index % len(lines)]
        if prompt.line not in known:
            found = tokenizer.encode(prompt.text)
            known[prompt.line] = _checked(found.ids, workload, config, f"workload.prompts: line {prompt.line}")
            cut |= {prompt.line} if found.overflowing else set()
    chosen = [lines[index % len(lines)] for index in mine]
    truncated = sum(prompt.line in cut for prompt in chosen)
    texts: list[str | None] = [prompt.text for prompt in chosen]
    return Prompts(mine.start, [known[prompt.line] for prompt in chosen], texts, count, truncated)


def longest_text(context: Context, config: ModelConfig) -> int:
    """Tokens of the longest text that an encoder takes: its positions, or fewer where sentence-transformers says so."""
    path = Path(the_manifest(context).folder) / "sentence_bert_config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8")).get("max_seq_length") if path.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a JSON object that can be read ({error})") from error
    return config.max_positions if given is None else min(int(given), config.max_positions)


def _my_share(count: int, context: Context) -> range:
    grid = context.grid
    if count < grid.dp:
        raise ValueError(f"workload.num_prompts: {count} leaves some of {grid.dp} replicas without work")
    return even_share(count, grid.dp, grid.dp_rank)


def _random_prompts(workload: PromptedWorkload, context: Context, config: ModelConfig) -> Prompts:
    length, seed = workload.prompt_tokens or RANDOM_PROMPT_TOKENS, context.job.measuring.seed
    count = workload.num_prompts or workload.batch_size * context.grid.dp
    mine = _my_share(count, context)
    tokens = [
        np.random.default_rng([seed, index]).integers(0, config.vocabulary, length, dtype=np.int64).tolist()
        for index in mine
    ]
    for ids in tokens[:1]:
        _checked(ids, workload, config, "workload.prompt_tokens: a random prompt")
    return Prompts(mine.start, tokens, [None] * len(tokens), count)


def _checked(ids: list[int], workload: PromptedWorkload, config: ModelConfig, where: str) -> list[int]:
    """Ids cut or repeated to `prompt_tokens`, fit for the model."""
    if not ids:
        raise ValueError(f"{where} becomes no token at all; write a longer prompt")
    if max(ids) >= config.vocabulary:
        raise ValueError(
            f"{where} becomes token {max(ids)}, but the model has {config.vocabulary}; "
            "use the tokenizer that belongs to the model"
        )
    if workload.prompt_tokens is not None:
        ids = _of_length(ids, workload.prompt_tokens, ends=config.kind != "decoder")
    if config.positions == "relative":
        return ids  # such a model knows no longest text
    new_tokens = int(getattr(workload, "new_tokens", 0))
    limit = config.max_positions
    if len(ids) + new_tokens > limit:
        fits = limit - new_tokens
        remedy = f"set workload.prompt_tokens to at most {fits}" if fits > 0 else f"lower new_tokens below {limit}"
        with_new = f", with {new_tokens} new ones {len(ids) + new_tokens}" if new_tokens else ""
        raise ValueError(
            f"{where} has {len(ids)} tokens{with_new}; the model takes {limit} (max_position_embeddings); {remedy}"
        )
    return ids


def _of_length(ids: list[int], length: int, ends: bool) -> list[int]:
    """Ids cut or repeated; `ends`: the last one stays the last, because it marks the end of a text for an encoder."""
    last = ids[-1:] if ends and length > 1 else []
    body, wanted = ids[: len(ids) - len(last)] or ids, length - len(last)
    return (body * -(-wanted // len(body)))[:wanted] + last
