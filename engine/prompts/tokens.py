"""Prompts as token ids, and each rank's share of them: contiguous blocks over the replicas, whose ranks get the same.

    prompts = prompts_of_rank(workload, context, model.config)

Training data is in `engine.training.data.examples`.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from configs.common.files.reading import brief, read_json_object
from configs.families.numbers import MAX_SIZE
from configs.inputs.prompts import PromptLine, numbered_prompts
from configs.plans.model_manifest import TEXT_RULES
from configs.plans.pooling import TextRules, text_rules
from configs.workloads.encode import EncodeWorkload
from configs.workloads.prompted import RANDOM_PROMPT_TOKENS, PromptedWorkload
from engine.context import Context
from engine.models.sharding import even_share
from engine.models.text_model import TextModel
from engine.models.weights import required_manifest
from engine.prompts.tokenizer import encoded, load_tokenizer
from engine.rank.agreement import raise_on_all_ranks


@dataclass(frozen=True)
class Prompts:
    """The prompts of a rank's replica: token ids, and their texts (None for random tokens).

    `first` is the index of the first one among the `total` prompts of all replicas. truncated: number of this replica's
    texts that exceeded the model's maximum and were cut.
    """

    first: int
    tokens: list[list[int]]
    texts: list[str | None]
    total: int
    truncated: int = 0


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one request: tokens [batch, length], padded at the left with `padding` [batch] positions.

    `padding` is None if all prompts have the same length. source: the encoder's input, if the tokens are those of an
    encoder-decoder's decoder.
    """

    tokens: torch.Tensor
    padding: torch.Tensor | None
    source: "PromptBatch | None" = None

    def rows(self, chosen: list[int] | slice) -> "PromptBatch":
        """Return only these rows, padding and source included."""
        padding = None if self.padding is None else self.padding[chosen]
        return PromptBatch(self.tokens[chosen], padding, self.source and self.source.rows(chosen))

    @property
    def real(self) -> torch.Tensor:
        """True at positions without padding, [batch, length]."""
        rows, length = self.tokens.shape
        columns = torch.arange(length, device=self.tokens.device)[None].expand(rows, length)
        return columns >= (0 if self.padding is None else self.padding[:, None])


def padded_batch(rows: list[list[int]], device: torch.device) -> PromptBatch:
    """Return rows of ids as one batch, padded at the left."""
    longest = max(len(row) for row in rows)
    padding = [longest - len(row) for row in rows]
    tokens = torch.tensor([[0] * fill + row for fill, row in zip(padding, rows, strict=True)], device=device)
    return PromptBatch(tokens, torch.tensor(padding, device=device) if any(padding) else None)


def batches(prompts: list[list[int]], size: int, device: torch.device) -> list[PromptBatch]:
    """Return the prompts in order, `size` at a time; the last batch may be smaller."""
    return [padded_batch(prompts[start : start + size], device) for start in range(0, len(prompts), size)]


def batches_of_tokens(prompts: list[list[int]], tokens: int, device: torch.device) -> list[PromptBatch]:
    """Return the prompts in order, as many at a time as have at most so many tokens with their padding."""
    found: list[list[list[int]]] = []
    for ids in prompts:
        longest = max((len(row) for row in found[-1]), default=0) if found else 0
        if found and max(longest, len(ids)) * (len(found[-1]) + 1) <= tokens:
            found[-1].append(ids)
        else:
            found.append([ids])
    return [padded_batch(rows, device) for rows in found]


def tokenizer_path(context: Context, sha256: str | None = None) -> Path | None:
    """Return the model's tokenizer.json, else the one named by hash in the inputs, else None."""
    own = Path(required_manifest(context).folder) / "tokenizer.json"
    if own.is_file():
        return own
    return context.inputs / f"{sha256}.json" if sha256 else None


@dataclass(frozen=True)
class Requests:
    """Prompts of this rank's replica and the batches that one pass makes of them. `seconds`: what that took."""

    prompts: Prompts
    batches: list["PromptBatch"]
    seconds: float

    @property
    def max_rows(self) -> int:
        """Sequences of the largest batch."""
        return max(batch.tokens.shape[0] for batch in self.batches)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt, filling included."""
        return max(batch.tokens.shape[1] for batch in self.batches)


def requests_of_rank(workload: PromptedWorkload, context: Context, config: TextModel) -> Requests:
    """Tokenise and batch the prompts of this rank's replica. All ranks call it together.

    Raises ValueError, on all ranks, for a prompt that the model cannot take.
    """
    began = time.perf_counter()
    prompts = raise_on_all_ranks(lambda: prompts_of_rank(workload, context, config), context)
    made = batches(prompts.tokens, workload.batch_size, context.device)
    return Requests(prompts, made, time.perf_counter() - began)


def prompts_of_rank(workload: PromptedWorkload, context: Context, config: TextModel) -> Prompts:
    """Tokenise the prompts of this rank's replica; the file is repeated up to `num_prompts`; without a file: random
    tokens.

    The model's tokenizer adds special tokens. A text too long for an encoder is cut, as in sentence-transformers.
    Raises ValueError naming the line of an unusable prompt.
    """
    if workload.prompts is None:
        return _random_prompts(workload, context, config)
    file = context.inputs / f"{workload.prompts}.jsonl"
    lines = numbered_prompts(file, workload.variant, workload.limit)
    count = workload.num_prompts or len(lines)
    mine = _my_share(count, context)
    chosen = [lines[index % len(lines)] for index in mine]
    if workload.answers and mine.stop == count < len(lines):
        chosen[-1] = max(lines, key=_extent)  # answers are compared at every length that the file has
    tokenizer = None if all(prompt.tokens for prompt in chosen) else _tokenizer(workload, context, config)
    rules = _text_rules(workload, context)
    known: dict[int, list[int]] = {}
    cut: set[int] = set()
    for prompt in chosen:
        if prompt.line not in known:
            where = f"workload.prompts: line {prompt.line}"
            ids, known_cut = _ids(prompt, tokenizer, rules, where)
            known[prompt.line] = _checked(ids, workload, config, where)
            cut |= {prompt.line} if known_cut else set()
    truncated = sum(prompt.line in cut for prompt in chosen)
    tokens = [known[prompt.line] for prompt in chosen]
    if mine.stop == count:
        tokens[-1] = _last(tokens[-1], workload, config)
    return Prompts(mine.start, tokens, [prompt.text for prompt in chosen], count, truncated)


def _extent(prompt: PromptLine) -> int:
    """Return a length by which prompts of one file compare: characters, or tokens."""
    return len(prompt.text) if prompt.tokens is None else len(prompt.tokens)


def _tokenizer(workload: PromptedWorkload, context: Context, config: TextModel) -> Tokenizer:
    path = tokenizer_path(context)
    if path is None:
        raise ValueError(
            f"workload.prompts: {required_manifest(context).identity} brings no tokenizer.json; "
            "leave prompts out to run random tokens, or give `tokens` instead of `prompt` on each line"
        )
    tokenizer = load_tokenizer(path)
    if isinstance(workload, EncodeWorkload):
        longest = longest_text(context, config)
        if longest is not None:
            tokenizer.enable_truncation(longest)
    return tokenizer


def _text_rules(workload: PromptedWorkload, context: Context) -> TextRules:
    """Return what is done to texts before they are tokenised: nothing but for an encoder's."""
    manifest = required_manifest(context)
    if not isinstance(workload, EncodeWorkload) or not manifest.folder:
        return TextRules()
    return text_rules(Path(manifest.folder))


def _ids(prompt: PromptLine, tokenizer: Tokenizer | None, rules: TextRules, where: str) -> tuple[list[int], bool]:
    """Return the token ids of a prompt, and whether it was cut."""
    if prompt.tokens is not None:
        return list(prompt.tokens), False
    assert tokenizer is not None
    found = encoded(tokenizer, rules.applied(prompt.text), where)
    return found.ids, bool(found.overflowing)


def _last(ids: list[int], workload: PromptedWorkload, config: TextModel) -> list[int]:
    """Return the ids of the last of all prompts, which may have a length of its own."""
    if workload.longest_tokens is None:
        return ids
    work = workload.model_copy(update={"prompt_tokens": workload.longest_tokens})
    return _checked(ids, work, config, "workload.prompts: the longest prompt")


def longest_text(context: Context, config: TextModel) -> int | None:
    """Return the maximum text length of an encoder in tokens: its positions, or the limit of sentence-transformers.

    None: there is no limit.
    """
    folder = Path(required_manifest(context).folder)
    path = folder / TEXT_RULES
    given = _object(path).get("max_seq_length")
    if given is not None and (type(given) is not int or given < 1):
        raise ValueError(f"{path}: max_seq_length: got {brief(given)}, expected a whole number of tokens")
    if given is None:  # since its version 6 it writes its limit where that of the tokenizer is
        told = _object(folder / "tokenizer_config.json").get("model_max_length")
        given = told if type(told) is int and 0 < told < MAX_SIZE else None  # 10^30: none
    limits = [given, None if config.positions == "relative" else config.max_positions]
    return min((limit for limit in limits if limit is not None), default=None)


def _object(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file of the model; of one that is not there, none."""
    try:
        return read_json_object(path, bounded=False) if path.is_file() else {}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error


def _my_share(count: int, context: Context) -> range:
    grid = context.grid
    if count < grid.dp:
        raise ValueError(f"workload.num_prompts: {count} leaves some of {grid.dp} replicas without work")
    return even_share(count, grid.dp, grid.dp_rank)


def _random_prompts(workload: PromptedWorkload, context: Context, config: TextModel) -> Prompts:
    length, seed = workload.prompt_tokens or RANDOM_PROMPT_TOKENS, context.job.measuring.seed
    count = workload.num_prompts or workload.batch_size * context.grid.dp
    mine = _my_share(count, context)
    tokens = [
        np.random.default_rng([seed, index]).integers(0, config.vocabulary, length, dtype=np.int64).tolist()
        for index in mine
    ]
    for ids in tokens[:1]:
        _checked(ids, workload, config, "workload.prompt_tokens: a random prompt")
    if mine.stop == count:
        tokens[-1] = _last(tokens[-1], workload, config)
    return Prompts(mine.start, tokens, [None] * len(tokens), count)


def _checked(ids: list[int], workload: PromptedWorkload, config: TextModel, where: str) -> list[int]:
    """Return ids cut or repeated to `prompt_tokens`, and validated for the model."""
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
        return ids  # such a model has no maximum length
    limit, new_tokens = config.max_positions, workload.decoded_tokens
    if config.kind == "encoder_decoder":  # decodes in a stack of its own
        if new_tokens > limit:
            raise ValueError(
                f"workload.new_tokens: got {new_tokens}; the model takes {limit} (max_position_embeddings); "
                f"set new_tokens to at most {limit}"
            )
        limit, new_tokens = config.max_source_positions, 0
    if len(ids) + new_tokens > limit:
        fits = limit - new_tokens
        remedy = f"set workload.prompt_tokens to at most {fits}" if fits > 0 else f"lower new_tokens below {limit}"
        with_new = f", with {new_tokens} new ones {len(ids) + new_tokens}" if new_tokens else ""
        raise ValueError(
            f"{where} has {len(ids)} tokens{with_new}; the model takes {limit} (max_position_embeddings); {remedy}"
        )
    return ids


def _of_length(ids: list[int], length: int, ends: bool) -> list[int]:
    """Return ids cut or repeated; `ends`: the last one stays last, because it ends an encoder's text."""
    last = ids[-1:] if ends and length > 1 else []
    body, wanted = ids[: len(ids) - len(last)] or ids, length - len(last)
    return (body * -(-wanted // len(body)))[:wanted] + last
