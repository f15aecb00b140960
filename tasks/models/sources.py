"""Resolve models (synthetic, local folder or Hugging Face repository) to manifests.

manifest = resolve_model("synthetic:llama-4m@0", None, cache=Path("cache"), base=Path("."))
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from configs.common.base import content_hash, expanded, write_atomically
from configs.common.files.reading import brief
from configs.common.printable import printable
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from configs.spec.study import suggestion
from tasks.models.conversion import TOKENIZER
from tasks.models.folder import CONFIG, ModelContentError, check_folder, content_faults, read_config, similar_folder
from tasks.models.hub import TransientFetchError
from tasks.models.model_cache import (
    bring_repository,
    file_hashes,
    hashed_files,
    linked_with_tokenizer,
    manifest_path,
    repository_config,
    save_manifest,
)

__all__ = [
    "ModelContentError",
    "TransientFetchError",
    "described_config",
    "full_name",
    "hub_repository",
    "resolve_model",
]

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")
_FORMS = (
    "expected `synthetic:<architecture>@<seed>`, a folder, `owner/name`, or a name of `rankwise plan --list-models`"
)
_MAX_SEED_DIGITS = 18
_LONG_TO_READ_BYTES = 8 << 30  # some 10 s from a fast disk, minutes over a network
_log = logging.getLogger(__name__)


def resolve_model(identifier: str, revision: str | None, cache: Path, base: Path) -> ModelManifest:
    """Find a model, bring its files into the cache and say what they are.

    base: folder of the study file; folders are relative to it. revision: of a repository; none: its default branch,
    which the identity pins to its commit. Raises ValueError for what the user must
    change (the message says what would work) and TransientFetchError for what may pass by itself.
    """
    cache, base = expanded(cache).absolute(), expanded(base).absolute()
    try:
        (cache / "models").mkdir(parents=True, exist_ok=True)
        name = full_name(identifier, base)
        if name.startswith("synthetic:"):
            _refuse_revision(identifier, revision)
            return _synthetic(name.removeprefix("synthetic:"), cache)
        repository = hub_repository(identifier, revision, base)
        if repository is None:
            _refuse_revision(identifier, revision)
            return _folder(identifier, cache, base)
        return bring_repository(repository, revision, cache)
    except OSError as error:
        failed = Path(str(error.filename or cache))
        ours = failed.is_relative_to(cache) or cache.is_relative_to(failed)
        raise ValueError(
            f"{printable(str(failed), 200)}: {error.strerror or error}; needed for {printable(identifier, 200)}"
            + (". Set RANKWISE_CACHE to a folder with room that you may write to" if ours else "")
        ) from error


def described_config(identifier: str, revision: str | None, cache: Path, base: Path) -> dict[str, Any] | None:
    """Return a model's configuration before its weights are read or fetched, which takes minutes of a large one.

    None where it costs nothing to resolve (synthetic models), or where that will say what is wrong. Raises nothing of
    its own; arguments as of `resolve_model`.
    """
    cache, base = expanded(cache).absolute(), expanded(base).absolute()
    try:
        name = full_name(identifier, base)
        if name.startswith("synthetic:"):
            return None
        repository = hub_repository(identifier, revision, base)
        if repository is None:
            return read_config((base / expanded(identifier)).resolve(), identifier)
        return repository_config(repository, revision, cache)
    except (OSError, ValueError, TransientFetchError):
        return None


def full_name(identifier: str, base: Path) -> str:
    """Return the repository or the synthetic model that a name of the planner's stands for; anything else unchanged.

    A folder of that name takes precedence, as in the planner.
    """
    from engine.planner.catalog import repository_of

    if "/" in identifier or ":" in identifier or (base / identifier).exists():
        return identifier
    if identifier.lower() in ARCHITECTURES:
        return f"synthetic:{identifier.lower()}@0"
    return repository_of(identifier) or identifier


def hub_repository(identifier: str, revision: str | None, base: Path) -> str | None:
    """Return the repository on the hub that an identifier means; None for a folder or a synthetic model.

    `models/tiny` without a revision, beside an existing folder `models`, is a folder that is missing.
    """
    name = full_name(identifier, base)
    if _REPOSITORY.fullmatch(name) is None or (base / name).exists():
        return None
    missing = name == identifier and revision is None and (base / name).parent.is_dir()
    return None if missing else name


def _refuse_revision(identifier: str, revision: str | None) -> None:
    if revision is not None:
        raise ValueError(f"{identifier}: `revision` applies to Hugging Face repositories only. Leave it out")


def _synthetic(name: str, cache: Path) -> ModelManifest:
    architecture, at, seed = name.partition("@")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {brief(architecture)}{suggestion(architecture, list(ARCHITECTURES))}")
    if at and not (seed.isascii() and seed.isdigit() and len(seed) <= _MAX_SEED_DIGITS):
        raise ValueError(
            f"synthetic:{brief(name)[1:-1]}: got seed {brief(seed)}, expected a whole number of at most "
            f"{_MAX_SEED_DIGITS} digits. Use synthetic:{architecture}@0"
        )
    identity = f"synthetic:{architecture}@{int(seed or 0)}"
    folder = manifest_path(identity, cache).parent / "files"
    folder.mkdir(parents=True, exist_ok=True)
    config = ARCHITECTURES[architecture]
    if not (folder / CONFIG).exists():
        write_atomically(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    manifest = ModelManifest(identity=identity, source="synthetic", folder=str(folder), files={}, config=config)
    save_manifest(manifest, cache)
    return manifest


def _folder(identifier: str, cache: Path, base: Path) -> ModelManifest:
    path = base / expanded(identifier)
    if not path.exists():
        hub = "; for a Hugging Face repository of that name set `revision`" if _REPOSITORY.fullmatch(identifier) else ""
        raise ValueError(f"{identifier}: no such folder{similar_folder(identifier, base)}{hub}; {_FORMS}")
    if not path.is_dir():
        raise ValueError(f"{identifier}: got a file, expected the folder with {CONFIG}")
    folder = path.resolve()
    with content_faults():
        config, names = check_folder(folder)
    hashes = file_hashes(cache)
    unread = hashes.unread_bytes(folder / name for name in names)
    if unread > _LONG_TO_READ_BYTES:
        _log.warning("%s: reading all %.0f GiB once, since a folder is known by its content", folder, unread / 2**30)
    files = hashed_files(folder, names, hashes)
    hashes.save()
    identity = "folder:" + content_hash({name: file.sha256 for name, file in files.items()})
    used = linked_with_tokenizer(folder, names, identity, cache)
    if used != folder:  # the tokenizer is made of the files, so that the model is the same
        files |= hashed_files(used, [TOKENIZER], hashes)
        hashes.save()
    manifest = ModelManifest(identity=identity, source="folder", folder=str(used), files=files, config=config)
    save_manifest(manifest, cache)
    return manifest
