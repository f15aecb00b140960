"""Recorded calls of C: what is repeated, what is refused."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels.build import load_library
from engine.kernels.linear import pack_linear
from engine.kernels.operators import _library as operators_library
from engine.kernels.operators import add_rms_norm, rms_norm, rotate
from engine.kernels.program import Recording, ScaledProgram
from engine.kernels.rows import _library as rows_library
from engine.kernels.rows import add, argmax_rows, embed_rows


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_program_gives_what_the_step_gives_for_other_inputs() -> None:
    table, weight, angles = numbers(50, 32), numbers(32, seed=1), numbers(1, 1, 1, 16, seed=2)
    layer, ids = pack_linear(numbers(40, 32, seed=3), numbers(40, seed=4)), torch.tensor([3, 4])

    def step() -> tuple[Tensor, Tensor]:
        hidden = embed_rows(ids, table)
        turned = rotate(hidden.view(1, 2, 2, 16), angles, angles).view(2, 32)  # 14 integers beside 4 addresses
        both, normed = add_rms_norm(hidden, turned, weight, 1e-5)
        logits = layer(rms_norm(normed, weight, 1e-6))
        return argmax_rows(add(logits, logits)), both

    step()
    with Recording() as recording:
        recorded = step()
    assert not recording.refusals
    program = recording.program()
    assert program.names == ["embed_rows", "rotate", "add_rms_norm", "rms_norm", "linear_run", "add", "argmax_rows"]
    assert program.nbytes >= recorded[1].nbytes
    for words in ([0, 49], [7, 7], [3, 4]):
        ids.copy_(torch.tensor(words))
        program.poison()
        assert recorded[1].isnan().all()
        assert program.run() is None
        repeated = [tensor.clone() for tensor in recorded]
        assert all(torch.equal(one, other) for one, other in zip(repeated, step(), strict=True))


def test_no_function_stays_replaced() -> None:
    table, ids = numbers(5, 16), torch.tensor([1])
    libraries = rows_library(), operators_library()
    before = [library.embed_rows if number == 0 else library.rms_norm for number, library in enumerate(libraries)]
    with pytest.raises(ZeroDivisionError), Recording():
        embed_rows(ids, table)
        raise ZeroDivisionError
    assert [libraries[0].embed_rows, libraries[1].rms_norm] == before


def test_threads_do_not_hear_each_other() -> None:
    x = numbers(16)
    refused: list[set[str]] = []

    def meanwhile() -> None:
        with torch.inference_mode(), Recording() as other:
            add(x, x)
        refused.append(other.refusals)

    add(x, x)
    with Recording() as recording:
        add(x, x)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
        rms_norm(x, x, 1e-5)
    assert refused == [{"another thread records"}]
    assert recording.program().names == ["add", "rms_norm"]


def test_a_call_that_fails_ends_the_program_and_is_named() -> None:
    table, ids = numbers(5, 16), torch.tensor([1])
    embed_rows(ids, table)
    with Recording() as recording:
        hidden = embed_rows(ids, table)
        doubled = add(hidden, hidden)
    program = recording.program()
    ids.fill_(5)
    program.poison()
    assert program.run() == ("embed_rows", 1)
    assert doubled.isnan().all()


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (lambda hidden: hidden + 1, "aten::add"),
        (lambda hidden: hidden.clone(), "aten::clone"),
        (lambda hidden: torch.cat((hidden, hidden)), "aten::cat"),
        (lambda hidden: torch.zeros(3), "aten::zeros"),
        (lambda hidden: hidden.relu_(), "aten::relu_"),
        (lambda hidden: hidden.sum().item(), "aten::item"),
        (lambda hidden: hidden.t().contiguous(), "aten::contiguous"),
        (lambda hidden: hidden.t().reshape(-1), "aten::reshape"),
        (lambda hidden: hidden.double(), "aten::to"),
    ],
)
def test_an_operator_of_torch_that_computes_is_refused(planted: Callable[[Tensor], object], named: str) -> None:
    hidden = numbers(2, 16)
    add(hidden, hidden)
    with Recording() as recording:
        planted(add(hidden, hidden))
    assert named in recording.refusals


def test_room_and_views_are_not_refused() -> None:
    hidden = numbers(2, 3, 16)
    with Recording() as recording:
        room = torch.empty_like(hidden).new_empty(2, 3, 16).view(6, 16)[1:].transpose(0, 1)
        torch.empty(3, 4).unbind()[0].detach()
        hidden.contiguous().reshape(-1).float()
    assert not recording.refusals and room.shape == (16, 5)


def test_memory_that_the_step_has_let_go_of_is_used_again() -> None:
    x = numbers(2, 16)

    def step() -> tuple[Tensor, Tensor]:
        first = hidden = add(x, x)
        for _ in range(9):
            hidden = add(hidden, first)
        return first, hidden

    with Recording() as recording:
        first, hidden = step()
    program = recording.program()
    assert program.nbytes == 3 * x.nbytes  # the one that is kept, and two in turn
    assert first.data_ptr() % 64 == hidden.data_ptr() % 64 == 0
    x.copy_(numbers(2, 16, seed=1))
    program.poison()
    program.run()
    assert all(torch.equal(one, other) for one, other in zip((first, hidden), step(), strict=True))


def recordings_of(step: Callable[[Tensor], Tensor], x: Tensor, least: int) -> tuple[Recording, Recording, Tensor]:
    """Of the step of all rows of x, and in its memory of the least; and the result of the first."""
    step(x)
    with Recording() as large:
        made = step(x)
    with Recording(large) as small:
        assert step(x[:least]).data_ptr() == made.data_ptr()
    assert not large.refusals | small.refusals
    return large, small, made


@pytest.mark.parametrize("least", [1, 2, 8, 9])
def test_two_recordings_make_a_program_for_any_number_of_rows(least: int) -> None:
    x, weight = numbers(9, 32), numbers(32, seed=1)
    layer, narrow = pack_linear(numbers(40, 32, seed=3), numbers(40, seed=4)), pack_linear(numbers(32, 40, seed=5))

    def step(rows: Tensor) -> Tensor:
        both, normed = add_rms_norm(rows, rms_norm(rows, weight, 1e-6), weight, 1e-5)
        return add(narrow(layer(normed)), both)

    large, small, made = recordings_of(step, x, least)
    program = ScaledProgram(large, small, (9, least))
    for beyond in (least - 1, 10):
        with pytest.raises(AssertionError):
            program.scale(beyond)
    for count in (9, *range(least, 9), 9):
        x.copy_(numbers(9, 32, seed=count))
        program.poison()
        program.scale(count)
        assert program.run() is None
        assert made[count:].isnan().all()  # rows beyond are left alone
        repeated = made[:count].clone()
        assert torch.equal(repeated, step(x[:count]))


def test_an_address_that_depends_on_the_number_of_rows_is_followed() -> None:
    x, weight = numbers(8, 32), numbers(32, seed=1)

    def second_half(rows: Tensor) -> Tensor:
        return rms_norm(add(rows, rows).view(2, len(rows) // 2, 32)[1], weight, 1e-6)

    large, small, made = recordings_of(second_half, x, 2)
    program = ScaledProgram(large, small, (8, 2), unit=2)
    for count in (2, 4, 6, 8):
        program.poison()
        program.scale(count)
        program.run()
        repeated = made[: count // 2].clone()
        assert torch.equal(repeated, second_half(x[:count]))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda rows: add(rows, rows) if len(rows) < 4 else add(add(rows, rows), rows), "other functions"),
        (lambda rows: rms_norm(rows, rows[0], 1e-5 * len(rows)), "more than numbers"),
        (lambda rows: rms_norm(rows[: (len(rows) + 5) // 4], rows[0], 1e-5), "fractions of a row"),
        (lambda rows: add(rows, torch.empty_like(rows) if len(rows) < 4 else rows), "other memory"),
        (lambda rows: add(torch.empty(12 - len(rows), 16)[:1], rows[:1]), "other memory"),
    ],
)
def test_recordings_that_differ_in_more_than_the_number_of_rows(step: Callable[[Tensor], Tensor], message: str) -> None:
    x = numbers(8, 16)
    step(x)
    with Recording() as large:
        step(x)
    with Recording(large) as small:
        step(x[:2])
    with pytest.raises(ValueError, match=message):
        ScaledProgram(large, small, (8, 2))


def test_a_function_without_declared_arguments_is_refused() -> None:
    library = rows_library()
    assert library is not None
    declared, x = library.add.argtypes, numbers(16)
    library.add.argtypes = None
    try:
        with Recording() as recording:
            library.add(*[ctypes.c_void_p(x.data_ptr())] * 3, ctypes.c_int64(0), ctypes.c_int64(0))
    finally:
        library.add.argtypes = declared
    assert recording.refusals == {"add without declared arguments"}


def test_arguments_come_as_they_were_given(tmp_path: Path) -> None:
    source = """
    #include <stdint.h>
    typedef int64_t n;
    int collect(double *to, n a, int b, float p, n c, n d, n e, float q, n f, n g, n h, n i, n j, n k, float r, n l,
                n m, n o) {
        const double all[] = {a, b, c, d, e, f, g, h, i, j, k, l, m, o, p, q, r};
        for (int place = 0; place < 17; place++) to[place] = all[place];
        return 0;
    }
    """
    path = tmp_path / "collect.c"
    path.write_text(source)
    library = load_library(path)
    assert library is not None
    number, real = ctypes.c_int64, ctypes.c_float
    kinds = [ctypes.c_void_p, number, ctypes.c_int, real, *[number] * 3, real, *[number] * 6, real, *[number] * 3]
    library.collect.argtypes, library.collect.restype = kinds, ctypes.c_int
    to = torch.zeros(17, dtype=torch.float64)
    with Recording() as recording:
        library.collect(to.data_ptr(), -1, -2, 0.5, -3, 4, 5, 1.5, 6, 7, 8, 1 << 50, 10, 11, 2.5, 12, 13, -14)
    wanted = [-1, -2, -3, 4, 5, 6, 7, 8, 1 << 50, 10, 11, 12, 13, -14, 0.5, 1.5, 2.5]
    assert to.tolist() == wanted
    to.zero_()
    assert recording.program().run() is None
    assert to.tolist() == wanted
