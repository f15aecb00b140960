"""The kernels of our own against float64 and torch, in every way that this machine can run them."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import build, linear, operators
from engine.kernels.linear import PackedLinear, pack_linear
from tests.support.flushed import names_of_flushed

pytestmark = pytest.mark.usefixtures("torch_threads")

MODES = ("on", "avx2", "off")
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1), (3, 5), (64, 64), (65, 16), (130, 77), (16, 130), (200, 1026))
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
COUNT_C = "int answer(void) { return 42; }\n"


@pytest.fixture
def use_mode(monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> Iterator[Callable[[str], None]]:
    def use(name: str) -> None:
        monkeypatch.setenv("RANKWISE_KERNELS", name)
        linear._library.cache_clear()
        operators._library.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    yield use
    linear._library.cache_clear()
    operators._library.cache_clear()


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, use_mode: Callable[[str], None]) -> str:
    use_mode(request.param)
    return str(request.param)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_right(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within one rounding of the result, and one of float32 for each addition on the way."""
    wide_bias = None if bias is None else bias.double()
    exact = functional.linear(x.double(), weight.double(), wide_bias)
    sizes = functional.linear(x.double().abs(), weight.double().abs(), None if bias is None else wide_bias.abs())
    allowed = ROUNDING[y.dtype] * exact.abs() + (weight.shape[1] + 2) * 2.0**-24 * sizes
    assert y.dtype == x.dtype and y.shape == exact.shape
    assert ((y.double() - exact).abs() <= allowed).all()


def is_own(layer: PackedLinear) -> bool:
    return layer.path.startswith(("avx", "amx"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", (False, True))
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_right(mode: str, outputs: int, inputs: int, with_bias: bool, dtype: torch.dtype) -> None:
    weight = numbers(outputs, inputs, dtype=dtype)
    bias = numbers(outputs, dtype=dtype, seed=1) if with_bias else None
    layer = pack_linear(weight, bias)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 32, 33, 70):
        x = numbers(rows, inputs, dtype=dtype, seed=rows)
        assert_right(layer(x), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("on", "avx2"))
def test_a_row_has_the_same_bits_in_any_batch(
    name: str, dtype: torch.dtype, use_mode: Callable[[str], None], torch_threads: Callable[[int], None]
) -> None:
    use_mode(name)
    layer = pack_linear(numbers(150, 514, dtype=dtype), numbers(150, dtype=dtype, seed=1))
    if not is_own(layer):
        pytest.skip(f"the path {layer.path!r} does not promise it")
    x = numbers(70, 514, dtype=dtype, seed=2)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(1, 71):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows
        assert torch.equal(layer(x[70 - rows :]), alone[70 - rows :]), rows
    torch_threads(2)
    assert torch.equal(layer(x), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sources_of_any_stride_pack_alike(mode: str, dtype: torch.dtype) -> None:
    wide = numbers(100, 90, dtype=dtype)
    x = numbers(4, 77, dtype=dtype, seed=1)
    expected = pack_linear(wide[:, 7:84].contiguous())(x)
    assert torch.equal(pack_linear(wide[:, 7:84])(x), expected)
    assert torch.equal(pack_linear(wide[:, 7:84].t().contiguous().t())(x), expected)
    every_other = pack_linear(wide[::2, 7:84])(x)
    assert_right(every_other, x, wide[::2, 7:84], None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_any_form(mode: str, dtype: torch.dtype) -> None:
    weight = numbers(32, 64, dtype=dtype)
    layer = pack_linear(weight)
    x = numbers(3, 5, 128, dtype=dtype, seed=1)
    y = layer(x[:, ::2, :64])
    assert y.shape == (3, 3, 32) and y.is_contiguous()
    assert_right(y, x[:, ::2, :64], weight, None)
    assert layer(x[0, 0, :64]).shape == (32,)
    assert layer(x[:0, 0, :64]).shape == (0, 32)


def test_the_weight_may_change_after_packing(use_mode: Callable[[str], None]) -> None:
    use_mode("on")
    weight = numbers(64, 64)
    layer = pack_linear(weight)
    if not is_own(layer):
        pytest.skip("the weight is kept")
    before = layer(torch.ones(1, 64))
    weight.zero_()
    assert torch.equal(layer(torch.ones(1, 64)), before) and before.abs().max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row(mode: str, dtype: torch.dtype) -> None:
    layer = pack_linear(numbers(70, 20, dtype=dtype).abs())
    x = torch.ones(3, 20, dtype=dtype)
    x[1, 4], x[2, 4] = float("nan"), float("inf")
    y = layer(x)
    assert y[0].isfinite().all() and y[1].isnan().all() and (y[2] == float("inf")).all()


def test_what_a_layer_says_of_itself(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The reason is that of the last library, which an earlier test may have asked for.
    monkeypatch.setattr(build, "_reasons", {})
    monkeypatch.setattr(build, "_loaded", {})
    linear._library.cache_clear()
    in_bfloat16 = pack_linear(numbers(65, 31, dtype=torch.bfloat16), numbers(65, dtype=torch.bfloat16))
    in_float32 = pack_linear(numbers(64, 32))
    assert (in_bfloat16.out_features, in_bfloat16.in_features, in_bfloat16.dtype) == (65, 31, torch.bfloat16)
    assert in_float32.nbytes == 64 * 32 * 4
    if mode == "off":
        # mkldnn refuses bfloat16 on processors without AVX-512.
        taken = "mkldnn" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "torch"
        assert (in_bfloat16.path, in_float32.path) == (taken, "torch")
        assert build.unavailable_reason() == "linear.c: RANKWISE_KERNELS=off"
    elif is_own(in_float32):
        assert build.unavailable_reason() is None
        assert in_float32.path == ("avx2" if mode == "avx2" else in_float32.path)
        if is_own(in_bfloat16):
            padded = 80 if in_bfloat16.path == "avx2" else 128  # to whole groups of 16 or 64 outputs
            assert in_bfloat16.nbytes == padded * 32 * 2 + 65 * 4
    assert pack_linear(numbers(8, 8, dtype=torch.float16)).path == "torch"


def test_processors_with_tiles_multiply_bfloat16_in_them(
    use_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mode("on")
    if "amx_bf16" not in build.processor_flags() or linear._library() is None:
        pytest.skip("no tiles, or no compiler")
    path = pack_linear(numbers(8, 16, dtype=torch.bfloat16)).path
    assert path in ("amx_bf16", "mkldnn")  # mkldnn where the compiler does not know them
    assert pack_linear(numbers(8, 16)).path == "avx512"


def test_misuse_is_refused(use_mode: Callable[[str], None]) -> None:
    use_mode("on")
    layer = pack_linear(numbers(8, 16))
    if not is_own(layer):
        pytest.skip("torch refuses by itself")
    with pytest.raises(ValueError, match=r"wanted \[\.\.\., 16\] torch\.float32 on the CPU, got \[1, 8\]"):
        layer(torch.ones(1, 8))
    with pytest.raises(ValueError, match=r"got .* torch\.bfloat16"):
        layer(torch.ones(1, 16, dtype=torch.bfloat16))


def assert_near(got: Tensor, expected: Tensor, roundings: float) -> None:
    """Within some roundings of the dtype, and the smallest normal numbers alike."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    allowed = 2 * roundings * ROUNDING[got.dtype] * expected.double().abs() + 1e-30
    assert ((got.double() - expected.double()).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (1, 5, 16, 33, 1024))
def test_norms_round_as_transformers_does(mode: str, width: int, dtype: torch.dtype) -> None:
    x, update = numbers(2, 3, width, dtype=dtype), numbers(2, 3, width, dtype=dtype, seed=1)
    weight = numbers(width, dtype=dtype, seed=2)

    def norm(hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * wide.to(dtype)

    roundings = 2 if dtype is torch.bfloat16 else 8  # the squares are summed in another order
    assert_near(operators.rms_norm(x, weight, 1e-5), norm(x), roundings)
    assert_near(operators.rms_norm(x[:, ::2], weight, 1e-5), norm(x[:, ::2]), roundings)
    both, normed = operators.add_rms_norm(x, update, weight, 1e-5)
    assert torch.equal(both, x + update)
    assert_near(normed, norm(x + update), roundings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (1, 15, 64, 100))
def test_gated_silu(mode: str, width: int, dtype: torch.dtype) -> None:
    gate_up = 4 * numbers(3, 2, 2 * width, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_near(operators.activate(gate_up, "silu", gated=True), functional.silu(gate) * up, 2)
    assert_near(operators.activate(gate_up[:, 1], "silu", gated=True), functional.silu(gate[:, 1]) * up[:, 1], 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_at_the_ends(mode: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([-float("inf"), -1e30, -200.0, -0.0, 0.0, 200.0, 1e30, float("nan")], dtype=dtype)
    y = operators.activate(torch.cat((gate, torch.ones_like(gate))), "silu", gated=True)
    assert y[0].isnan() and y[1:5].abs().max() < 1e-30
    assert torch.equal(y[5:7], gate[5:7]) and y[7].isnan()
    grid = torch.linspace(-80, 80, 4001)
    ours = operators.activate(torch.cat((grid, torch.ones_like(grid))), "silu", gated=True).double()
    exact = functional.silu(grid.double())
    assert ((ours - exact).abs() <= 4e-7 * exact.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (2, 6, 32, 64, 80))
def test_rotation_has_the_bits_of_torch(mode: str, width: int, dtype: torch.dtype) -> None:
    def in_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    projected = numbers(2, 5, 4, width, dtype=dtype)
    cos, sin = numbers(1, 5, 1, width, dtype=dtype, seed=1), numbers(1, 5, 1, width, dtype=dtype, seed=2)
    queries = projected[:, :, :3]
    assert torch.equal(operators.rotate(queries, cos, sin), in_torch(queries, cos, sin))
    heads_first, angles = queries.transpose(1, 2), [angle.transpose(1, 2) for angle in (cos, sin)]
    turned = operators.rotate(heads_first, *angles)
    assert torch.equal(turned, in_torch(heads_first, *angles)) and (mode == "off" or turned.is_contiguous())
    per_sequence = [numbers(2, 5, 1, width, dtype=dtype, seed=seed) for seed in (3, 4)]
    assert torch.equal(operators.rotate(queries, *per_sequence), in_torch(queries, *per_sequence))


def test_packed_weights_can_be_read_plainly(mode: str) -> None:
    for dtype in DTYPES:
        layer = pack_linear(numbers(64, 32, dtype=dtype))
        if layer.stored is None:
            assert layer.path == "mkldnn"
        else:
            assert layer.stored.nbytes == layer.nbytes and linear.read_seconds(layer.stored) > 0
    assert linear.read_seconds(torch.ones(7, dtype=torch.uint8)) > 0


def test_every_byte_is_read(use_mode: Callable[[str], None]) -> None:
    use_mode("on")
    library = linear._library()
    if library is None:
        pytest.skip(str(build.unavailable_reason()))
    words = torch.randint(0, 1 << 20, (4099,), dtype=torch.int32)
    assert library.read_bytes(words.data_ptr(), words.nbytes - 12) == int(words[:4096].sum())
    for place in (0, 1000, 4095):
        words[place] += 1
        assert library.read_bytes(words.data_ptr(), words.nbytes - 12) == int(words[:4096].sum())


def test_settling_changes_no_bit(mode: str) -> None:
    weight, x = numbers(1030, 1024), numbers(2, 1024, seed=1)
    layer = pack_linear(weight, packing="quick")
    before = layer(x)
    layer.finalize()
    assert torch.equal(layer(x), before) and torch.equal(pack_linear(weight)(x), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heights", ((130,), (64, 16, 16), (5, 60, 70, 1)))
def test_lent_weights_give_the_bits_of_packed_ones(
    mode: str, heights: tuple[int, ...], dtype: torch.dtype, torch_threads: Callable[[int], None]
) -> None:
    wide = numbers(sum(heights), 301, dtype=dtype)
    parts = list(wide[:, 3:80].split(heights))
    bias, x = numbers(sum(heights), dtype=dtype, seed=1), numbers(9, 77, dtype=dtype, seed=2)
    packed = pack_linear(wide[:, 3:80].contiguous(), bias)
    expected = packed(x)
    # Only our own kernels promise the same bits.
    same = (
        torch.equal
        if is_own(packed)
        else partial(torch.allclose, rtol=1e-2, atol=1e-4 if dtype is torch.float32 else 1e-1)
    )
    assert same(pack_linear(parts, bias)(x), expected)
    layer = pack_linear(parts, bias, packing="memory_mapped")
    for threads in (1, 2):
        torch_threads(threads)
        assert same(layer(x), expected) and same(layer(x[:1]), expected[:1])
    layer.finalize()
    wide.zero_()
    assert same(layer(x), expected), "settled weights are the layer's own"


def test_lent_weights_are_read_where_they_lie(use_mode: Callable[[str], None]) -> None:
    use_mode("on")
    weight, x = numbers(128, 64), numbers(1, 64, seed=1)
    layer = pack_linear(weight, packing="memory_mapped")
    if not is_own(layer):
        pytest.skip(str(build.unavailable_reason()))
    before = layer(x)
    weight *= 2
    assert torch.equal(layer(x), 2 * before) and layer.stored is None
    layer.finalize()
    assert layer.stored is not None and layer.nbytes == layer.stored.nbytes


@pytest.fixture
def fresh_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No library loaded, an empty cache; gives a small source."""
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_reasons", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RANKWISE_KERNELS", raising=False)
    source = tmp_path / "count.c"
    source.write_text(COUNT_C)
    return source


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "rankwise" / "kernels").iterdir())


def needs_compiler(library: ctypes.CDLL | None) -> ctypes.CDLL:
    if library is None:
        pytest.skip(str(build.unavailable_reason()))
    return library


def test_a_source_is_compiled_once(fresh_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert needs_compiler(build.load_library(fresh_build)).answer() == 42
    assert build.unavailable_reason() is None
    (name,) = cached(tmp_path)
    assert name.startswith("count-") and name.endswith(".so")
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    again = build.load_library(fresh_build)
    assert again is not None and again.answer() == 42


def test_another_source_or_flag_is_another_library(fresh_build: Path, tmp_path: Path) -> None:
    needs_compiler(build.load_library(fresh_build))
    build.load_library(fresh_build, "-DUNUSED=1")
    other = fresh_build.with_name("more.c")
    other.write_text(COUNT_C.replace("42", "43"))
    more = build.load_library(other)
    assert more is not None and more.answer() == 43
    assert len(cached(tmp_path)) == 3


def test_another_header_is_another_library(fresh_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = fresh_build.with_name("number.h")
    fresh_build.write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    for number in (1, 2, 1):
        monkeypatch.setattr(build, "_loaded", {})
        header.write_text(f"#define NUMBER {number}\n")
        assert needs_compiler(build.load_library(fresh_build)).answer() == number
    assert len(cached(tmp_path)) == 2


def test_processes_compile_at_the_same_time(fresh_build: Path, tmp_path: Path) -> None:
    needs_compiler(build.load_library(fresh_build))
    code = (
        "import sys; from pathlib import Path; from engine.kernels import build; "
        "print(build.load_library(Path(sys.argv[1]), '-DTOGETHER').answer())"
    )
    command = [sys.executable, "-c", code, str(fresh_build)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) for _ in range(3)]
    assert [process.communicate(timeout=600)[0].strip() for process in running] == ["42"] * 3
    assert len(cached(tmp_path)) == 2, "one library per set of flags, and nothing temporary"


def test_a_missing_compiler_has_a_reason(fresh_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    linear._library.cache_clear()
    assert build.load_library(fresh_build) is None
    reason = build.unavailable_reason()
    if "x86-64, this machine" not in str(reason):
        assert reason == "count.c: no C compiler: /nowhere/cc: No such file or directory"
    weight, x = numbers(8, 8), numbers(2, 8, seed=1)
    layer = pack_linear(weight)
    linear._library.cache_clear()
    assert layer.path == "torch"
    assert_right(layer(x), x, weight, None)


def test_a_failed_compilation_has_a_reason(fresh_build: Path, tmp_path: Path) -> None:
    needs_compiler(build.load_library(fresh_build))
    broken = fresh_build.with_name("broken.c")
    broken.write_text("int answer(void) { return nothing_such; }\n")
    assert build.load_library(broken) is None
    assert "nothing_such" in str(build.unavailable_reason())
    assert len(cached(tmp_path)) == 1


def test_a_cache_that_cannot_be_written_is_replaced(
    fresh_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    needs_compiler(build.load_library(fresh_build))
    folder = tmp_path / f"rankwise-kernels-{os.getuid()}"
    assert [path.suffix for path in folder.iterdir()] == [".so"] and folder.stat().st_mode & 0o777 == 0o700


def test_code_is_loaded_from_no_folder_that_others_write_or_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name can be foretold: whoever put a library there had it run as this user."""
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shared, of_user = tmp_path / "cache" / "rankwise" / "kernels", tmp_path / f"rankwise-kernels-{os.getuid()}"
    assert build._cache_folder() == shared
    for mode in (0o770, 0o707):
        shared.chmod(mode)
        assert build._cache_folder() == of_user
    of_user.rmdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    of_user.symlink_to(tmp_path / "mine")
    monkeypatch.setattr(build.tempfile, "mkdtemp", lambda prefix: str(tmp_path / f"{prefix}new"))
    assert build._cache_folder() == tmp_path / "rankwise-kernels-new"
    shared.chmod(0o755)
    assert build._cache_folder() == shared


def test_a_tilde_is_the_home_folder_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It became a folder named ~ where the process runs: as `env` of a target, and for a user without a home."""
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/scratch")
    assert build._cache_folder() == home / "scratch" / "rankwise" / "kernels"
    monkeypatch.setattr(build.os.path, "expanduser", lambda path: path)
    for named in ("~/scratch", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert build._cache_folder() == tmp_path / f"rankwise-kernels-{os.getuid()}"
    assert not list(here.iterdir())


def test_a_cache_is_used_without_a_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose own disk is read-only."""

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build.tempfile, "gettempdir", none)
    assert build._cache_folder() == tmp_path / "rankwise" / "kernels"


def test_a_word_that_is_no_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_KERNELS", "fast")
    with pytest.raises(ValueError, match="'fast' is not one of on, off, avx2"):
        build.kernel_mode()


def test_a_library_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn one was found again and again, and nothing computed by kernels of ours."""

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("-o") + 1]).write_bytes(bytes(1000))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(build, "_run", run)
    with names_of_flushed() as flushed:
        build._compile(["cc"], tmp_path / "count.so")
    assert flushed == {tmp_path / "count.so"}
