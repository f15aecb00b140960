"""The residual stream on real ranks: shared out by rows or held by all, the bits are the same."""

from collections.abc import Iterator
from typing import Literal
from unittest.mock import patch

import pytest
import torch

from engine.inference import residual
from engine.inference.layer import Norm
from engine.inference.residual import NormRule, Residual
from engine.kernels.build import load_library
from engine.parallel import opening, shared_memory
from engine.parallel.communicator import CommunicationEvent, open_communicators
from engine.parallel.grid import Grid
from tests.support.rank_pool import RankPool

CPU = torch.device("cpu")
SHAPES = ((1, 6), (3, 4), (2, 5))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


def through(
    rank: int, transport: str, tp: int, least_elements: int, dtype: str, kind: Literal["rms", "layer"] = "rms"
) -> list[tuple[list[bytes], set[str]]]:
    """For each shape: bits of all that comes out of a stream, and the operations that it took."""
    with patch.object(opening, "too_many_for_cores", lambda _: False):
        group = open_communicators(Grid(4 // tp, tp, 1, rank), CPU, "gloo", 30.0, transport).tensor
    found = []
    with patch.object(residual, "_LEAST_ELEMENTS", least_elements), torch.inference_mode():
        for shape in SHAPES:
            events: list[CommunicationEvent] = []
            group.listener = events.append
            common, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(group.index)

            def numbers(generator: torch.Generator, *sizes: int) -> torch.Tensor:
                return torch.randn(sizes, generator=generator).to(getattr(torch, dtype))

            norm = Norm(numbers(common, 48), numbers(common, 48))
            stream = Residual(numbers(common, *shape, 48), group, NormRule(kind, 1e-6))
            seen = [stream.norm(norm)]
            seen += [stream.add(numbers(own, *shape, 48), norm) for _ in range(2)]
            seen.append(stream.replace(numbers(own, *shape, 48), norm))
            seen.append(stream.whole(numbers(own, *shape, 48)))
            assert all(tensor.shape == (*shape, 48) for tensor in seen)
            bits = [bytes(tensor.contiguous().view(torch.uint8).numpy()) for tensor in seen]
            found.append((bits, {event.operation for event in events}))
    return found


@pytest.mark.skipif(load_library(shared_memory._SOURCE) is None, reason="there is no C compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_shared_out_have_the_bits_of_rows_held_by_all(pool: RankPool, tp: int, dtype: str, kind: str) -> None:
    held = pool.run(through, "shared memory", tp, 1 << 30, dtype, kind)
    shared_out = pool.run(through, "shared memory", tp, 1, dtype, kind)
    for shape, *ranks in zip(SHAPES, *held, *shared_out, strict=True):
        bits = [one[0] for one in ranks]
        assert all(other == bits[0] for other in bits) or tp < 4, "other groups have other numbers"
        assert bits[:4] == bits[4:], shape
        rows = shape[0] * shape[1]
        expected = {"reduce_scatter", "all_gather"} if rows % tp == 0 else {"all_reduce"}
        assert all(one[1] == ({"all_reduce"} if tp > 1 else set()) for one in ranks[:4])
        assert all(one[1] == (expected if tp > 1 else set()) for one in ranks[4:])


def test_over_gloo_every_rank_holds_all_rows(pool: RankPool) -> None:
    assert all(
        operations == {"all_reduce"} for one in pool.run(through, "gloo", 4, 1, "float32") for _, operations in one
    )
