"""Points of one curve whose attention or decode steps ran on different kernels are named in the report."""

from pathlib import Path

from reports.experiments.kernels import different_kernels, without_kernels
from reports.reading.devices import load_comparable
from reports.render import render_report
from tests.support.run_folders.made_studies import run_in_environments

STRONG = """
workload: {kind: generate, prompts: null, num_prompts: 8, prompt_tokens: 10, batch_size: 1, new_tokens: 8}
experiments: {strong: {kind: strong, grow: dp, to: 4}}
"""
FLASH, MATH = {"attention_prefill": "flash_attention"}, {"attention_prefill": "math"}


def test_points_of_one_kernel_or_of_unknown_ones_are_not_named(tmp_path: Path) -> None:
    for place, environments in enumerate(([FLASH] * 3, [FLASH, {}, FLASH], [{"attention_prefill": None}] * 3)):
        run, _ = run_in_environments(tmp_path / str(place), STRONG, [dict(one) for one in environments])
        assert different_kernels(load_comparable(run)) == []


def test_points_of_different_kernels_are_named(tmp_path: Path) -> None:
    run, plan = run_in_environments(tmp_path, STRONG, [dict(FLASH), dict(FLASH), {**MATH, "cuda_graphs": False}])
    study = load_comparable(run)
    one, two, four = (study.cells[key].name for key in plan.cells)
    (line,) = different_kernels(study)
    assert line == f"strong: tiny: attention of prompts: flash_attention at {one} and {two} and math at {four}"
    render_report(run)
    assert "Points of one curve ran on different kernels:" in (run.folder / "report.md").read_text()


def test_steps_with_and_without_graphs_are_named(tmp_path: Path) -> None:
    graphs = [{"cuda_graphs": True}, {"cuda_graphs": False}, {"cuda_graphs": False}]
    run, _ = run_in_environments(tmp_path, STRONG, [dict(one) for one in graphs])
    (line,) = different_kernels(load_comparable(run))
    assert "decode steps: CUDA graphs at" in line and "no CUDA graphs at" in line


def test_measurements_without_compiled_kernels_are_counted_with_the_reason(tmp_path: Path) -> None:
    why = "linear.c: no C compiler: cc: No such file or directory"
    environments = [{"cpu_kernels_why_not": why}, {}, {"cpu_kernels_why_not": why}]
    run, _ = run_in_environments(tmp_path, STRONG, [dict(one) for one in environments])
    study = load_comparable(run)
    number = sum(len(result.completed) for result in study.cells.values())
    assert without_kernels(study) == f"{2 * number // 3} of {number} measurements ({why})"
    render_report(run)
    assert "Without compiled kernels:" in (run.folder / "report.md").read_text()
