"""A server's processes import the installed packages, wherever a user starts them."""

from pathlib import Path

import pytest

from configs.serving.settings import ServingSettings
from tasks.serving.process import ServerFailedError, ServerProcess


def test_a_folder_of_the_user_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "engine" / "__init__.py"
    own.parent.mkdir()
    own.write_text("open('imported', 'w').close()")
    monkeypatch.chdir(tmp_path)
    settings = ServingSettings(name="m", manifest="none.json", folder=str(tmp_path), max_length=8, blocks=8, port=0)
    with ServerProcess(settings, None) as server, pytest.raises(ServerFailedError):
        server.wait_until_ready()
    assert not (tmp_path / "imported").exists()
