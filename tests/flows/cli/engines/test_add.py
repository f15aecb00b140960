"""`rankwise engine add`: environments that are there survive what cannot be installed."""

import errno
import fcntl
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.serving.installations import in_use, installation
from configs.spec.engines import EngineEnvironment
from flows.cli.engines import command
from flows.cli.main import app


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment from before, and requirements that nobody can install."""
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path))
    monkeypatch.setitem(command.PINNED, "transformers", (str(tmp_path / "missing.whl"),))
    made = tmp_path / "engines" / ".transformers.0123abcd"
    installed(made, "of before")
    made.with_name("transformers").symlink_to(made.name)
    return made.with_name("transformers") / "bin" / "python"


def installed(folder: Path, python: str = "new") -> None:
    """As `venv` and pip leave it."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(python)
    (folder / "pyvenv.cfg").touch()


def listed(there: Path) -> list[str]:
    """What lies in the folder of engines, with tokens left out."""
    names = (path.name for path in there.parents[2].iterdir())
    return sorted(re.sub(r"\.[0-9a-f]{8}$", ".*", name) for name in names)


AFTERWARDS = [".transformers.*", ".transformers.lock", "transformers"]


def test_an_environment_that_is_there_is_not_replaced_unasked(there: Path) -> None:
    with pytest.raises(ValueError, match="Use --again"):
        command._add("transformers", again=False)


@pytest.mark.slow
def test_what_cannot_be_installed_leaves_the_environment_of_before(there: Path) -> None:
    with pytest.raises(OSError, match="transformers: could not be installed"):
        command._add("transformers", again=True)
    assert there.read_text() == "of before"
    assert listed(there) == AFTERWARDS


def test_what_an_installation_that_was_killed_left_is_removed(there: Path) -> None:
    (there.parents[2] / ".transformers.89abcdef" / "bin").mkdir(parents=True)
    (there.parents[2] / ".transformers.89abcdef.link").symlink_to(".transformers.89abcdef")
    with pytest.raises(ValueError, match="installed already"):
        command._add("transformers", again=False)
    assert there.read_text() == "of before" and listed(there) == AFTERWARDS


def test_a_cache_that_is_reached_through_a_link_keeps_its_environment(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ~/.cache on a cluster's scratch disk: its paths are others than those that links lead to."""
    (tmp_path / "linked").symlink_to(there.parents[3])
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "linked"))
    with pytest.raises(ValueError, match="installed already"):
        command._add("transformers", again=False)
    assert there.read_text() == "of before" and listed(there) == AFTERWARDS


def test_a_server_that_runs_keeps_its_environment_until_it_has_ended(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--again` renamed it under the server, which then imported parts of the new one, or none."""
    monkeypatch.setattr(command, "_install", lambda name, folder: installed(folder))
    found = installation({}, "transformers", there.parents[3])
    with in_use(found) as held:
        assert command._add("transformers", again=True) == 0
        assert held.python is not None and Path(held.python).read_text() == "of before"
        assert there.read_text() == "new"
        assert f"{there.parents[2]}/.transformers.0123abcd: kept" in capsys.readouterr().err
    assert installation({}, "transformers", there.parents[3]) == found, "studies find it by the same path"
    assert command._add("transformers", again=True) == 0
    assert not Path(held.python).exists() and listed(there) == AFTERWARDS


def test_the_name_never_leads_nowhere_while_an_environment_is_replaced(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study that began meanwhile found no engine."""

    def install(name: str, folder: Path) -> None:
        assert there.read_text() == "of before"
        installed(folder)

    monkeypatch.setattr(command, "_install", install)
    assert command._add("transformers", again=True) == 0
    assert there.read_text() == "new" and there.parents[1].is_symlink()


def test_a_folder_that_somebody_made_is_not_replaced(there: Path) -> None:
    there.parents[1].unlink()
    installed(there.parents[1], "by hand")
    with pytest.raises(ValueError, match=r"is a folder, expected a link\. Remove it when no study uses it"):
        command._add("transformers", again=True)
    assert there.read_text() == "by hand"


def test_an_interpreter_that_the_study_names_is_used_as_it_is(tmp_path: Path) -> None:
    installed(tmp_path / "own")
    with in_use(EngineEnvironment(python=str(tmp_path / "own" / "bin" / "python"))) as held:
        assert held.python == f"{tmp_path}/own/bin/python"


def test_an_installation_that_is_under_way_is_none(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first one: its part was listed as installed, and used by studies."""
    folder, marks = there.parents[1], []

    def install(name: str, folder: Path) -> None:
        installed(folder)
        marks.append(shown())
        assert installation({}, name, there.parents[3]).python is None

    def shown() -> str:
        return CliRunner().invoke(app, ["engine", "list"]).stdout.splitlines()[-1]

    folder.unlink()
    assert shown() == "transformers  not installed"
    monkeypatch.setattr(command, "_install", install)
    assert command._add("transformers", again=False) == 0
    assert there.read_text() == "new" and shown() == f"transformers  {folder}"
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

    shutil.rmtree(there.parents[1].resolve())
    there.parents[1].unlink()
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
        installed(folder)
        for again in (False, True):
            with pytest.raises(ValueError, match="another `rankwise engine add` is installing it"):
                command._add("transformers", again)

    monkeypatch.setattr(command, "_install", install)
    assert command._add("transformers", again=True) == 0
    assert there.read_text() == "new"


def test_an_environment_that_was_half_removed_does_not_come_back(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_install", lambda name, folder: installed(folder))
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
