"""Run every server that installs here for real, through a study: `python -m benchmarks.serving.engines`.

Environments are those of `rankwise engine add`; what is missing is installed first. Each server must complete its cell,
answer every request, and give the same answers under load as alone, but for noise. Exit code 1 where one does not.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from configs.plans.paths import RunPaths
from flows.cli.engines.command import PINNED
from flows.folders import cache_folder
from reports.experiments.load.experiment import load_experiment
from reports.reading.load import load_run

ROOT = Path(__file__).parents[2]
RANKWISE = str(Path(sys.executable).parent / "rankwise")
TEXTS = ("def main():\n", "import os\n", "class Node:\n    def __init__(self", "for name in ", "x = [")


def main() -> int:
    """Install, run, and print a line for each server."""
    for name in PINNED:
        if not (cache_folder() / "engines" / name / "bin" / "python").exists():
            subprocess.run([RANKWISE, "engine", "add", name], check=True)
    folder = Path(tempfile.mkdtemp(prefix="rankwise-engines-"))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    (folder / "study.yaml").write_text(f"""
study: engines
models: [{{id: {ROOT / "configs" / "models" / "tiny-stdlib"}}}]
workload: {{kind: serve, prompts: prompts.jsonl, users: 2, new_tokens: 16, duration_seconds: 5, max_length: 256,
           max_sequences: 8, judged_requests: 3}}
targets: [{{kind: local, device: cpu}}]
measuring: {{repeats: 1}}
experiments:
  by_engine: {{kind: load, over: {{engine: [rankwise, {", ".join(PINNED)}]}}}}
  two_ranks: {{kind: load, base: {{tp: 2}}, over: {{engine: [rankwise, vllm]}}}}
""")
    subprocess.run([RANKWISE, "run", str(folder / "study.yaml"), "--runs", str(folder / "runs")], check=False)
    study = load_run(RunPaths(folder / "runs" / "engines"))
    failed = False
    for planned in study.plan.experiments:
        for point in load_experiment(study, planned).points:
            repeats = list(point.repeats.values())
            answered = bool(repeats) and all(one.figures.completed == one.figures.due > 0 for one in repeats)
            good = answered and point.correct and point.answers is not None
            failed |= not good
            told = f"{point.answers.equal} of {point.answers.compared} equal" if point.answers else point.result.status
            print(f"{planned.name:10} {point.label:22} {'works' if good else 'FAILS'}  {told}")
    print(f"report: {folder / 'runs' / 'engines' / 'report.md'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
