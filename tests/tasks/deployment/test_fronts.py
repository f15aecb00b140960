"""A front that takes its settings late."""

from pathlib import Path

import pytest

from configs.serving.deployment import FrontConfig
from tasks.deployment import fronts
from tasks.deployment.places import LocalPlace, PlaceError


@pytest.mark.parametrize("alive", [True, False])
def test_a_front_that_takes_its_settings_late_is_not_said_not_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    monkeypatch.setattr(fronts, "_APPLY_SECONDS", 0.05)
    monkeypatch.setattr(fronts.DeploymentFront, "is_alive", alive)
    front = fronts.DeploymentFront(LocalPlace(tmp_path, tmp_path), str(tmp_path))
    with pytest.raises(PlaceError) as caught:
        front.apply(FrontConfig(key="k"))
    said = "did not take its settings" if alive else "does not run, and did not start"
    assert f"the front {said} within 0.05 s" in str(caught.value.strerror)
