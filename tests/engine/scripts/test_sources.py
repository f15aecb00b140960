"""Figures of TensorBoard's event files and of JSON, each against the real thing, and how ranks ended."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from configs.workloads.script import ScriptWorkload
from configs.workloads.script_figures import JsonFigures
from engine.scripts import event_files, json_output
from engine.scripts.series import NoFiguresError
from engine.scripts.signs import rank_end


@pytest.mark.slow
def test_event_files_of_torchs_own_writer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = """
import sys
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(sys.argv[1])
for step in range(0, 50, 10):
    writer.add_scalar("train/loss", 5.0 - step / 10, step, walltime=1000.0 + step * 0.5)
    writer.add_scalar("lr", 0.1, step, walltime=1.0)
    writer.add_scalar("new", step, step, walltime=7.0 + step, new_style=True)
writer.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True, timeout=600)
    assert event_files.scalars(tmp_path, "train/loss") == [
        (step, 1000 + step / 2, 5 - step / 10) for step in range(0, 50, 10)
    ]
    assert [value for _, _, value in event_files.scalars(tmp_path, "new")] == [0, 10, 20, 30, 40]
    series = event_files.series_of_events(tmp_path, "train/loss", None)
    assert series.seconds == [0.5] * 40 and series.losses[0] == 4.0
    # Of another run, such as those that came with the inputs.
    earlier = event_files.LastStep(tmp_path, "train/loss")
    assert earlier.look() == len(event_files.series_of_events(tmp_path, "train/loss", None, earlier.earlier)) == 0
    whole = next(tmp_path.glob("*tfevents*"))
    growing = tmp_path / "growing"
    growing.mkdir()
    last, seen, content = event_files.LastStep(growing, "train/loss"), [], whole.read_bytes()
    for place in range(0, len(content), 7):
        with (growing / "events.out.tfevents.1").open("ab") as file:
            file.write(content[place : place + 7])
        seen.append(last.look())
    assert seen == sorted(seen) and set(seen) == {0, 10, 20, 30, 40}
    shutil.rmtree(growing)
    # Damaged, endless and foreign files are no scalars.
    (tmp_path / "cut.tfevents.1").write_bytes(whole.read_bytes()[:100])
    (tmp_path / "junk.tfevents.2").write_bytes(b"\xff" * 5000)
    os.mkfifo(tmp_path / "pipe.tfevents.3")
    assert len(event_files.scalars(tmp_path, "train/loss")) == 5


def test_scalars_beside_gigabytes_of_videos(tmp_path: Path) -> None:
    """A file of more than 512 MiB had no steps, and one with a large event none behind it."""

    def scalar(step: int) -> bytes:
        value = b"\x0a\x04loss" + b"\x15" + struct.pack("<f", 5.0 - step)
        summary = b"\x0a" + bytes([len(value)]) + value
        event = b"\x09" + struct.pack("<d", 1000.0 + step) + b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)])
        event += summary
        return struct.pack("<Q", len(event)) + b"\0" * 4 + event + b"\0" * 4

    path, last = tmp_path / "events.out.tfevents.1", event_files.LastStep(tmp_path, "loss")
    with path.open("wb") as file:
        file.write(scalar(1))
        for step in (2, 3):
            file.write(struct.pack("<Q", 700 << 20) + b"\0" * 4)
            file.seek((700 << 20) + 4, os.SEEK_CUR)  # a hole: it takes no room on the disk
            file.write(scalar(step))
    assert path.stat().st_size > 1 << 30
    assert event_files.scalars(tmp_path, "loss") == [(step, 1000.0 + step, 5.0 - step) for step in (1, 2, 3)]
    assert last.look() == 2


@pytest.mark.parametrize("told", ['"12.5"', "-1", "true"])
@pytest.mark.parametrize("name", ["step_seconds", "units_per_second"])
def test_a_time_or_a_rate_that_is_no_number_fails_instead_of_being_replaced(name: str, told: str) -> None:
    asked = JsonFigures(figures={name: "took"})
    with pytest.raises(NoFiguresError, match=f"workload.json_figures.figures.{name}: expected a number"):
        json_output.series_of_json(asked, Path(), f'{{"took": {told}}}'.encode(), 60.0)


def test_a_time_of_zero_is_not_replaced_by_that_of_the_process() -> None:
    with pytest.raises(NoFiguresError, match="step_seconds: expected a number above 0, got 0"):
        json_output.series_of_json(JsonFigures(figures={"step_seconds": "took"}), Path(), b'{"took": 0}', 60.0)


def test_a_rank_s_rate_in_json_is_that_of_all_ranks_together() -> None:
    asked = JsonFigures(figures={"step_seconds": "took", "rank_units_per_second": "tps"})
    work = ScriptWorkload(command=("train.py",), measure="json", json_figures=asked)
    series = json_output.series_of_json(asked, Path(), b'{"took": 2.0, "tps": 50}', 60.0, ranks=4)
    assert work.counted == "token" and series.units == [400.0] and series.figures == {"rank_units_per_second": 50}


def test_names_of_json_may_have_dots(tmp_path: Path) -> None:
    """Of fio's percentiles it said that there is no figure."""
    told = b'{"jobs": [{"clat_ns": {"percentile": {"99.000000": 12, "99.900000": 34}}}]}'
    asked = JsonFigures(figures={"p99": "jobs.0.clat_ns.percentile.99.000000"})
    series = json_output.series_of_json(asked, tmp_path, told, 1.0)
    assert series.figures == {"p99": 12}
    with pytest.raises(NoFiguresError, match=r"no figure at jobs.0.clat_ns.percentile.98.0"):
        json_output.series_of_json(JsonFigures(figures={"p98": "jobs.0.clat_ns.percentile.98.0"}), tmp_path, told, 1.0)


def test_json_of_a_file_and_of_standard_output(tmp_path: Path) -> None:
    asked = JsonFigures(figures={"units_per_second": "jobs.0.read.bw", "version": "v"})
    document = {"v": "fio-3", "jobs": [{"read": {"bw": 50.0}}]}
    series = json_output.series_of_json(
        asked, tmp_path, b'log\n{"v": 0}\n' + json.dumps(document, indent=1).encode(), 4.0
    )
    assert (series.seconds, series.units) == ([4.0], [200.0])
    assert series.own_figures() == {"units_per_second": 50.0, "version": "fio-3"}
    with pytest.raises(
        NoFiguresError, match=r"workload.json_figures.figures.units_per_second: no figure at jobs.0.read.bw"
    ):
        json_output.series_of_json(asked, tmp_path, b'{"v": 1}', 1.0)
    with pytest.raises(NoFiguresError, match="no JSON document"):
        json_output.series_of_json(asked, tmp_path, b"[[[[ {\n{", 1.0)
    in_file = asked.model_copy(update={"file": "out.json"})
    (tmp_path / "out.json").write_text(json.dumps(document))
    before = json_output.state_of_file(in_file, tmp_path)
    with pytest.raises(NoFiguresError, match=r"out\.json was there before the script, which did not write it"):
        json_output.series_of_json(in_file, tmp_path, b"", 4.0, before)
    (tmp_path / "out.json").write_text(json.dumps(document) + "\n")
    assert json_output.series_of_json(in_file, tmp_path, b"", 4.0, before).units == [200.0]
    (tmp_path / "out.json").unlink()
    os.mkfifo(tmp_path / "out.json")
    with pytest.raises(NoFiguresError, match="named pipe"):
        json_output.series_of_json(in_file, tmp_path, b"", 1.0)


TRACEBACK = b"Traceback (most recent call last):\n  File\n"
OUT = TRACEBACK + b"torch.OutOfMemoryError: CUDA out of memory. Tried\n"
LINK = b"\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("code", "tail", "kind"),
    [
        (0, b"CUDA out of memory", None),
        # What a script caught and went on from is not its end; what its end came from is.
        (1, OUT + b"batch 8 instead of 16\n" + TRACEBACK + b"KeyError: 'loss'\n", "KeyError"),
        (1, b"CUDA out of memory, batch 8 instead of 16\n" + TRACEBACK + b"KeyError: 'loss'\n", "KeyError"),
        (1, OUT + LINK + TRACEBACK + b"RuntimeError: no step\n", "OutOfMemoryError"),
        (1, OUT + LINK + TRACEBACK + b"A: b\n" + LINK + TRACEBACK + b"RuntimeError: no step\n", "OutOfMemoryError"),
        (1, OUT + b"Exception ignored in: <function f>\n" + TRACEBACK + b"TypeError: x\n", "OutOfMemoryError"),
        (1, b"Exception in thread Thread-1:\n" + OUT + TRACEBACK + b"RuntimeError: it ended\n", "OutOfMemoryError"),
        (1, TRACEBACK + b"DistBackendError: NCCL error\nCuda failure 2 'out of memory'\n", "OutOfMemoryError"),
        (
            1,
            b"Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried",
            "OutOfMemoryError",
        ),
        (1, b"jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory", "OutOfMemoryError"),
        (1, b"Traceback (most recent call last):\n  File\nValueError: bad\n", "ValueError"),
        (
            1,
            b"Traceback (most recent call last):\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]",
            "PeerLost",
        ),
        (-15, b"", "PeerLost"),
        (-9, b"", "SIGKILL"),
        (-11, b"", "SIGSEGV"),
        (7, b"usage: x", "ExitCode"),
        (1, b"\xff\xfe\x00", "ExitCode"),
    ],
)
def test_ends_of_ranks(code: int, tail: bytes, kind: str | None) -> None:
    found = rank_end(code, tail)
    assert (found and found.kind) == kind
    if found is not None and kind == "OutOfMemoryError":
        assert re.search("(?i)out of memory", found.message), found.message


def test_secrets_in_a_scripts_last_words_are_hidden() -> None:
    found = rank_end(
        1, b"Traceback (most recent call last):\nValueError: https://user:hunter22@host failed token=abcdefgh"
    )
    assert found is not None and "hunter22" not in found.message and "abcdefgh" not in found.message
