"""Where compiled kernels are kept: on a disk from which code can be loaded. And that an older gcc compiles them."""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.kernels import attention, build
from engine.parallel import shared_memory

ROOT = Path(__file__).parents[3]
PROGRAM = """
from engine.kernels import build
from engine.kernels.linear import why_no_cpu_kernels
print(why_no_cpu_kernels() or build._cache_folder())
"""
ISOLATED = ["unshare", "--mount", "--propagation", "private"]


def loaded(script: str, *folders: Path) -> str:
    """Where the kernels lie, or why there are none, of a process that the script starts in mounts of its own."""
    done = subprocess.run(
        [*ISOLATED, "sh", "-ec", script, "sh", sys.executable, PROGRAM, *map(str, folders)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANKWISE_KERNELS": "on"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(
    subprocess.run([*ISOLATED, "true"], capture_output=True).returncode != 0, reason="mounts need to be root"
)
def test_kernels_lie_where_code_can_be_loaded(tmp_path: Path) -> None:
    """As in containers, whose temporary file systems Docker mounts noexec."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    for folder in (home, temporary):
        folder.mkdir()
    noexec = 'mount -t tmpfs -o noexec none "$3"; '
    run = 'XDG_CACHE_HOME="$3" TMPDIR="$4" exec "$1" -c "$2"'
    assert loaded(noexec + run, home, temporary) == str(temporary / f"rankwise-kernels-{os.getuid()}")
    said = loaded(noexec + noexec.replace("$3", "$4") + run, home, temporary)
    assert said == (
        f"linear.c: no code can be loaded from {home} or {temporary} (mounted noexec, or not writable); "
        "set XDG_CACHE_HOME to a folder of another disk"
    )


OF_GCC_11 = ("-Wno-builtin-macro-redefined", "-U__GNUC__", "-D__GNUC__=11", "-U__FLT16_MANT_DIG__")
"""gcc 12 as version 11, which has neither of these on x86-64."""
MISSING = {
    attention: (*OF_GCC_11, "-D__builtin_shufflevector=missing_shuffle"),
    shared_memory: (*OF_GCC_11, "-D_Float16=missing_float16"),
}


@pytest.fixture
def older_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules' sources compiled without what gcc has had since version 12."""
    if build.load_library(shared_memory._SOURCE) is None:
        pytest.skip(str(build.unavailable_reason()))
    for module, flags in MISSING.items():
        older = functools.partial(lambda source, flags: build.load_library(source, *flags), flags=flags)
        monkeypatch.setattr(module, "load_library", older)
    shared_memory.library.cache_clear()
    yield
    shared_memory.library.cache_clear()


def test_attention_is_the_same_by_an_older_compiler(older_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention._library() is not None, build.unavailable_reason()
    store = torch.randn(2, 1, 2, 2, 24, 32, generator=torch.Generator().manual_seed(0))
    new = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
    heads, values = new[:, :6].contiguous(), new[:, 6:].contiguous()

    def mixed() -> torch.Tensor:
        step = attention.DecodeAttention(store.clone(), 2, 4, 32**-0.5, strides=(6 * 32, 2 * 32))
        step.begin(20, None)
        return step.run(0, heads.data_ptr(), values.data_ptr())

    older = mixed()
    monkeypatch.setattr(attention, "load_library", build.load_library)
    torch.testing.assert_close(older, mixed(), rtol=1e-6, atol=1e-6)


def test_float16_is_summed_by_an_older_compiler(older_compiler: None) -> None:
    """Every number of 16 bits plus another one, rounded as torch rounds."""
    assert shared_memory.library() is not None, build.unavailable_reason()
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    parts = [bits.view(torch.float16), bits.flip(0).roll(12345).view(torch.float16)]
    expected = (parts[0].float() + parts[1].float()).half()
    descriptor = shared_memory.create_segment(2, b"t" * shared_memory.TOKEN_BYTES)
    try:
        ends = [shared_memory.SharedMemory(descriptor, 2, index, 30.0, lambda peer: False) for index in (0, 1)]
    finally:
        os.close(descriptor)
    sums = [part.clone() for part in parts]
    threads = [threading.Thread(target=end.all_reduce, args=(own,)) for end, own in zip(ends, sums, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end, own in zip(ends, sums, strict=True):
        end.close()
        torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)


def test_a_relative_cache_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG specification has it: each working folder had kernels of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.chdir(tmp_path)
    assert build._cache_folder() == tmp_path / ".cache" / "rankwise" / "kernels"


def test_what_a_compiler_says_need_not_be_in_pythons_encoding(tmp_path: Path) -> None:
    """gcc writes as the locale says, Latin-1 say, and Python in UTF-8 where PYTHONUTF8 is set: a traceback."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nprintf 'cc \\251 2026\\n'\n")
    compiler.chmod(0o755)
    assert build._run([str(compiler), "--version"]).stdout == "cc \N{REPLACEMENT CHARACTER} 2026\n"
