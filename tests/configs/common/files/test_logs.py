"""A log that grows too large keeps its end, and its writers go on."""

import subprocess
from pathlib import Path

import pytest

from configs.common.files import logs
from configs.common.files.logs import cut_log


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 100)
    monkeypatch.setattr(logs, "KEPT_BYTES", 40)


def test_its_end_is_kept_from_a_whole_line_on(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(f"line {number:04}\n" for number in range(11)))
    cut_log(log)
    assert log.read_text() == "line 0008\nline 0009\nline 0010\n"
    cut_log(log)  # it is small now
    assert log.read_text() == "line 0008\nline 0009\nline 0010\n"


def test_a_line_without_an_end_is_cut_within(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"x" * 101)
    cut_log(log)
    assert log.read_bytes() == b"x" * 40


def test_who_writes_to_it_goes_on_behind_what_is_left(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("ab") as out:
        writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=out)
    assert writer.stdin is not None
    out_of = (b"a" * 99 + b"\n") * 2
    writer.stdin.write(out_of)
    writer.stdin.flush()
    while log.stat().st_size < len(out_of):
        pass
    cut_log(log)
    writer.communicate(b"further\n")
    assert log.read_bytes() == b"a" * 39 + b"\nfurther\n"


def test_one_that_is_missing_or_no_file_is_left_alone(tmp_path: Path) -> None:
    cut_log(tmp_path / "none.log")
    assert not (tmp_path / "none.log").exists()
    cut_log(tmp_path)
