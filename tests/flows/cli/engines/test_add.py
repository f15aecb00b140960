"""`rankwise engine add`: environments that are there survive what cannot be installed."""

import errno
import fcntl
import os
import shutil
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.serving.installations import installation, unfinished_mark
from flows.cli.engines import command
from flows.cli.main import app


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment from before, and requirements that nobody can install."""
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path))
    monkeypatch.setitem(command.PINNED, "transformers", (str(tmp_path / "missing.whl"),))
    python = tmp_path / "engines" / "transformers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("of before")
    return python


def test_an_environment_that_is_there_is_not_replaced_unasked(there: Path) -> None:
    with pytest.raises(ValueError, match="Use --again"):
        command._add("transformers", again=False)


@pytest.mark.slow
def test_what_cannot_be_installed_leaves_the_environment_of_before(there: Path) -> None:
    with pytest.raises(OSError, match="transformers: could not be installed"):
        command._add("transformers", again=True)
    assert there.read_text() == "of before"
    assert sorted(path.name for path in there.parents[2].iterdir()) == [".transformers.lock", "transformers"]


def test_an_installation_that_was_killed_gives_way_to_the_environment_of_before(there: Path) -> None:
    folder = there.parents[1]
    folder.rename(folder.with_name(".transformers.before"))
    folder.mkdir()  # a part of the new one
    with pytest.raises(ValueError, match="installed already"):
        command._add("transformers", again=False)
    assert there.read_text() == "of before"


def test_an_installation_that_was_killed_is_none(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first one: its part was listed as installed, and used by studies."""
    folder, marks = there.parents[1], []

    def install(name: str, folder: Path) -> None:
        marks.append(listed())
        assert installation({}, name, there.parents[3]).python is None
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").write_text("new")

    def listed() -> str:
        return CliRunner().invoke(app, ["engine", "list"]).stdout.splitlines()[-1]

    unfinished_mark("transformers", there.parents[3]).touch()
    assert listed() == "transformers  not installed"
    monkeypatch.setattr(command, "_install", install)
    assert command._add("transformers", again=False) == 0
    assert there.read_text() == "new" and listed() == f"transformers  {folder}"
    assert marks == ["transformers  not installed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_part_of_an_environment(
    there: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """As of a terminal that is closed."""

    def install(name: str, folder: Path) -> None:
        folder.mkdir()
        signal.raise_signal(number)
        raise AssertionError("it goes on")

    shutil.rmtree(there.parents[1])
    monkeypatch.setattr(command, "_install", install)
    before = signal.signal(number, lambda *_: None)  # SIGHUP is ignored where nohup runs the tests
    try:
        with pytest.raises(KeyboardInterrupt):
            command._add("transformers", again=False)
    finally:
        signal.signal(number, before)
    assert sorted(path.name for path in there.parents[2].iterdir()) == [".transformers.lock"]


def test_two_commands_do_not_install_into_one_folder(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second took the first for killed, and removed what it was making."""

    def install(name: str, folder: Path) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").write_text("new")
        for again in (False, True):
            with pytest.raises(ValueError, match="another `rankwise engine add` is installing it"):
                command._add("transformers", again)

    monkeypatch.setattr(command, "_install", install)
    assert command._add("transformers", again=True) == 0
    assert there.read_text() == "new"


def test_an_environment_that_was_half_removed_does_not_come_back(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(name: str, folder: Path) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").write_text("new")

    monkeypatch.setattr(command, "_install", install)
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: None)  # killed while it removes
    assert command._add("transformers", again=True) == 0
    with pytest.raises(ValueError, match="installed already"):
        command._add("transformers", again=False)
    assert there.read_text() == "new"


def test_a_cache_without_locks_is_said_with_what_to_do(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match=r"engines: this file system has no locks .* set RANKWISE_CACHE"):
        command._add("transformers", again=True)
    assert there.read_text() == "of before"


def test_standard_output_has_the_path_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What pip prints was before it, so that no script could take it."""
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path))
    program = tmp_path / "program"
    program.write_text(
        f'#!/bin/sh\necho noise\n[ "$3" = pip ] || (mkdir -p "$4/bin" && cp {program} "$4/bin/python")\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    assert command._add("transformers", again=False) == 0
    out, err = capfd.readouterr()
    assert out == f"{tmp_path}/engines/transformers/bin/python\n" and err.count("noise") == 2
