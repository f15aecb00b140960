"""Loading: headers that are refused, pieces that equal slices, bytes that are read once, the page cache's states."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.loading import (
    LoadReport,
    TensorSlice,
    access,
    cached_share,
    evict,
    raw_read_seconds,
    read_pieces,
    tensor_locations,
    warm,
)
from engine.loading.access import network_file_system
from engine.loading.page_cache import state_of
from engine.loading.pieces import merged_extents
from engine.loading.read_ahead import WINDOW_BYTES, ReadAhead

FIRST = {
    "wide": torch.arange(48 * 40).reshape(48, 40).to(torch.bfloat16),
    "tall": torch.randn(64, 6, generator=torch.Generator().manual_seed(0)),
    "bias": torch.arange(7, dtype=torch.int64),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 3),
}
SECOND = {"other": torch.arange(24, dtype=torch.float16).reshape(4, 6)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file(FIRST, folder / "model-1.safetensors", metadata={"format": "pt"})
    save_file(SECOND, folder / "model-2.safetensors")
    return [folder / "model-1.safetensors", folder / "model-2.safetensors"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MB in 16 matrices of 1024 rows and 2048 columns, bfloat16."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**15), 2**15, (1024, 2048), generator=generator, dtype=torch.int16)
    save_file({f"m{number}": numbers.roll(number, 0).view(torch.bfloat16) for number in range(16)}, path)
    return path


def part(piece: TensorSlice) -> torch.Tensor:
    whole = (FIRST | SECOND)[piece.name]
    rows = slice(*piece.rows) if piece.rows else slice(None)
    if piece.columns:
        return whole[rows, slice(*piece.columns)]
    return whole[rows] if whole.dim() else whole


def test_places_agree_with_the_format(files: list[Path]) -> None:
    found = tensor_locations(files)
    assert found.keys() == FIRST.keys() | SECOND.keys()
    for name, tensor in (FIRST | SECOND).items():
        stored = found[name]
        assert (stored.dtype, stored.shape, stored.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        data = stored.file.read_bytes()[stored.offset :][: stored.nbytes]
        assert data == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name
    assert list(found)[-1] == "other"


def written(tmp_path: Path, header: object, data: bytes = b"", claimed: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes((len(text) if claimed is None else claimed).to_bytes(8, "little") + text + data)
    return path


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    ("header", "data", "claimed", "reason"),
    [
        (b"{}", b"", 99, "expected at least 107 bytes"),
        (b"{}", b"", 2**63, "do not begin with a safetensors header"),
        (b'{"a": ', b"", None, "not JSON"),
        (b"\xff\xfe\x00", b"", None, "not JSON"),
        (b"[" * 100_000, b"", None, "nested more than 200 levels deep"),
        (b"[" * 5_000_001, b"", None, "more than 5,000,000 values"),
        ([1], b"", None, "got list, expected a JSON object"),
        ({"a": 1}, bytes(8), None, "tensor 'a': got int, expected dtype"),
        ({"a": entry(dtype=[])}, bytes(8), None, "tensor 'a': dtype: got"),
        ({"a": {"shape": [2]}}, bytes(8), None, "tensor 'a': dtype: got None"),
        ({"a": entry(shape=[3])}, bytes(8), None, r"shape \(3,\) does not fill its 8 bytes"),
        ({"a": entry(shape=[-2])}, bytes(8), None, "tensor 'a': shape: got"),
        ({"a": entry(shape=[2.0])}, bytes(8), None, "tensor 'a': shape: got"),
        ({"a": entry(shape=[1] * 65)}, bytes(8), None, "expected at most 64 whole numbers"),
        (b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 8]}}' % (b"9" * 4000), bytes(8), None, "64 bits"),
        ({"a": entry(data_offsets=[0])}, bytes(8), None, "data_offsets: got"),
        ({"a": entry(data_offsets=[0, None])}, bytes(8), None, "data_offsets: got"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [Infinity, 8]}}', bytes(8), None, "not JSON"),
        ({"a": entry(data_offsets=[4, 12])}, bytes(12), None, "begins at byte"),
        ({"a": entry(), "b": entry(data_offsets=[4, 12])}, bytes(12), None, "tensor 'b' begins at byte"),
        ({"a": entry()}, bytes(7), None, "bytes by its header, found"),
        ({"a": entry()}, bytes(9), None, "bytes by its header, found"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, header: object, data: bytes, claimed: int | None, reason: str
) -> None:
    path = written(tmp_path, header, data, claimed)
    with pytest.raises(ValueError, match=rf"bad\.safetensors: truncated or damaged: .*{reason}"):
        tensor_locations([path])


def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, {"a": entry(dtype="Q4")}, bytes(8), None)
    with pytest.raises(ValueError, match=r"bad\.safetensors: tensor 'a': unknown dtype 'Q4'; use one of: F64"):
        tensor_locations([path])


def test_a_missing_file_and_a_tensor_in_two_files_are_refused(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.safetensors: No such file"):
        tensor_locations([tmp_path / "gone.safetensors"])
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(files[1].read_bytes())
    with pytest.raises(ValueError, match=r"copy\.safetensors: tensor other is also in .*model-2"):
        tensor_locations([*files, copy])


@st.composite
def some_pieces(draw: st.DrawFn) -> list[TensorSlice]:
    def span(size: int) -> st.SearchStrategy[tuple[int, int] | None]:
        cuts = st.lists(st.integers(0, size), min_size=2, max_size=2).map(lambda ends: (min(ends), max(ends)))
        return st.none() | cuts

    pieces = []
    for name, tensor in (FIRST | SECOND).items():
        for _ in range(draw(st.integers(0, 2))):
            rows = draw(span(tensor.shape[0])) if tensor.dim() else None
            pieces.append(TensorSlice(name, rows, draw(span(tensor.shape[1])) if tensor.dim() == 2 else None))
    return draw(st.permutations(pieces))


@settings(max_examples=60)
@given(pieces=some_pieces(), network=st.booleans(), lend=st.booleans())
def test_pieces_are_slices(files: list[Path], pieces: list[TensorSlice], network: bool, lend: bool) -> None:
    report = LoadReport.before(files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.loading.access.network_file_system", lambda path: "nfs" if network else None)
        got = list(read_pieces(files, pieces, lend=lend, report=report))
    assert sorted(map(repr, pieces)) == [repr(piece) for piece, _ in sorted(got, key=lambda pair: repr(pair[0]))]
    for piece, tensor in got:
        assert torch.equal(tensor, part(piece)) and tensor.dtype == part(piece).dtype, piece
        assert tensor.shape == part(piece).shape
    wanted = sum(tensor.nbytes for _, tensor in got)
    assert report.asked_bytes >= wanted if network and not lend else report.asked_bytes == wanted


def test_the_order_is_that_of_the_bytes(files: list[Path]) -> None:
    stored = tensor_locations(files)
    pieces = [TensorSlice(name) for name in sorted(stored)]
    got = [piece.name for piece, _ in read_pieces(files, pieces)]
    assert got == list(stored)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (TensorSlice("nothing"), "model-1.safetensors.*tensor nothing is missing"),
        (TensorSlice("wide", rows=(0, 49)), r"tensor wide of shape \(48, 40\) has no rows 0 to 49"),
        (TensorSlice("wide", columns=(30, 41)), "has no columns 30 to 41"),
        (TensorSlice("bias", columns=(0, 1)), "has no columns 0 to 1"),
        (TensorSlice("scalar", rows=(0, 1)), "has no rows 0 to 1"),
    ],
)
def test_a_part_that_is_not_there_is_refused(files: list[Path], piece: TensorSlice, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(read_pieces(files, [piece]))


def test_kept_tensors_stay_as_they_are_and_dropped_memory_is_used_again(large: Path) -> None:
    names = list(tensor_locations([large]))
    kept = {piece.name: tensor for piece, tensor in read_pieces([large], map(TensorSlice, names))}
    first = kept["m0"].view(torch.int16)
    for number in range(16):
        assert torch.equal(kept[f"m{number}"].view(torch.int16), first.roll(number, 0)), number
    addresses = {tensor.data_ptr() for _, tensor in read_pieces([large], map(TensorSlice, names))}
    assert len(addresses) <= 2
    views = {piece.name: tensor[5:7, 3:9] for piece, tensor in read_pieces([large], map(TensorSlice, names))}
    for number in range(16):
        assert torch.equal(views[f"m{number}"].view(torch.int16), first.roll(number, 0)[5:7, 3:9])


def test_what_is_lent_lies_in_the_page_cache_and_can_be_let_go(large: Path) -> None:
    before = large.read_bytes()
    memory_mapped = [
        tensor for _, tensor in read_pieces([large], [TensorSlice(f"m{number}") for number in range(16)], lend=True)
    ]
    assert _mapped_bytes(large) >= sum(tensor.nbytes for tensor in memory_mapped), "no page has to be asked for again"
    memory_mapped[0].zero_()
    assert large.read_bytes() == before, "writing changes no file"
    memory_mapped.clear()
    assert _mapped_bytes(large) == 0


def _mapped_bytes(path: Path) -> int:
    """Bytes of the file that are in this process's view, from /proc/self/smaps."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(" ", 1)[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.parametrize("lend", [False, True])
def test_a_file_that_becomes_shorter_is_named(large: Path, tmp_path: Path, lend: bool) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(large.read_bytes())
    for columns in (None, (0, 1024)):
        pieces = [TensorSlice(f"m{number}", columns=columns) for number in range(16)]
        reading = read_pieces([path], pieces, lend=lend)
        next(reading)
        os.truncate(path, 1 << 20)
        with pytest.raises(ValueError, match=r"model\.safetensors: became shorter while it was read"):
            list(reading)
        path.write_bytes(large.read_bytes())


def halves(files: list[Path], rank: int) -> list[TensorSlice]:
    """What one of two ranks keeps where every second matrix is split by columns."""
    return [
        TensorSlice(name, columns=(1024 * rank, 1024 * (rank + 1)))
        if number % 2
        else TensorSlice(name, rows=(512 * rank, 512 * (rank + 1)))
        for number, name in enumerate(tensor_locations(files))
    ]


_RANK = """
import sys
import threading
from pathlib import Path
sys.path.insert(0, {root!r})
from engine.loading import LoadReport, read_pieces
from tests.engine.loading.test_loading import halves
files, rank = [Path(sys.argv[1])], int(sys.argv[2])
report = LoadReport.before(files)
print("ready", flush=True)
sys.stdin.readline()
for _ in read_pieces(files, halves(files, rank), local_rank=rank, local_ranks=2, report=report):
    pass
print(report.asked_bytes, report.device_bytes, report.checkpoint_bytes, report.page_cache, flush=True)
"""


def test_two_ranks_ask_for_half_each_and_the_device_delivers_each_byte_once(large: Path) -> None:
    if evict([large]) != 0.0:
        pytest.skip("the temporary folder's file system does not leave the page cache")
    code = _RANK.format(root=str(Path(__file__).parents[3]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(large), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    lines = [rank.communicate("go\n", timeout=600)[0].split() for rank in ranks]
    checkpoint = 16 * 1024 * 2048 * 2
    for line in lines:
        assert line[0] == str(checkpoint // 2)
        assert line[2:] == [str(checkpoint), "cold"]
    from_device = sum(int(line[1]) for line in lines)
    assert 0.99 * checkpoint <= from_device <= 1.05 * checkpoint


def test_states_of_the_page_cache_are_made_and_seen(large: Path) -> None:
    if evict([large]) != 0.0:
        pytest.skip("the temporary folder's file system does not leave the page cache")
    assert LoadReport.before([large]).page_cache == "cold"
    with large.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.seek(0)
        file.read(32 << 20)
    share = cached_share([large])
    assert share is not None and 0.4 < share < 0.6 and state_of(share) == "partly"
    assert warm([large]) == 1.0
    report = LoadReport.before([large])
    assert report.page_cache == "warm"
    assert len(list(read_pieces([large], halves([large], 0), report=report))) == 16
    assert report.device_bytes == 0 and report.seconds > 0
    assert raw_read_seconds([large]) > 0
    assert cached_share([]) == 1.0


def test_a_file_system_that_has_nothing_to_write_back_is_evicted_too() -> None:
    """fsync fails on squashfs, as on /proc: nothing of an image could be measured cold."""
    with Path("/proc/version").open("rb") as file, pytest.raises(OSError, match="Invalid argument"):
        os.fsync(file.fileno())
    assert evict([Path("/proc/version")]) == 1.0  # of no pages


def test_what_the_kernel_hides_is_unknown(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loading.page_cache.os.geteuid", lambda: 12345)
    monkeypatch.setattr("engine.loading.page_cache.os.access", lambda path, mode: False)
    assert cached_share([large]) is None
    assert LoadReport.before([large]).page_cache is None


def test_the_kind_of_file_system_is_read_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network_file_system(Path("/proc")) is None
    assert network_file_system(Path("/does/not/exist")) is None
    monkeypatch.setitem(access._NETWORK, 0x9FA0, "proc")  # PROC_SUPER_MAGIC
    assert network_file_system(Path("/proc")) == "proc"


def test_shares_of_the_read_ahead_cover_the_plan_once(monkeypatch: pytest.MonkeyPatch, large: Path) -> None:
    size = large.stat().st_size
    plan = [(large, [(100, WINDOW_BYTES + 5), (2 * WINDOW_BYTES - 9, size)])]
    asked: list[tuple[int, int]] = []

    def sendfile(nowhere: int, file: int, first: int, length: int) -> int:
        asked.append((first, first + length))
        return length

    monkeypatch.setattr(os, "sendfile", sendfile)
    for share in range(3):
        before = len(asked)
        with ReadAhead(plan, share, 3) as ahead:
            ahead._thread.join()
        assert len(asked) > before, "every rank has something to do"
    assert merged_extents(asked) == plan[0][1]
    assert sum(end - begin for begin, end in asked) == sum(end - begin for begin, end in plan[0][1])


def test_the_read_ahead_waits_for_the_reader(monkeypatch: pytest.MonkeyPatch, large: Path) -> None:
    asked: list[int] = []
    monkeypatch.setattr("engine.loading.read_ahead.AHEAD_BYTES", 2 * WINDOW_BYTES)

    def sendfile(nowhere: int, file: int, first: int, length: int) -> int:
        asked.append(first)
        return length

    monkeypatch.setattr(os, "sendfile", sendfile)
    with ReadAhead([(large, [(0, 6 * WINDOW_BYTES)])], 0, 1) as ahead:
        ahead._thread.join(timeout=0.3)
        assert ahead._thread.is_alive() and max(asked) < 2 * WINDOW_BYTES
        ahead.passed(4 * WINDOW_BYTES)
        ahead._thread.join(timeout=600)
        assert not ahead._thread.is_alive() and max(asked) >= 5 * WINDOW_BYTES


def test_the_read_ahead_fills_the_page_cache(large: Path) -> None:
    if evict([large]) != 0.0:
        pytest.skip("the temporary folder's file system does not leave the page cache")
    size = large.stat().st_size
    with ReadAhead([(large, [(0, size)])], 0, 1) as ahead:
        ahead._thread.join()
    assert cached_share([large]) > 0.95, "all of it; a machine short of memory takes single pages back"


def test_a_reader_that_stops_early_leaves_no_thread(large: Path) -> None:
    evict([large])
    reading = read_pieces([large], halves([large], 0))
    next(reading)
    reading.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]
