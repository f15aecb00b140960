"""The fuzzer sees what it must, and what it once found stays mended."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings

from benchmarks.fuzz.finds import Finds, minimised
from benchmarks.fuzz.mutations import inputs
from benchmarks.fuzz.oracle import MAX_SECONDS, judge
from benchmarks.fuzz.registry import registered

FOUND = Path(__file__).parents[1] / "data" / "fuzz"
"""Found inputs by target: `<target>/<anything>`."""
TARGETS = registered()


def raising(error: BaseException) -> object:
    def target(data: bytes) -> None:
        raise error

    return target


def slow(data: bytes) -> int:
    """Compute for longer than is allowed, however fast the processor is."""
    end = time.process_time() + MAX_SECONDS + 0.1
    total = 0
    while time.process_time() < end:
        total += sum(range(100_000))
    return total


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ValueError("study: is missing"), None),
        (TypeError("unhashable"), "TypeError"),
        (RecursionError(), "RecursionError"),
        (MemoryError(), "MemoryError"),
        (ValueError("x" * 2001), "message of more than 2000 characters"),
        (ValueError("a\x1b[31m"), "control character in a message"),
        (ValueError(""), "empty message"),
        (ValueError("see https://errors.pydantic.dev/2"), "message of another library"),
    ],
)
def test_the_oracle(error: BaseException, fault: str | None) -> None:
    found = judge(raising(error), b"")  # type: ignore[arg-type]
    assert found is None if fault is None else found is not None and found.startswith(fault)


def test_the_oracle_sees_what_is_slow() -> None:
    assert str(judge(slow, b"")).startswith("slow")


def test_a_found_input_is_kept_once_and_made_smaller(tmp_path: Path) -> None:
    def target(data: bytes) -> None:
        if b"bad" in data:
            raise TypeError(data)

    data = b"x" * 500 + b"bad" + b"y" * 500
    fault = judge(target, data)
    assert fault is not None and minimised(target, data, fault) == b"bad"
    finds = Finds(tmp_path, "a.target")
    assert finds.add(target, data, fault) and not finds.add(target, data, fault)
    assert [path.read_bytes() for path in tmp_path.glob("a.target-*.bin")] == [b"bad"]


@given(inputs((b'{"a": [1, {"b": 2}]}', b"a: [1]\n", b"77|RUNNING|node[1-2]|None\n")))
@settings(max_examples=200, deadline=None)
def test_inputs_are_bytes(data: bytes) -> None:
    assert isinstance(data, bytes)


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_have_no_fault(name: str) -> None:
    assert TARGETS[name].seeds
    for data in TARGETS[name].seeds:
        assert judge(TARGETS[name].function, data) is None


@pytest.mark.parametrize("path", sorted(FOUND.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_stays_mended(path: Path) -> None:
    assert judge(TARGETS[path.parent.name].function, path.read_bytes()) is None
