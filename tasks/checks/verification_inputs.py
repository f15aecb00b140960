"""What a model is verified with: prompts and, where it has none, a tokenizer. Does not import Prefect.

    tokenizer, prompts = made_inputs(asked, manifest, run, count, new_tokens)

Where nobody gives prompts, they have lengths from a few tokens to a few hundred in mixed order, so that batches are
padded and the cache is used again. A model without a tokenizer gets one that reads numbers: token 17 is written `17`.
"""

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import configs
from configs.common.base import write_atomically
from configs.common.execution import Dtype, Engine, Layout
from configs.common.reading import TEXT_BYTES, read_bytes
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import RunPaths
from configs.plans.plan import PlannedModel
from configs.spec.prompts import read_prompts
from tasks.checks.saved_reference import SavedReference, answer_vocabulary_of

_ONE_RANK = Layout()
_TEXT_CHARACTERS = (8, 60, 800)
_NUMBER_TOKENS = (2, 12, 192)
"""The shortest prompt, the next, and the longest: a batch is fed token by token as far as its shortest prompt goes,
so that one very short prompt is enough."""
_SPECIAL_TOKENS = 8
"""Room in the context for what a tokenizer adds to a text."""
_DEFAULT_POSITIONS = 2048


@dataclass(frozen=True)
class VerificationSpec:
    """What is to be verified. None: as the saved reference says, else the default."""

    model: str
    layout: Layout = _ONE_RANK
    engine: Engine = "rankwise"
    dtype: Dtype = "float32"
    prompts: Path | None = None
    num_prompts: int | None = None
    new_tokens: int | None = None


def made_inputs(
    asked: VerificationSpec, manifest: ModelManifest, run: RunPaths, count: int, new_tokens: int
) -> tuple[str | None, Path]:
    """A tokenizer where the model brings none, and the file of prompts."""
    vocabulary = answer_vocabulary_of(manifest)
    brings_tokenizer = (Path(manifest.folder) / "tokenizer.json").is_file()
    if asked.prompts is not None:
        if not brings_tokenizer:
            raise ValueError(
                f"--prompts: {manifest.identity} has no tokenizer.json. "
                "Leave --prompts out to verify with random tokens"
            )
        return None, asked.prompts
    if vocabulary is None:
        raise ValueError(f"{manifest.identity}: config.json has no vocab_size")
    known = (manifest.config.get(key) for key in ("max_position_embeddings", "n_positions"))
    positions = next((found for found in known if found), _DEFAULT_POSITIONS)
    texts = read_prompts(_shipped_prompts()) if brings_tokenizer else None
    lines = own_prompts(texts, vocabulary, count, int(positions) - new_tokens)
    path = run.inputs / "own.jsonl"
    write_atomically(path, "".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return None if brings_tokenizer else numbers_tokenizer(vocabulary), path


def saved_inputs(
    asked: VerificationSpec, saved: SavedReference, manifest: ModelManifest, run: RunPaths, notes: list[str]
) -> tuple[str | None, Path]:
    """Tokenizer and prompts of a saved reference. Raises ValueError where model or request do not fit it."""
    work, about, file = saved.workload, saved.about, saved.path
    vocabulary = answer_vocabulary_of(manifest)
    if vocabulary != about.vocabulary:
        raise ValueError(
            f"{file}: vocabulary of {about.vocabulary} tokens ({about.model}), expected the model's {vocabulary}"
        )
    if asked.prompts is not None:
        raise ValueError(
            f"--prompts: {file} contains its own prompts. Leave --prompts out, or save a reference with these prompts"
        )
    for option, given, held in (
        ("--num-prompts", asked.num_prompts, work.num_prompts),
        ("--new-tokens", asked.new_tokens, getattr(work, "new_tokens", asked.new_tokens)),
    ):
        if given not in (None, held):
            raise ValueError(
                f"{option} {given}: {file} was saved with {held}. Leave it out, or save the reference again"
            )
    if asked.dtype not in work.noise_dtypes:
        raise ValueError(
            f"--dtype {asked.dtype}: {file} contains the noise of {', '.join(work.noise_dtypes)} only. "
            f"Save it again with --dtype {asked.dtype}"
        )
    own = Path(manifest.folder) / "tokenizer.json"
    theirs = saved.tokenizer if about.own_tokenizer else None
    if theirs is not None and own.is_file() and read_bytes(own, TEXT_BYTES) != theirs:
        notes.append(f"the model's tokenizer.json differs from that of {file.name}; the latter was used")
    path = run.inputs / "own.jsonl"
    write_atomically(path, saved.prompts)
    return saved.tokenizer.decode() if saved.tokenizer is not None else None, path


def _shipped_prompts() -> Path:
    return Path(configs.__file__).parent / "studies" / "prompts.jsonl"


def with_tokenizer(model: PlannedModel, manifest: ModelManifest, folder: Path, tokenizer: str) -> PlannedModel:
    """The model with this tokenizer beside links to its files. It is the same model still."""
    folder.mkdir()
    for source in Path(manifest.folder).iterdir():
        if source.is_file() and source.name != "tokenizer.json":
            os.symlink(source.resolve(), folder / source.name)
    write_atomically(folder / "tokenizer.json", tokenizer)
    path = folder.with_name("manifest.json")
    write_atomically(path, manifest.model_copy(update={"folder": str(folder.resolve())}).model_dump_json())
    return model.model_copy(update={"manifest": str(path.resolve())})


def own_prompts(texts: list[str] | None, vocabulary: int, count: int, room: int) -> list[str]:
    """Prompts of mixed lengths, the same for the same arguments.

    texts: repeated to their lengths, in characters; None: numbers of random tokens. room: tokens that fit.
    """
    shortest, short, longest = _NUMBER_TOKENS if texts is None else _TEXT_CHARACTERS
    longest = min(longest, room if texts is None else room - _SPECIAL_TOKENS)
    if longest < shortest:
        raise ValueError(f"--new-tokens: leaves {room} tokens for prompts, which is too few. Use fewer --new-tokens")
    short = min(short, longest)
    generator = random.Random(0)
    steps = max(1, count - 2)
    lengths = [round(short * (longest / short) ** (step / steps)) for step in range(count - 1)]
    lengths.append(shortest if count > 1 else longest)
    generator.shuffle(lengths)
    if texts is None:
        return [" ".join(str(generator.randrange(vocabulary)) for _ in range(length)) for length in lengths]
    chosen = (texts[position % len(texts)] for position in range(count))
    return [(text * -(-length // len(text)))[:length] for text, length in zip(chosen, lengths, strict=True)]


def numbers_tokenizer(vocabulary: int) -> str:
    """A tokenizer.json that reads token ids written as numbers, with spaces between them."""
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {str(token): token for token in range(vocabulary)},
                "unk_token": "0",
            },
        }
    )
