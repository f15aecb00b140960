"""Write docs/measurements/gpu.md from result files: what was seen on which device and when, and what was not.

    cp -r results docs/measurements/gpu/h100-2026-12-01        # of one run of `make gpu-check`
    python -m benchmarks.gpu.reporting.document

Only the JSON files of results are read. A rehearsal's are refused: it says nothing of a GPU.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.catalog import CHECKS
from benchmarks.gpu.reporting.results import CheckResult, read_result
from benchmarks.gpu.reporting.table import markdown, summary

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "measurements" / "gpu.md"
RESULTS = ROOT / "docs" / "measurements" / "gpu"
READING = RESULTS / "reading.txt"
"""What the results say, in a person's words; part of the page."""

_HEAD = """# GPUs: seen and not seen

`make gpu-check` ([benchmarks/gpu](../../benchmarks/gpu/__init__.py)) runs every check that needs a GPU, the most
telling first. `make gpu-rehearsal` runs the same code on a CPU with tiny shapes.
`python -m benchmarks.gpu.reporting.document` writes this page from the result files in `docs/measurements/gpu`.
"""
_NEVER = """No check covers these, because one GPU cannot show them:

- NCCL between GPUs, tensor and pipeline parallelism over NVLink or PCIe
- several nodes with GPUs, InfiniBand
- AMD (ROCm) and Intel (XPU) devices
- MIG slices
"""


def page(runs: Mapping[str, Sequence[CheckResult]]) -> str:
    """Return the page. runs: results by the name of their folder."""
    parts = [_HEAD, "## Seen\n"]
    if not runs:
        parts.append("Nothing. No part of Rankwise has run on a GPU yet.\n")
    elif READING.exists():
        parts.append(READING.read_text())
    parts += [_run_section(name, results) for name, results in sorted(runs.items())]
    finished = {result.check for results in runs.values() for result in results if result.state == "finished"}
    missing = [f"- `{check.name}`: {check.title}\n" for check in CHECKS if check.name not in finished]
    parts.append("## Not seen\n")
    if missing:
        parts.append("Checks that have not finished on a GPU:\n")
        parts.append("".join(missing))
    parts.append(_NEVER)
    return "\n".join(parts)


def _run_section(name: str, results: Sequence[CheckResult]) -> str:
    order = [check.name for check in CHECKS]
    known = sorted(results, key=lambda result: order.index(result.check) if result.check in order else len(order))
    said = next((result.surroundings for result in known if result.surroundings), {})
    began = min(result.began for result in known)
    device = said.get("device", "unknown device")
    about = ", ".join(
        f"{key} {said[key]}" for key in ("memory_gib", "driver", "torch", "cuda", "python") if key in said
    )
    return f"### {name}\n\n{device}, {began}. {about}. {summary(known)}.\n\n{markdown(known)}\n"


def read_runs(folder: Path) -> dict[str, list[CheckResult]]:
    """Return the results in each folder below. Raises ValueError for what is no result, and for a rehearsal's."""
    runs = {}
    for run in sorted(path for path in folder.glob("*") if path.is_dir()):
        results = [read_result(path) for path in sorted(run.glob("*.json"))]
        if rehearsed := [result.check for result in results if result.rehearsal]:
            raise ValueError(f"{run}: results of a rehearsal ({', '.join(rehearsed)}). Remove them")
        if results:
            runs[run.name] = results
    return runs


def main() -> int:
    """Write the page. Returns 1 with a message if a file is no result."""
    try:
        PAGE.write_text(page(read_runs(RESULTS)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
