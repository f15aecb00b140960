"""Another engine across real nodes: DeepSpeed's tensor parallelism between two nodes, over gloo."""

from pathlib import Path

import pytest

from configs.plans.paths import RunPaths
from reports.reading.load import load_run
from tests.support.cluster.lab import Lab
from tests.support.run_folders.studies import rankwise, write_study

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_deepspeed_on_two_nodes_answers_like_transformers_on_one_rank(lab: Lab, tmp_path: Path) -> None:
    """Its operator for shared memory knows no hosts, so that ours turns it off there; else the answers are wrong."""
    pytest.importorskip("deepspeed")
    target = {"kind": "slurm", "name": "lab", "partition": "lab", "nodes": 2, "ranks_per_node": 1, "poll_seconds": 1}
    study = write_study(
        tmp_path,
        models=[{"id": "synthetic:llama-1m@0", "name": "tiny"}],
        workload={"kind": "generate", "prompt_tokens": 16, "new_tokens": 8, "num_prompts": 4},
        experiments={
            "speed": {"kind": "sweep", "over": {"tp": [2], "engine": ["rankwise", "deepspeed"]}},
            "answers": {"kind": "correctness", "prompts": 4, "layouts": [{"tp": 2}], "engines": ["deepspeed"]},
        },
        measuring={"min_seconds": 0.1, "cell_timeout_seconds": 120},
        targets=[{**target, "max_running": 1, "preflight": False}],
    )
    finished = rankwise("run", study, "--no-calibrate", cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    run = RunPaths(tmp_path / "runs" / "s")
    found = [
        reading
        for result in load_run(run).cells.values()
        if result.cell.engine == "deepspeed"
        for reading in result.measurements.values()
    ]
    assert len(found) == 2, "one measurement of speed, one of answers"
    assert all(sorted(reading.record.hosts) == sorted(lab.plan.node_names) for reading in found)
    report = (run.folder / "report.md").read_text()
    assert "deepspeed, tp=2, float32, differs from the reference by the noise of reduction order alone" in report
    assert "every token equal on 4 of 4 prompts" in report
