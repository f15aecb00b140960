"""Sockets of a server lie where their paths are short, in a folder that nobody else may enter."""

import os
from pathlib import Path

import pytest

from engine.serving.socket_folder import make_private, socket_folder


def test_however_long_the_servers_folder_is_a_sockets_path_fits(tmp_path: Path) -> None:
    server = tmp_path / ("long" * 60)
    folder = socket_folder(str(server))
    assert folder == socket_folder(str(tmp_path / "." / server.name)) != socket_folder(str(tmp_path / "other"))
    assert len(os.fsencode(folder / "replica-63.sock")) <= 107


def test_a_folder_is_used_again_after_a_kill(tmp_path: Path) -> None:
    make_private(tmp_path / "own")
    make_private(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_could_have_made_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    for folder in (open_to_all, link):
        with pytest.raises(PermissionError, match="belongs to another user or is open to others"):
            make_private(folder)


def test_where_nothing_can_be_written_into_tmp_the_temporary_folder_takes_the_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with a read-only root, whose only writable folder TMPDIR names."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/tmp" and access(path, mode))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = socket_folder("/srv/models")
    make_private(folder)
    assert folder.parent == tmp_path
