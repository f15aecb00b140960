"""Messages of failures: one line for a reader, without places in the C++ sources of libraries."""

import pytest

from engine.rank.failures import one_line


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms",
            "Timed out waiting 60000ms",
        ),
        (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2340",
            "Connection closed by peer [127.0.0.1]:2340",
        ),
        (
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory",
            "DefaultCPUAllocator: can't allocate memory",
        ),
        (
            "failed\nException raised from check at /opt/torch/csrc/a.cpp:3 (most recent call first):\nframe #0",
            "failed",
        ),
        ("x\x1b[31m\ny", "x\\x1b[31m y"),
        ("workload.prompts: a/b.h: no such file", "workload.prompts: a/b.h: no such file"),
        ("", "RuntimeError"),
    ],
)
def test_one_line(raised: str, told: str) -> None:
    assert one_line(RuntimeError(raised)) == told


def test_a_long_message_is_cut() -> None:
    assert len(one_line(RuntimeError("x" * 10_000))) <= 600


@pytest.mark.parametrize("part", ["x", " ", "x/", ".", "a.cc/", "[enforce fail at "])
def test_a_message_of_a_megabyte_takes_no_time_to_speak_of(part: str) -> None:
    """Hours, where a place in a source is looked for from each character on."""
    text = part * ((1 << 20) // len(part))
    assert one_line(RuntimeError(f"bad value: {text}")).startswith("bad value:")
