"""A damaged file of a run folder: the rest is shown, or a sentence names the file; never an error of the program."""

import functools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fuzz import run_files
from benchmarks.fuzz.mutations import inputs
from benchmarks.fuzz.oracle import judge

NAMES = tuple(run_files.seeds())
SEEDS = run_files.seeds()


@functools.cache
def targets() -> dict[str, Callable[[bytes], object]]:
    return run_files.targets()


def test_every_target_has_seeds() -> None:
    assert targets().keys() == SEEDS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_sound_files_are_shown(name: str) -> None:
    for seed in SEEDS[name]:
        targets()[name](seed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 100, b"null", b"[]", b"{}", b"\xff\xfe", b'{"a": ' * 3000, b"9" * 5000, b'{"schema_version": 2}'],
    ids=["empty", "zeros", "null", "list", "object", "not UTF-8", "nested", "long number", "version only"],
)
def test_files_that_hold_nothing_of_use(name: str, data: bytes) -> None:
    assert judge(targets()[name], data) is None


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_files(name: str, data: st.DataObject) -> None:
    """Values exchanged and removed, text cut and spliced: `make fuzz` does the same for hours."""
    assert judge(targets()[name], data.draw(inputs(SEEDS[name]))) is None
