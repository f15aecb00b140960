"""A record without a measured step cannot be read: every timed run leaves one after its warm-up, resumed ones too."""

from pathlib import Path
from typing import Any

import pytest

from engine.context import RankResult
from engine.workloads import train
from tests.support.training.training_tasks import made_context, write_inputs

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(folder: Path, **work: Any) -> RankResult:
    """One attempt at a measurement with a step of warm-up; the next one in this folder finds its checkpoints."""
    context = made_context(folder, "llama", **work)
    return train.run(context.job.measurements[0], context)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_inputs(tmp_path / "inputs")
    return tmp_path


@pytest.mark.parametrize(
    "work",
    [
        {"max_period_seconds": 1e-6, "checkpoint_every": 1},
        {"steps": 9, "target_loss": 99.0, "heldout_share": 0.1, "evaluate_every": 1, "checkpoint_every": 1},
    ],
)
def test_a_bound_that_is_reached_in_the_warmup_leaves_a_step(work: dict[str, Any], folder: Path) -> None:
    first, resumed = trained(folder, **work), trained(folder, **work)
    assert (len(first.samples["step_seconds"]), first.figures["steps"]) == (1, 2)
    assert (len(resumed.samples["step_seconds"]), resumed.figures["steps"]) == (1, 4)
    assert resumed.figures["resumed_from_step"] == 2


@pytest.mark.parametrize(("every", "resumed_from"), [(4, 4), (7, None), (3, 6)])
def test_a_run_that_had_made_its_steps_resumes_where_some_are_left(
    every: int, resumed_from: int | None, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As after a rank that was lost while it evaluated, or exported, the trained model."""
    work = {"steps": 8, "checkpoint_every": every, "checkpoint_mode": "sync"}
    first, resumed = trained(folder, **work), trained(folder, **work)
    assert resumed.figures["resumed_from_step"] == resumed_from
    assert len(resumed.samples["step_seconds"]) == 8 - (resumed_from or 0) - 1 and resumed.figures["tokens_per_step"]
    assert resumed.samples["loss"].tolist() == first.samples["loss"].tolist()
    skipped = f"checkpoint of step {8 // every * every}: skipped, it leaves no step to measure"
    assert (skipped in capfd.readouterr().err) is (every != 3)
