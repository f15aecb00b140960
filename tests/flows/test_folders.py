"""Folders of the user: what the environment names, and what happens without a home."""

import pwd
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.folders import cache_folder, rented_folder
from flows.server.settings import api_named_by_environment


@pytest.fixture(autouse=True)
def no_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANKWISE_CACHE", "RANKWISE_DATA", "XDG_CACHE_HOME", "XDG_DATA_HOME", "PREFECT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/ada")


def test_a_home_in_the_environment_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of variables has no shell that replaces it: a folder called `~` was made where the user stood."""
    monkeypatch.setenv("RANKWISE_CACHE", "~/scratch/models")
    monkeypatch.setenv("RANKWISE_DATA", "~/scratch/data")
    assert cache_folder() == Path("/home/ada/scratch/models")
    assert rented_folder() == Path("/home/ada/scratch/data/rented")


@pytest.mark.parametrize("given", ["", "cache", "./cache"])
def test_a_relative_folder_of_xdg_is_ignored(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """As the specification wants it. Ranks in another working directory looked for their models elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("XDG_DATA_HOME", given)
    assert cache_folder() == Path("/home/ada/.cache/rankwise")
    assert rented_folder() == Path("/home/ada/.local/share/rankwise/rented")


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize(
    "words",
    [["catalog", "list"], ["deployments"], ["doctor"], ["engine", "list"], ["nodes", "down", "r"], ["team", "status"]],
)
def test_without_a_home_one_line_says_what_to_set(words: list[str]) -> None:
    """As in a container whose user has no entry in passwd: each was a traceback."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code in (1, 2)
    assert done.stderr == "HOME: not set, and this user has no home folder. Set HOME to a folder\n"


@pytest.mark.usefixtures("no_home")
def test_folders_that_are_named_need_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    for name in ("PREFECT_API_URL", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == tmp_path / "cache" and rented_folder() == tmp_path / "data" / "rented"
    assert api_named_by_environment() is None
    assert CliRunner().invoke(app, ["engine", "list"]).exit_code == 0
