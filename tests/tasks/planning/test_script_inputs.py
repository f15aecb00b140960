"""Studies of scripts that would measure nothing, or something else than is asked for, are refused before they start."""

from typing import Any

import pytest

from configs.spec.study import parse_study
from tasks.planning.script_inputs import misplaced

SLURM = {"kind": "slurm", "name": "cluster", "partition": "p", "nodes": 2, "ranks_per_node": 1}
WEAK = {"weak": {"kind": "weak", "grow": "dp", "to": 2}}
ONE = {"one": {"kind": "sweep", "over": {"dp": [1]}}}
COUNTED = {"items_per_step": "4 * {dp}", "unit": "sample"}


@pytest.mark.parametrize(
    ("work", "experiments", "targets", "problem"),
    [
        (
            {"launcher": "srun", **COUNTED},
            ONE,
            None,
            "workload.launcher: srun requires targets of kind slurm, got local",
        ),
        ({"launcher": "srun", **COUNTED}, ONE, [SLURM], ""),
        ({"measure": "wall"}, WEAK, None, "experiments.weak: throughput counts steps"),
        ({"measure": "wall"}, ONE, None, ""),
        ({"measure": "wall", **COUNTED}, WEAK, None, ""),
        ({"measure": "probe"}, WEAK, None, ""),
    ],
)
def test_misplaced_launchers_and_units(
    work: dict[str, Any], experiments: dict[str, Any], targets: list[dict[str, Any]] | None, problem: str
) -> None:
    study: dict[str, Any] = {"study": "s", "workload": {"kind": "script", "command": ["t.py"], **work}}
    study |= {"experiments": experiments} | ({} if targets is None else {"targets": targets})
    found = misplaced(parse_study(study))
    assert len(found) == bool(problem)
    assert all(text.startswith(problem) for text in found)
