"""What `make bench-serving ONLY=layout` holds the engine against: products without an engine."""

import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.cores import _shapes, product_cores

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 256,
}  # fmt: skip


def test_two_processes_have_half_of_the_products_each() -> None:
    whole, half = (
        sum(outputs * inputs for group in _shapes(SIZES, ranks) for outputs, inputs in group) for ranks in (1, 2)
    )
    # Queries, keys and values, their output, three matrices of the feed-forward part; and the last projection.
    assert whole == 2 * ((64 + 2 * 32) * 64 + 64 * 64 + 3 * 64 * 128) + 256 * 64
    assert whole == 2 * half
    assert len(_shapes(SIZES, 2)) == 2 * 2 + 1  # as many exchanges as a rank's sums and gathered tokens


@pytest.mark.slow
def test_processes_in_step_and_apart_are_timed_and_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    with product_cores(tmp_path) as cores:
        found = [cores.gain(in_step) for in_step in (True, False, True)]
    assert all(math.isfinite(gain) and gain > 0 for gain in found)
    assert multiprocessing.active_children() == []
