"""Repeats are added until they would settle nothing more of the decision, for real."""

from pathlib import Path

import pytest

from tests.support.run_folders.studies import rankwise, status, write_study

MEASURING = {"repeats": 1, "memory": False, "min_seconds": 0.0, "min_passes": 1, "cell_timeout_seconds": 60}


def scaling(seconds: float) -> dict[str, object]:
    """One rank against two, each of which sleeps so long for its items."""
    return {"kind": "strong", "grow": "dp", "to": 2, "base": {"items": 2, "seconds": seconds}}


@pytest.mark.slow
def test_repeats_are_added_until_nothing_more_would_be_settled(tmp_path: Path) -> None:
    """Two ranks do no more work each than one, and one repeat tells nothing of that: six give an interval."""
    study = write_study(
        tmp_path, experiments={"strong": scaling(0.05)}, measuring=MEASURING | {"max_repeats": 6}, pack=False
    )
    done = rankwise("run", study, "--until-decided", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    repeats = max(row["repeat"] for row in status(tmp_path / "runs" / "s")) + 1
    if "Undecided: measuring 6 repeats instead of 1" in done.stdout:
        assert repeats == 6
        assert done.stdout.rstrip().splitlines()[-1].startswith(("Decided: ", "Undecided after 6 repeats"))
    else:  # the one pair of repeats lay clearly below
        assert repeats == 1 and "Decided: " in done.stdout
    again = rankwise("run", study, "--until-decided", "--set", f"measuring.repeats={repeats}", cwd=tmp_path)
    assert (
        again.returncode == 0 and f"{2 * repeats} of {2 * repeats} measurements were already completed" in again.stdout
    )
