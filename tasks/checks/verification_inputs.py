"""What a model is verified with: its prompts, and the tokenizer of a saved reference. Does not import Prefect.

    positions = longest_positions(asked, manifest)
    prompts = made_prompts(manifest, run, count, new_tokens, room)

Where nobody gives prompts, `tasks.checks.own_prompts` makes them: texts, or token ids for a model without a tokenizer.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import configs
from configs.common.base import write_atomically
from configs.common.execution import Dtype, Engine, Layout
from configs.common.files.reading import TEXT_BYTES, read_bytes
from configs.inputs.prompts import numbered_prompts, read_prompts
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import RunPaths
from configs.plans.plan import PlannedModel
from tasks.checks.own_prompts import longest_sequence, own_prompts, position_limit
from tasks.models.saved_reference import SavedReference, answer_vocabulary_of

_ONE_RANK = Layout()


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
    batch_size: int | None = None
    positions: int | None = None


def longest_positions(asked: VerificationSpec, manifest: ModelManifest) -> int | None:
    """Tokens of the longest sequence; None: that of the prompts that were given."""
    limit = position_limit(manifest.config, manifest.identity)
    if asked.positions is not None and limit is not None and asked.positions > limit:
        raise ValueError(f"--positions {asked.positions}: {manifest.identity} takes {limit}. Use at most {limit}")
    if asked.positions is not None or asked.prompts is not None:
        return asked.positions
    return longest_sequence(manifest.config, manifest.identity)


def check_readable(prompts: Path, manifest: ModelManifest) -> None:
    """Raise ValueError for prompts that are texts, if the model has no tokenizer."""
    if (Path(manifest.folder) / "tokenizer.json").is_file() or not prompts.is_file():
        return
    if any(prompt.tokens is None for prompt in numbered_prompts(prompts)):
        raise ValueError(
            f"--prompts: {manifest.identity} has no tokenizer.json. "
            "Leave --prompts out to verify with random tokens, or give `tokens` on each line"
        )


def made_prompts(manifest: ModelManifest, run: RunPaths, count: int, new_tokens: int, room: int) -> Path:
    """A file of prompts: texts where the model brings a tokenizer, else token ids. room: tokens that fit."""
    vocabulary = answer_vocabulary_of(manifest)
    if vocabulary is None:
        raise ValueError(f"{manifest.identity}: config.json has no vocab_size")
    brings_tokenizer = (Path(manifest.folder) / "tokenizer.json").is_file()
    texts = read_prompts(_shipped_prompts()) if brings_tokenizer else None
    lines = own_prompts(texts, vocabulary, count, room, new_tokens)
    path = run.inputs / "own.jsonl"
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
    return path


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
        ("--positions", asked.positions, saved.positions),
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
    if saved.tokenizer is not None and own.is_file() and read_bytes(own, TEXT_BYTES) != saved.tokenizer:
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
