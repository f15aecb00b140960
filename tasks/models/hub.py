"""Files of a Hugging Face repository at one commit, through the hub's own client.

What a second attempt can mend is a TransientFetchError, everything else a ValueError. The token comes from
HF_TOKEN and goes nowhere but into the requests to HF_ENDPOINT; errors are raised anew, without the client's
own as cause, because those carry the request and with it the token.

Whole files are kept when a download is interrupted; a connection that breaks inside a file is taken up again
near the same byte while the call lasts (huggingface_hub 2.4 writes pieces of 10 MB, and removes the part of a
file when its call ends).
"""

import errno
import hashlib
import os
import re
import ssl
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from configs.common.files.reading import PLAN_BYTES, read_bytes
from configs.common.secrets import excerpt

_API_TIMEOUT_SECONDS = 30.0
_PASSING_STATUS = (408, 425, 429)
_OS_ERROR, _QUERY = re.compile(r"\(os error (\d+)\)"), re.compile(r"\?[^\s)]*")
_OF_THIS_MACHINE = (errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS)
"""Errors of a disk, which trying again does not mend."""
_SOCKS = "Install it (`pip install socksio`), or name a proxy by http://"
_Answer = TypeVar("_Answer")


class TransientFetchError(Exception):
    """The network or the server failed in a way that can pass; trying again is worth while."""


class HubOfflineError(ValueError):
    """HF_HUB_OFFLINE forbids to ask the hub."""


@dataclass(frozen=True)
class RemoteFile:
    """What the hub says of a file; None is unknown. `blob` is git's SHA-1 of a file that is not in LFS."""

    size_bytes: int | None
    sha256: str | None
    blob: str | None


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit."""

    repository: str
    commit: str
    files: dict[str, RemoteFile]


def look_up(repository: str, revision: str) -> Snapshot:
    """Ask which commit a revision is and which files it has: one request."""
    endpoint, token = _endpoint(), _token()

    def ask() -> Snapshot:
        from huggingface_hub import HfApi

        info = HfApi(
            endpoint=endpoint, token=token, library_name="rankwise", library_version=version("rankwise")
        ).model_info(repository, revision=revision, files_metadata=True, timeout=_API_TIMEOUT_SECONDS)
        if info.sha is None:
            raise TypeError("the answer names no commit")
        files = {
            file.rfilename: RemoteFile(
                size_bytes=file.size,
                sha256=file.lfs.sha256 if file.lfs else None,
                blob=None if file.lfs else file.blob_id,
            )
            for file in info.siblings or []
        }
        return Snapshot(repository, info.sha, files)

    return _asking(ask, repository, revision)


def download(snapshot: Snapshot, names: Iterable[str], folder: Path, sha256: Callable[[Path], str]) -> None:
    """Bring the named files into the folder, each checked against the hub's hash; those there are kept.

    sha256: hashes a file.

    One file after the other in the calling thread, so that an interrupt ends it at once.
    """
    endpoint, token = _endpoint(), _token()
    for name in names:

        def bring(name: str = name) -> str:
            from huggingface_hub import hf_hub_download

            return hf_hub_download(
                snapshot.repository,
                name,
                revision=snapshot.commit,
                local_dir=folder,
                endpoint=endpoint,
                token=token,
                library_name="rankwise",
                library_version=version("rankwise"),
            )

        _asking(bring, snapshot.repository, snapshot.commit)
        problem = _difference(folder / name, snapshot.files[name], sha256)
        if problem:
            (folder / name).unlink(missing_ok=True)
            raise TransientFetchError(
                f"{snapshot.repository}@{snapshot.commit}: {name} damaged ({problem}), removed. Try again"
            )


def _difference(path: Path, remote: RemoteFile, sha256: Callable[[Path], str]) -> str | None:
    """How a file differs from what the hub says of it; None where it does not."""
    size = path.stat().st_size
    if remote.size_bytes is not None and size != remote.size_bytes:
        return f"{size} bytes, not {remote.size_bytes}"
    if remote.sha256 is not None and sha256(path) != remote.sha256:
        return "another sha256 than the hub's"
    if remote.blob is not None:
        # A git blob's name: SHA-1 over a header and the content (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects).
        digest = hashlib.sha1(b"blob %d\0" % size + read_bytes(path, PLAN_BYTES), usedforsecurity=False).hexdigest()
        if digest != remote.blob:
            return "another content than the commit's"
    return None


def _endpoint() -> str:
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not endpoint.startswith(("https://", "http://")):
        raise ValueError(f"HF_ENDPOINT: got {endpoint!r}, expected an address such as https://host")
    return endpoint


def _token() -> str | bool:
    """The token, or False: the client then uses none, not even one that it has stored."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        # The HTTP client would print it in its complaint.
        raise ValueError("HF_TOKEN: contains invalid characters. Set it again, or unset it for public models")
    return token or False


def _asking(ask: Callable[[], _Answer], repository: str, revision: str) -> _Answer:
    """Call the client quietly; its failures become ours."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars

    constants.HF_HUB_DISABLE_TELEMETRY = True
    if not are_progress_bars_disabled() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    try:
        return ask()
    except Exception as error:
        problem = _problem(error, repository, revision)
        if problem is None:
            raise
    raise problem


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _problem(error: Exception, repository: str, revision: str) -> Exception | None:
    """What a failure of the client means to the user; None for one that is not the network's nor the user's."""
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    what, endpoint = f"{repository} at {revision}", _endpoint()
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, OfflineModeIsEnabled):
            return HubOfflineError(f"{what}: not in the cache, and HF_HUB_OFFLINE is set. Unset it")
        if isinstance(cause, HFValidationError):
            return ValueError(f"{what}: {cause}")
        if isinstance(cause, HfHubHTTPError):
            return _http_problem(cause.response.status_code, str(cause.response.headers.get("X-Error-Code")), what)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ValueError(f"{what}: the certificate of {endpoint} is not trusted ({cause}). Check the proxy")
        if (unusable := _proxy_problem(cause)) is not None:
            return ValueError(f"{what}: ALL_PROXY or https_proxy{unusable}")
    if type(error) is RuntimeError:
        return _storage_problem(str(error), what)
    # httpx or httpx2, by version of the client: its base class is that of every failure of transport.
    transport = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    for cause in reversed(chain):
        kind = type(cause).__name__
        if isinstance(cause, (transport, ConnectionError, TimeoutError)):
            return TransientFetchError(f"{what}: {endpoint} cannot be reached ({kind}: {cause}). Try again")
    if any(isinstance(cause, FileMetadataError) for cause in chain) or isinstance(
        error, (ValueError, TypeError, KeyError)
    ):
        return ValueError(
            f"{what}: invalid response of {endpoint} ({type(error).__name__}: {error}). "
            "Check HF_ENDPOINT and the proxy settings"
        )
    if isinstance(error, OSError) and error.errno is None:
        return TransientFetchError(f"{what}: incomplete download ({error}). Try again")
    return None


def _proxy_problem(cause: BaseException) -> str | None:
    """What the client cannot use of the proxy that the environment names; None for another error."""
    if isinstance(cause, ImportError) and "SOCKS" in str(cause):
        return f" names a SOCKS proxy, which needs a package. {_SOCKS}"
    if isinstance(cause, ValueError) and "proxy URL" in str(cause):  # its password is masked there
        return f": {cause}. Name a proxy by http:// or socks5://"
    return None


def _storage_problem(said: str, what: str) -> Exception:
    """What a failure of hf_xet means, the client of the hub's Xet storage: it tells causes by words alone."""
    local = _OS_ERROR.search(said)
    if local is not None and int(local[1]) in _OF_THIS_MACHINE:
        return OSError(int(local[1]), os.strerror(int(local[1])))
    # Addresses of the storage are signed: who has one can read the file.
    return TransientFetchError(f"{what}: incomplete download ({excerpt(_QUERY.sub('', said), 300)}). Try again")


def _http_problem(status: int, code: str, what: str) -> Exception:
    endpoint = _endpoint()
    if status >= 500 or status in _PASSING_STATUS:
        return TransientFetchError(f"{what}: {endpoint} returned HTTP {status}. Try again")
    if code == "RevisionNotFound":
        return ValueError(f"{what}: no such revision. Use a branch, a tag or a full 40-digit commit of the repository")
    if code == "GatedRepo":
        advice = f"accept its conditions at {endpoint}/{what.split(' ')[0]} and set HF_TOKEN to a token of that account"
        return ValueError(f"{what}: access is gated (HTTP {status}); {advice}")
    if status in (401, 403, 404):
        advice = "check the name; if it is private, set HF_TOKEN to a token that may read it"
        given = "the HF_TOKEN given" if _token() else "no HF_TOKEN"
        return ValueError(f"{what}: no such repository for {given} (HTTP {status} from {endpoint}); {advice}")
    return ValueError(f"{what}: {endpoint} returned HTTP {status}. Check HF_ENDPOINT and the revision")
