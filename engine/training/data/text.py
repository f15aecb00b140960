"""Training text: one long sequence of tokens, cut into contiguous windows.

    ids = text_tokens(workload.data, "data", workload, context, vocabulary)
    training, rest = split_text(ids, workload, needed)

Tokenised once: kept for the launch, and memory-mapped from the job's cache, so that the ranks of a node share it.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from configs.common.base import sha256_of_file
from configs.common.files.reading import SAMPLES_BYTES, check_regular, read_text
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.weights import required_manifest
from engine.prompts.tokenizer import encoded, highest_token, load_tokenizer
from engine.prompts.tokens import tokenizer_path
from engine.training.data.examples import RANDOM_STEPS, Numbers, input_file, read_rows

_CHUNK_CHARACTERS = 1 << 20


def text_tokens(data: str | None, field: str, workload: TrainWorkload, context: Context, vocabulary: int) -> np.ndarray:
    """Return the text of the workload's `field` as one sequence of ids (uint16 or uint32); random ids without data.

    Each row with a `text` is followed by the model's end token, if its configuration names one.
    """
    if data is None:
        count = RANDOM_STEPS * workload.global_batch_size * (workload.sequence_length + 1)
        return np.random.default_rng(context.job.measuring.seed).integers(0, vocabulary, count, dtype=np.uint32)
    tokenizer = the_tokenizer(workload, context)
    source = input_file(data, field, context)
    end = end_token(context) if source.suffix != ".txt" else None
    name = hashlib.sha256(f"{data}:{_hash_of(tokenizer)}:{end}".encode()).hexdigest()[:16]
    kept: dict[str, np.ndarray] = context.kept.setdefault("text_tokens", {})
    if name not in kept:
        kept[name] = _cached(Path(context.job.cache) / "tokens" / f"{name}.npy", data, field, context, tokenizer, end)
    ids = kept[name]
    if ids.size and int(ids.max()) >= vocabulary:
        raise ValueError(
            f"workload.tokenizer: it makes token {int(ids.max())}, but the model has {vocabulary}; "
            "use a tokenizer of the model's vocabulary"
        )
    return ids


def end_token(context: Context) -> int | None:
    """Return the model's end token, the first where its configuration names several; None where it names none."""
    given = required_manifest(context).config.get("eos_token_id")
    first = next(iter(given), None) if isinstance(given, list) else given
    return first if type(first) is int and first >= 0 else None


def the_tokenizer(workload: TrainWorkload, context: Context) -> Path:
    """Return the tokenizer's file. Raises ValueError if neither model nor workload has one."""
    path = tokenizer_path(context, workload.tokenizer)
    if path is None:
        raise ValueError(
            f"workload.tokenizer: {required_manifest(context).identity} brings no tokenizer.json; "
            "name one, or leave data out to train on random tokens"
        )
    return path


def _hash_of(tokenizer: Path) -> str:
    try:
        return sha256_of_file(tokenizer)
    except OSError as error:
        raise ValueError(f"workload.tokenizer: {tokenizer} cannot be read ({error.strerror or error})") from error


def _cached(cached: Path, data: str, field: str, context: Context, tokenizer_file: Path, end: int | None) -> np.ndarray:
    """Return the cached ids; tokenise first if they are missing or incomplete."""
    if cached.is_file():
        try:
            check_regular(cached)
            loaded: np.ndarray = np.load(cached, mmap_mode="r")
            return loaded
        except (ValueError, OSError, EOFError):  # EOFError: no byte, as after a power failure
            cached.unlink(missing_ok=True)  # incomplete; created again
    tokenizer = load_tokenizer(tokenizer_file)
    ids = _tokenised(_texts(data, field, context), tokenizer, end, field)
    cached.parent.mkdir(parents=True, exist_ok=True)
    # A separate name for every rank that writes the file; the last rename wins, and all are equal.
    handle, unfinished = tempfile.mkstemp(dir=cached.parent, prefix=f".{cached.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, ids)
        os.chmod(unfinished, 0o644)  # a cache may be of several users
        os.replace(unfinished, cached)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    mapped: np.ndarray = np.load(cached, mmap_mode="r")
    return mapped


def _texts(data: str, field: str, context: Context) -> Iterator[str]:
    """Yield a long text in pieces of a mebibyte, cut at line ends, to bound memory; or the rows' texts."""
    path = input_file(data, field, context)
    if path.suffix != ".txt":
        yield from (str(row["text"]) for row in read_rows(data, ["text"], field, context))
        return
    try:
        text = read_text(path, SAMPLES_BYTES)
    except OSError as error:
        raise ValueError(f"workload.{field}: {path} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(f"workload.{field}: {error}") from error
    start = 0
    while start < len(text):
        stop = text.find("\n", start + _CHUNK_CHARACTERS) + 1 or len(text)
        yield text[start:stop]
        start = stop


def _tokenised(texts: Iterator[str], tokenizer: Tokenizer, end: int | None, field: str) -> np.ndarray:
    """Return the concatenated ids of all texts, without the tokenizer's special tokens."""
    dtype = np.uint16 if max(highest_token(tokenizer), end or 0) < 1 << 16 else np.uint32
    pieces = []
    for text in texts:
        ids = encoded(tokenizer, text, f"workload.{field}", special=False).ids
        pieces.append(np.array(ids if end is None else [*ids, end], dtype=dtype))
    if not pieces:
        raise ValueError(f"workload.{field}: is empty")
    return np.concatenate(pieces)


def split_text(ids: np.ndarray, workload: TrainWorkload, needed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return training part and validation part (the last share). Raises ValueError if one is below `needed` tokens."""
    heldout = int(len(ids) * workload.heldout_share)
    training, rest = ids[: len(ids) - heldout], ids[len(ids) - heldout :]
    check_long_enough(training, needed, "data")
    if workload.heldout_share > 0 and len(rest) < needed:
        raise ValueError(
            f"workload.heldout_share: {len(rest)} tokens held out are fewer than one sequence of {needed}; "
            "raise the share or use a longer text"
        )
    return training, rest


def check_long_enough(ids: np.ndarray, needed: int, field: str) -> None:
    """Raise ValueError if a text is shorter than one sequence."""
    if len(ids) < needed:
        verb = "train" if field == "data" else "evaluate"
        raise ValueError(
            f"workload.{field}: {len(ids)} tokens to {verb} on are fewer than one sequence of {needed}; "
            "use a longer text or a shorter workload.sequence_length"
        )


def windows(ids: np.ndarray, numbers: Numbers, stride: int, length: int) -> Numbers:
    """Return [len(numbers), length]: window n begins at n x stride."""
    found: Numbers = ids[(numbers * stride)[:, None] + np.arange(length)].astype(np.int64)
    return found
