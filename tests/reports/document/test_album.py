"""The figures of a report, and those of earlier ones, in the run folder alone."""

from pathlib import Path

from configs.plans.paths import RunPaths
from reports.document.album import Album


def test_figures_of_an_earlier_report_are_removed(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    Album(images={"old.png": b"1", "old.svg": b"2"}).write(run)
    (run.plots / "notes.txt").write_text("own")
    Album(images={"new.png": b"3"}).write(run)
    assert sorted(path.name for path in run.plots.iterdir()) == ["new.png", "notes.txt"]


def test_pictures_that_a_foreign_run_folder_links_to_stay(tmp_path: Path) -> None:
    """All pictures of the folder that `plots` led to were removed, and figures written there."""
    pictures, run = tmp_path / "pictures", RunPaths(tmp_path / "run")
    pictures.mkdir()
    run.folder.mkdir()
    (pictures / "own.png").write_bytes(b"own")
    run.plots.symlink_to(pictures)
    Album().write(run)
    assert not run.plots.exists()
    run.plots.symlink_to(pictures)
    Album(images={"a.png": b"1"}).write(run)
    assert [path.name for path in pictures.iterdir()] == ["own.png"]
    assert not run.plots.is_symlink() and [path.name for path in run.plots.iterdir()] == ["a.png"]
