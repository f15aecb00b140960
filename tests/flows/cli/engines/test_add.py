"""`rankwise engine add`: environments that are there survive what cannot be installed."""

from pathlib import Path

import pytest

from flows.cli.engines import command


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


def test_what_cannot_be_installed_leaves_the_environment_of_before(there: Path) -> None:
    with pytest.raises(OSError, match="transformers: could not be installed"):
        command._add("transformers", again=True)
    assert there.read_text() == "of before"
    assert [path.name for path in there.parents[2].iterdir()] == ["transformers"]


def test_an_installation_that_was_killed_gives_way_to_the_environment_of_before(there: Path) -> None:
    folder = there.parents[1]
    folder.rename(folder.with_name(".transformers.before"))
    folder.mkdir()  # a part of the new one
    with pytest.raises(ValueError, match="installed already"):
        command._add("transformers", again=False)
    assert there.read_text() == "of before"


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
