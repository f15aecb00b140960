"""Files that others may have written: read within bounds, or refused in a sentence that names the file."""

import io
import json
import os
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel, Field

from configs.common.base import write_atomically
from configs.common.files.reading import (
    MAX_JSON_VALUES,
    as_model,
    open_regular,
    parse_json,
    parse_model,
    read_bytes,
    read_json_object,
    read_model,
    read_tail,
    read_text,
)
from configs.plans.job import Progress
from configs.plans.plan import Plan
from configs.records.samples import DamagedSamplesError, read_archive

PROGRESS = Progress(rank=0, pid=1, pid_started=2, phase="ready", since=3.0)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50 << 30)


UNUSUAL = [
    (pipe, "is a named pipe"),
    (device, "is a device"),
    (folder, "is a folder"),
    (sparse, "53,687,091,200 bytes"),
]


@pytest.mark.parametrize(("make", "why"), UNUSUAL, ids=lambda case: getattr(case, "__name__", ""))
def test_nothing_but_a_regular_file_of_its_size_is_read(tmp_path: Path, make: object, why: str) -> None:
    path = tmp_path / "r0-a1.json"
    make(path)  # type: ignore[operator]
    began = time.process_time()
    for read in (read_bytes, read_text, read_json_object, lambda path: read_model(path, Progress)):
        with pytest.raises(ValueError, match=rf"r0-a1\.json: {why}, expected"):
            read(path)
    with pytest.raises(
        DamagedSamplesError, match=r"r0-a1\.json: .*expected" if make is not sparse else "bytes, expect"
    ):
        read_archive(path)
    assert time.process_time() - began < 10


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_model(tmp_path / "none.json", Progress)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not JSON"),
        (b'{"rank": ' + b"[" * 100_000, "nested more than 200 levels deep"),
        (b'{"rank": ' + b"9" * 5000 + b"}", "a number is too long"),
        (b'{"rank": ' + b"9" * 400 + b"}", "a whole number of more than 64 bits"),
        (b"[" + b"[]," * MAX_JSON_VALUES + b"[]]", "more than 5,000,000 values"),
        (b'{"rank": "\xff"}', "not JSON"),
    ],
    ids=["empty", "nested", "long number", "large number", "many values", "not UTF-8"],
)
def test_json_is_bounded(text: bytes, why: str) -> None:
    for read in (lambda: parse_json(text, "plan.json"), lambda: parse_model(text, Progress, "plan.json")):
        with pytest.raises(ValueError, match=rf"^plan\.json: .*{why}") as caught:
            read()
        assert len(str(caught.value)) < 300


def test_numbers_as_files_of_ours_have_them() -> None:
    given = {"counter": 2**64 - 1, "share": 0.1 + 0.2, "digits": "12345678901234567890123", "list": [1, -1.5e300]}
    assert parse_json(json.dumps(given).encode(), "file") == given


def test_numbers_as_files_of_others_have_them() -> None:
    given = {"model_max_length": 10**30}
    assert parse_json(json.dumps(given).encode(), "file", bounded=False) == given


def test_errors_of_fields_are_ours_and_short(tmp_path: Path) -> None:
    path = tmp_path / "progress_0.json"
    path.write_text(json.dumps({"rank": "\x1b[31m" * 10_000, "phase": "x", "pid": 1, "more": 1, "since": []}))
    with pytest.raises(ValueError, match=r"progress_0\.json: rank: ") as caught:
        read_model(path, Progress)
    message = str(caught.value)
    assert "pydantic" not in message and "\x1b" not in message and len(message) < 1000
    assert message.endswith("; and 2 more problems")
    path.write_text(json.dumps(["x"] * 5000))
    with pytest.raises(ValueError, match=r"progress_0\.json: "):
        read_model(path, Progress)
    with pytest.raises(ValueError, match=r"^plan\.json: .* fields are wrong$"):
        parse_model(b'{"cells": {' + b",".join(b'"%d": 1' % key for key in range(2000)) + b"}}", Plan, "plan.json")


def test_padding_of_blocks_written_in_place_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "progress_0.json"
    path.write_bytes(PROGRESS.model_dump_json().encode().ljust(4096, b" ") + b"\0" * 10)
    assert read_model(path, Progress) == PROGRESS


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    with path.open("wb") as file:
        file.truncate(50 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"the end \xff")
    assert read_tail(path, 9) == "the end \ufffd"


def archive_with(path: Path, header: bytes, body: bytes = b"", compressed: bool = False) -> Path:
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        archive.writestr("0/pass_seconds.npy", content)
    return path


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }\n",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (9" + b"9" * 5000 + b",), }\n",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n",
        b"{'descr': '<f3', 'fortran_order': False, 'shape': (1,), }\n",
        b"(" * 60_000,
        b"-" * 60_000 + b"1",
    ],
    ids=["10^15", "10^5000", "objects", "f3", "parentheses", "minuses"],
)
def test_a_header_is_judged_before_anything_is_allocated(tmp_path: Path, header: bytes, compressed: bool) -> None:
    path = archive_with(tmp_path / "r0-a1.npz", header, bytes(8), compressed)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedSamplesError, match=r"r0-a1\.npz: .*0/pass_seconds: not a one-dimensional column"):
            read_archive(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_zip_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r0-a1.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("0/a.npy", "w") as member:
        for _ in range(300):
            member.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DamagedSamplesError, match="unpacked more than 268,435,456 bytes"):
        read_archive(path)


def test_members_may_not_overlap(tmp_path: Path) -> None:
    """Thousands of entries that name the same bytes would take as many passes over them."""
    whole = io.BytesIO()
    np.savez(whole, **{"0/a": np.zeros(100_000)})
    data = whole.getvalue()
    begin = data.index(b"PK\x01\x02")
    end = data.index(b"PK\x05\x06")
    entry, count = data[begin:end], 1000
    tail = bytearray(data[end:])
    tail[8:12] = count.to_bytes(2, "little") * 2
    tail[12:16] = (len(entry) * count).to_bytes(4, "little")
    path = tmp_path / "r0-a1.npz"
    path.write_bytes(data[:begin] + entry * count + tail)
    began = time.process_time()
    with pytest.raises(DamagedSamplesError):
        read_archive(path)
    assert time.process_time() - began < 10


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    """`--output /dev/stdout` or `--output >(jq .)`: root replaced the device by a file, others were refused."""
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(fifo, "text")
        assert fifo.is_fifo() and os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    reader, writer = os.pipe()
    try:
        write_atomically(Path(f"/dev/fd/{writer}"), "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_file_behind_a_descriptor_keeps_what_was_printed(tmp_path: Path) -> None:
    """As `rankwise list-nodes --output /dev/stdout > FILE`."""
    with (tmp_path / "printed").open("wb", buffering=0) as printed:
        printed.write(b"a table\n")
        write_atomically(Path(f"/dev/fd/{printed.fileno()}"), "text")
    assert (tmp_path / "printed").read_text() == "a table\ntext"


def test_errors_of_writing_name_the_file_and_not_its_draft(tmp_path: Path) -> None:
    (tmp_path / "report.md").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(tmp_path / "report.md", "text")
    assert caught.value.filename == str(tmp_path / "report.md") and caught.value.filename2 is None
    with pytest.raises(FileNotFoundError) as missing:
        write_atomically(tmp_path / "none" / "report.md", "text")
    assert missing.value.filename == str(tmp_path / "none" / "report.md")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md"]


def test_the_number_of_entries_is_told_without_words_of_python() -> None:
    """It was `dictionary should have at least 1 item after validation, not 0`."""

    class Counted(BaseModel):
        few: dict[str, int] = Field(min_length=1)
        many: list[int] = Field(max_length=2)

    with pytest.raises(ValueError, match="few: expected at least 1 entry, got none; many: expected at most 2 entries"):
        as_model({"few": {}, "many": [1, 2, 3]}, Counted, "file")
