"""Who held a run folder before."""

from pathlib import Path
from uuid import uuid4

from configs.plans.paths import RunPaths
from tasks.campaign.run_lock import run_lock


def test_a_flow_run_that_is_tried_again_is_not_the_lost_one_before_it(tmp_path: Path) -> None:
    run, first, other = RunPaths(tmp_path), uuid4(), uuid4()
    for holder, before in ((first, None), (first, None), (other, first), (None, other), (first, None)):
        with run_lock(run, holder) as held_before:
            assert held_before == before, (holder, before)
