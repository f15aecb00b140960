"""Resolve models (synthetic, local folder or Hugging Face repository) to manifests.

    manifest = resolve_model("synthetic:llama-4m@0", None, cache=Path("cache"), base=Path("."))

A manifest lies in `<cache>/models/<16 digits of SHA-256 of the identity>/manifest.json`. It is written last:
where it is, the model is whole, and nothing is asked of the network. A file that was damaged since is fetched
again. Files of a repository lie in `files/` beside it, since a repository may hold a manifest.json of its own.
"""

import fcntl
import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeGuard

from configs.common.base import SCHEMA_VERSION, content_hash, expanded, write_atomically
from configs.common.files.reading import PLAN_BYTES, brief, read_json, read_model, read_text
from configs.common.printable import printable
from configs.common.system.lock_files import locks_needed
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import POOLING, WEIGHT_INDEX, ModelFile, ModelManifest
from configs.spec.study import suggestion
from tasks.models.conversion import add_fast_tokenizer, run_converter
from tasks.models.folder import (
    CONFIG,
    FileHashes,
    ModelContentError,
    check_folder,
    described_by,
    pickled_in,
    read_config,
    read_index,
    require_safetensors,
    similar_folder,
    weights_in,
)
from tasks.models.hub import HubOfflineError, Snapshot, TransientFetchError, download, look_up

__all__ = [
    "ModelContentError",
    "TransientFetchError",
    "hub_repository",
    "load_manifest",
    "manifest_path",
    "resolve_model",
    "save_manifest",
    "verify_manifest",
]

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORMS = (
    "expected `synthetic:<architecture>@<seed>`, a folder, `owner/name`, or a name of `rankwise plan --list-models`"
)
DEFAULT_REVISION = "main"
"""The hub's default branch, for a repository without a revision."""
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
        return _repository(repository, revision, cache)
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
        snapshot = look_up(repository, revision or DEFAULT_REVISION)
        identity = f"{snapshot.repository}@{snapshot.commit}"
        place = manifest_path(identity, cache).parent
        folder = place / "files"
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(place / "lock", identity):
            download(snapshot, [CONFIG], folder, _hashes(cache).sha256)
        return read_config(folder, identity)
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


def manifest_path(identity: str, cache: Path) -> Path:
    """Where the manifest of a resolved model lies."""
    return expanded(cache).absolute() / "models" / hashlib.sha256(identity.encode()).hexdigest()[:16] / "manifest.json"


def save_manifest(manifest: ModelManifest, cache: Path) -> Path:
    """Write the manifest, whole or not at all; returns where."""
    path = manifest_path(manifest.identity, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = manifest.model_dump_json(indent=1) + "\n"
    if not path.exists() or read_text(path) != text:
        write_atomically(path, text)
    return path


def load_manifest(path: Path) -> ModelManifest:
    """Read a manifest. Raises OSError, and ValueError naming the file where it is damaged or newer than we are."""
    try:
        manifest = read_model(path, ModelManifest, PLAN_BYTES)
    except ValueError as error:
        raise ValueError(f"{path}: not a manifest. Delete it to fetch the model again") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: got schema version {manifest.schema_version}, expected {SCHEMA_VERSION}. "
            "Delete it to fetch the model again"
        )
    return manifest


def verify_manifest(manifest: ModelManifest, sha256: Callable[[Path], str] | None = None) -> dict[str, str]:
    """Which files are no longer what the manifest says: name -> what is wrong. Empty: all is well.

    Sizes always; content too where a function that hashes a file is given.
    """
    problems = {}
    for name, file in manifest.files.items():
        path = Path(manifest.folder) / name
        if not path.is_file():
            problems[name] = "missing"
        elif path.stat().st_size != file.size_bytes:
            problems[name] = f"{path.stat().st_size} bytes, not {file.size_bytes}"
        elif sha256 is not None and sha256(path) != file.sha256:
            problems[name] = "content changed"
    return problems


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
    with _content():
        config, names = check_folder(folder)
    hashes = _hashes(cache)
    unread = hashes.unread_bytes(folder / name for name in names)
    if unread > _LONG_TO_READ_BYTES:
        _log.warning("%s: reading all %.0f GiB once, since a folder is known by its content", folder, unread / 2**30)
    files = _files(folder, names, hashes)
    hashes.save()
    identity = "folder:" + content_hash({name: file.sha256 for name, file in files.items()})
    manifest = ModelManifest(identity=identity, source="folder", folder=str(folder), files=files, config=config)
    save_manifest(manifest, cache)
    return manifest


def _repository(repository: str, revision: str | None, cache: Path) -> ModelManifest:
    revision = revision or DEFAULT_REVISION
    if _COMMIT.fullmatch(revision):
        manifest = _cached(f"{repository}@{revision}", cache)
        if manifest is not None:
            return manifest
    remembered = _Revisions(cache / "models" / "revisions.json")
    try:
        snapshot = look_up(repository, revision)
    except (HubOfflineError, TransientFetchError) as error:
        commit = remembered.get(repository, revision)
        manifest = _cached(f"{repository}@{commit}", cache) if commit else None
        if manifest is None:
            raise
        if isinstance(error, HubOfflineError):
            _log.warning("%s: %s was %s when last asked; HF_HUB_OFFLINE is set", repository, revision, commit)
            return manifest
        # Not used silently: the branch may have moved on since.
        raise TransientFetchError(f"{error}; or set `revision: {commit}`, which is in the cache") from error
    remembered.put(repository, revision, snapshot.commit)
    return _fetched(snapshot, cache)


def _fetched(snapshot: Snapshot, cache: Path) -> ModelManifest:
    """The repository's manifest; what of its files is not in the cache is brought there first."""
    identity = f"{snapshot.repository}@{snapshot.commit}"
    place = manifest_path(identity, cache).parent
    folder = place / "files"
    # Without the lock: a cache that is whole may be read-only.
    manifest = _cached(identity, cache)
    if _is_whole(manifest, snapshot):
        return manifest
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(place / "lock", identity):
        manifest = _cached(identity, cache)
        if _is_whole(manifest, snapshot):
            return manifest
        # The client names parts anew each time, so those of a killed process serve no one.
        for part in place.glob("*/.cache/huggingface/download/*.incomplete"):
            part.unlink()
        hashes = _hashes(cache)
        if pickled := pickled_in(snapshot.files):
            _convert(snapshot, pickled, place, hashes)
        else:
            _bring(snapshot, folder, hashes)
        _add_tokenizer(folder, identity)
        with _content():
            config, names = check_folder(folder, identity)
        files = _files(folder, names, hashes)
        hashes.save()
        manifest = ModelManifest(identity=identity, source="hub", folder=str(folder), files=files, config=config)
        save_manifest(manifest, cache)
        return manifest


def _is_whole(manifest: ModelManifest | None, snapshot: Snapshot) -> TypeGuard[ModelManifest]:
    """Whether a cached model has all its files: earlier versions did not fetch how an encoder pools."""
    return manifest is not None and (POOLING in manifest.files or POOLING not in snapshot.files)


@contextmanager
def _content() -> Iterator[None]:
    """Mark errors as faults of the model's files."""
    try:
        yield
    except ValueError as error:
        raise ModelContentError(str(error)) from error


def _bring(snapshot: Snapshot, folder: Path, hashes: FileHashes, pickled: list[str] | None = None) -> None:
    """Bring configuration, tokenizer and weights into a folder. pickled: weights to bring instead of safetensors."""
    identity = f"{snapshot.repository}@{snapshot.commit}"
    described = described_by(snapshot.files)
    with _content():
        if CONFIG not in described:
            raise ValueError(f"{identity}: no {CONFIG}. A model repository contains {CONFIG} and *.safetensors")
        if pickled is None:
            require_safetensors(snapshot.files, identity, "FOLDER (a download of it)")
    download(snapshot, described, folder, hashes.sha256)
    with _content():
        read_config(folder, identity)
        index = read_index(folder) if WEIGHT_INDEX in described else None
        weights = pickled or weights_in(snapshot.files, index, identity)
    # Converted weights take as much again.
    _check_room(snapshot, weights * 2 if pickled else weights, folder)
    download(snapshot, weights, folder, hashes.sha256)


def _convert(snapshot: Snapshot, pickled: list[str], place: Path, hashes: FileHashes) -> None:
    """Bring pickled weights and convert them, in a separate process; the pickles are removed afterwards."""
    original, folder, identity = place / "original", place / "files", f"{snapshot.repository}@{snapshot.commit}"
    original.mkdir(exist_ok=True)
    _bring(snapshot, original, hashes, pickled)
    shutil.rmtree(folder)  # of a conversion that was interrupted
    try:
        run_converter(original, folder)
    except ValueError as error:
        raise ModelContentError(f"{identity}: not converted to safetensors: {error}") from error
    for name in described_by(snapshot.files):
        if not (folder / name).exists() and not name.endswith(".bin.index.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.move(original / name, folder / name)  # such as sentence_bert_config.json
    _log.warning("%s: pickled weights (%s) converted to safetensors", identity, ", ".join(pickled))
    shutil.rmtree(original)


def _add_tokenizer(folder: Path, identity: str) -> None:
    """Make a fast tokenizer of a sentencepiece model; a model that has none can still be run on random tokens."""
    try:
        made = add_fast_tokenizer(folder)
    except ValueError as error:
        _log.warning("%s: no fast tokenizer: %s", identity, error)
        return
    if made:
        _log.warning("%s: tokenizer.json made of its sentencepiece model, and checked against it", identity)


def _cached(identity: str, cache: Path) -> ModelManifest | None:
    """The manifest of a repository whose files are still what they were; damaged ones are removed."""
    path = manifest_path(identity, cache)
    try:
        manifest = load_manifest(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        _log.warning("%s", error)
        path.unlink(missing_ok=True)
        return None
    # A cache may have been copied to another place.
    manifest = manifest.model_copy(update={"folder": str(path.parent / "files")})
    hashes = _hashes(cache)
    problems = verify_manifest(manifest, hashes.sha256)
    if problems:
        _log.warning("%s: damaged in the cache, fetched again: %s", identity, problems)
        path.unlink(missing_ok=True)
        for name in problems:
            (Path(manifest.folder) / name).unlink(missing_ok=True)
        return None
    hashes.save()
    save_manifest(manifest, cache)
    return manifest


def _hashes(cache: Path) -> FileHashes:
    return FileHashes(cache / "models" / "hashes.json")


def _files(folder: Path, names: list[str], hashes: FileHashes) -> dict[str, ModelFile]:
    return {
        name: ModelFile(sha256=hashes.sha256(folder / name), size_bytes=(folder / name).stat().st_size)
        for name in names
    }


def _check_room(snapshot: Snapshot, names: list[str], folder: Path) -> None:
    missing = [snapshot.files[name].size_bytes or 0 for name in names if not (folder / name).exists()]
    free = shutil.disk_usage(folder).free
    if sum(missing) > free:
        raise ValueError(
            f"{snapshot.repository}: {sum(missing) / 2**30:.1f} GiB still to fetch, {free / 2**30:.1f} GiB free under "
            f"{folder}. Free disk space, or use another cache"
        )


class _Revisions:
    """Which commit a branch or tag was when last asked."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _read(self) -> dict[str, str]:
        try:
            known = read_json(self._path)
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def get(self, repository: str, revision: str) -> str | None:
        return self._read().get(f"{repository}@{revision}")

    def put(self, repository: str, revision: str, commit: str) -> None:
        if revision != commit and self.get(repository, revision) != commit:
            known = {**self._read(), f"{repository}@{revision}": commit}
            with suppress(OSError):  # it is for when the hub is away; a cache that is whole may be read-only
                write_atomically(self._path, json.dumps(known, indent=1, sort_keys=True))


@contextmanager
def _locked(path: Path, identity: str) -> Iterator[None]:
    """One process fetches a model at a time; the system frees the lock of one that dies.

    Raises ValueError where the file system has no locks.
    """
    with path.open("a") as file:
        waiting = False
        while True:
            try:
                with locks_needed(path.parent, "set RANKWISE_CACHE to a folder of another one"):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    _log.warning("%s: another process fetches it, waiting", identity)
                    waiting = True
                time.sleep(0.2)
        yield
