"""The cache of models: their manifests, and the files of Hugging Face repositories, brought there once.

    manifest = bring_repository("owner/name", None, cache)
    problems = verify_manifest(load_manifest(manifest_path(manifest.identity, cache)))

A manifest lies in `<cache>/models/<16 digits of SHA-256 of the identity>/manifest.json`. It is written last:
where it is, the model is whole, and nothing is asked of the network. A file that was damaged since is fetched
again. Files of a repository lie in `files/` beside it, since a repository may hold a manifest.json of its own.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

from configs.common.base import SCHEMA_VERSION, expanded, write_atomically
from configs.common.files.reading import PLAN_BYTES, read_json, read_model, read_text
from configs.common.system.lock_files import locks_needed, turn_to_change
from configs.plans.model_manifest import POOLING, WEIGHT_INDEX, ModelFile, ModelManifest
from tasks.models.conversion import TOKENIZER, add_fast_tokenizer, is_convertible, run_converter
from tasks.models.folder import (
    CONFIG,
    FileHashes,
    ModelContentError,
    check_folder,
    content_faults,
    described_by,
    pickled_in,
    read_config,
    read_index,
    refuse_adapter,
    require_safetensors,
    weights_in,
)
from tasks.models.hub import HubOfflineError, Snapshot, TransientFetchError, download, look_up

DEFAULT_REVISION = "main"
"""The hub's default branch, for a repository without a revision."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_log = logging.getLogger(__name__)


def manifest_path(identity: str, cache: Path) -> Path:
    """Where the manifest of a resolved model lies."""
    return expanded(cache).absolute() / "models" / hashlib.sha256(identity.encode()).hexdigest()[:16] / "manifest.json"


def manifest_file(manifest: ModelManifest, cache: Path) -> Path:
    """Where `save_manifest` puts a manifest for who reads the files that it names.

    One of a user's folder has a name of its own there: another copy of the same content is the same model.
    """
    path = manifest_path(manifest.identity, cache)
    if manifest.source != "folder":
        return path
    return path.with_name(f"manifest-{hashlib.sha256(os.fsencode(manifest.folder)).hexdigest()[:8]}.json")


def save_manifest(manifest: ModelManifest, cache: Path) -> Path:
    """Write the manifest, whole or not at all; returns where."""
    text = manifest.model_dump_json(indent=1) + "\n"
    place = manifest_file(manifest, cache)
    for path in dict.fromkeys((manifest_path(manifest.identity, cache), place)):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or read_text(path) != text:
            write_atomically(path, text)
    return place


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


def bring_repository(repository: str, revision: str | None, cache: Path) -> ModelManifest:
    """Return the manifest of a repository of the hub, after bringing its files into the cache.

    revision: none: its default branch. Raises ValueError, ModelContentError and TransientFetchError.
    """
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
            if commit and manifest_path(f"{repository}@{commit}", cache).exists():
                _log.warning("%s@%s: damaged in the cache, and cannot be fetched again now", repository, commit)
            raise
        if isinstance(error, HubOfflineError):
            _log.warning("%s: %s was %s when last asked; HF_HUB_OFFLINE is set", repository, revision, commit)
            return manifest
        # Not used silently: the branch may have moved on since.
        raise TransientFetchError(f"{error}; or set `revision: {commit}`, which is in the cache") from error
    remembered.put(repository, revision, snapshot.commit)
    return _fetched(snapshot, cache)


def repository_config(repository: str, revision: str | None, cache: Path) -> dict[str, Any]:
    """Return the configuration of a repository, of which nothing else is fetched. Raises as `bring_repository`."""
    revision = revision or DEFAULT_REVISION
    known = _cached(f"{repository}@{revision}", cache) if _COMMIT.fullmatch(revision) else None
    if known is not None:
        return known.config
    snapshot = look_up(repository, revision)
    identity = f"{snapshot.repository}@{snapshot.commit}"
    place = manifest_path(identity, cache).parent
    folder = place / "files"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(place / "lock", identity):
        download(snapshot, [CONFIG], folder, file_hashes(cache).sha256)
    return read_config(folder, identity)


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
        manifest = _cached(identity, cache, remove=True)
        if _is_whole(manifest, snapshot):
            return manifest
        # The client names parts anew each time, so those of a killed process serve no one.
        for part in place.glob("*/.cache/huggingface/download/*.incomplete"):
            part.unlink()
        hashes = file_hashes(cache)
        if pickled := pickled_in(snapshot.files):
            _convert(snapshot, pickled, place, hashes)
        else:
            _bring(snapshot, folder, hashes)
        add_tokenizer(folder, identity)
        with content_faults():
            config, names = check_folder(folder, identity)
        files = hashed_files(folder, names, hashes)
        hashes.save()
        manifest = ModelManifest(identity=identity, source="hub", folder=str(folder), files=files, config=config)
        save_manifest(manifest, cache)
        return manifest


def _is_whole(manifest: ModelManifest | None, snapshot: Snapshot) -> TypeGuard[ModelManifest]:
    """Whether a cached model has all its files: earlier versions did not fetch how an encoder pools."""
    return manifest is not None and (POOLING in manifest.files or POOLING not in snapshot.files)


def _bring(snapshot: Snapshot, folder: Path, hashes: FileHashes, pickled: list[str] | None = None) -> None:
    """Bring configuration, tokenizer and weights into a folder. pickled: weights to bring instead of safetensors."""
    identity = f"{snapshot.repository}@{snapshot.commit}"
    described = described_by(snapshot.files)
    with content_faults():
        if CONFIG not in described:
            refuse_adapter(snapshot.files, identity)
            raise ValueError(f"{identity}: no {CONFIG}. A model repository contains {CONFIG} and *.safetensors")
        if pickled is None:
            require_safetensors(snapshot.files, identity, "FOLDER (a download of it)")
    download(snapshot, described, folder, hashes.sha256)
    with content_faults():
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


def add_tokenizer(folder: Path, identity: str) -> bool:
    """Make a fast tokenizer of a sentencepiece model; a model that has none can still be run on random tokens.

    Returns whether one was made.
    """
    try:
        made = add_fast_tokenizer(folder)
    except ValueError as error:
        _log.warning("%s: no fast tokenizer: %s", identity, error)
        return False
    if made:
        _log.warning("%s: tokenizer.json made of its sentencepiece model, and checked against it", identity)
    return bool(made)


def linked_with_tokenizer(folder: Path, names: Iterable[str], identity: str, cache: Path) -> Path:
    """Return a folder of the cache with links to a user's files and the tokenizer.json made of its sentencepiece model.

    The user's folder, which may be read-only, stays as it is, and is returned where there is nothing to make. identity:
    of the files, by content and name.
    """
    if not is_convertible(folder):
        return folder
    key = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    place = manifest_path(identity, cache).with_name(f"files-{key}")
    if (place / TOKENIZER).is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as made:
        for name in names:
            link = Path(made, "files", name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder / name)
        if not add_tokenizer(Path(made, "files"), str(folder)):
            return folder
        with suppress(OSError):  # another process was faster
            Path(made, "files").rename(place)
    return place


def _cached(identity: str, cache: Path, remove: bool = False) -> ModelManifest | None:
    """The manifest of a repository whose files are still what they were.

    remove: damaged ones go, which is for who holds the model's lock: another may just have fetched them again.
    """
    path = manifest_path(identity, cache)
    try:
        manifest = load_manifest(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        if remove:
            _log.warning("%s", error)
            path.unlink(missing_ok=True)
        return None
    # A cache may have been copied to another place.
    manifest = manifest.model_copy(update={"folder": str(path.parent / "files")})
    hashes = file_hashes(cache)
    problems = verify_manifest(manifest, hashes.sha256)
    hashes.save()
    if problems:
        if remove:
            _log.warning("%s: damaged in the cache, fetched again: %s", identity, problems)
            path.unlink(missing_ok=True)
            for name in problems:
                (Path(manifest.folder) / name).unlink(missing_ok=True)
        return None
    save_manifest(manifest, cache)
    return manifest


def file_hashes(cache: Path) -> FileHashes:
    """Return the hashes of files that a cache remembers."""
    return FileHashes(cache / "models" / "hashes.json")


def hashed_files(folder: Path, names: list[str], hashes: FileHashes) -> dict[str, ModelFile]:
    """Return sizes and hashes of files, as a manifest has them."""
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
        if revision == commit or self.get(repository, revision) == commit:
            return
        # It is for when the hub is away; a cache that is whole may be read-only.
        with suppress(OSError), turn_to_change(self._path):
            known = {**self._read(), f"{repository}@{revision}": commit}
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
