"""Times `rankwise plan` of a study of 10,000 cells, from the file to the printed table, in fresh processes.

    python -m benchmarks.planner.cells [--cells 10000] [--times 3]

The cells are a sweep over batch sizes, prompt lengths and new tokens of one model with random weights, planned twice:
by the measured operators of a calibration made up for the purpose (the speeds are nobody's; the work is the same), and
with what 150 records taught. The cache is a folder of its own.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs.hardware.calibration import MEASURED_FORMATS, CalibratedFigure, Calibration, Spread, calibration_path
from configs.spec.cell import Cell
from configs.workloads.generate import GenerateWorkload
from engine.planner.learning import Experience, Known, config_hash, experience_path, remember
from engine.planner.local import this_fingerprint

LIMIT_SECONDS = 3.0
_MODEL = "synthetic:llama-110m@0"
_ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
_PLAN = """
import sys
from pathlib import Path
from flows.cli.plan.study import plan_study
plan_study(Path(sys.argv[1]), [])
"""


def main(published: Path | None = None) -> int:
    """A part of `benchmarks.planner.bench`; needs nothing that was published."""
    return time_planning(10_000, 3)


def time_planning(cells: int, times: int, limit_seconds: float = LIMIT_SECONDS) -> int:
    """Print the seconds of each way of planning; 1 where the median of one is over the limit."""
    late = False
    with tempfile.TemporaryDirectory(prefix="rankwise-bench-") as name:
        folder = Path(name)
        study = folder / "big.yaml"
        study.write_text(study_text(cells))
        for title, records in (("nothing learnt yet", 0), ("learnt from 150 records", 150)):
            cache = folder / f"cache-{records}"
            prepare_cache(cache, records)
            seconds = [planning_seconds(study, cache) for _ in range(times)]
            middle = statistics.median(seconds)
            late = late or middle > limit_seconds
            print(
                f"rankwise plan, {cells} cells, {title}: {middle:.2f} s "
                f"({min(seconds):.2f} to {max(seconds):.2f}, {times} times; at most {limit_seconds:.0f} s)"
            )
    return 1 if late else 0


def study_text(cells: int) -> str:
    """A sweep of at least so many cells: 25 batch sizes x 20 prompt lengths x as many new tokens as it takes."""
    batches = [*range(1, 21), 24, 28, 32, 48, 64]
    prompts = [16 * length for length in range(1, 21)]
    tokens = list(range(1, max(1, -(-cells // (len(batches) * len(prompts)))) + 1))
    return (
        f"study: big\nmodels: [{{id: '{_MODEL}'}}]\nworkload: {{kind: generate}}\ndtype: bfloat16\nexperiments:\n"
        "  grid:\n    kind: sweep\n"
        f"    over: {{batch_size: {batches}, prompt_tokens: {prompts}, new_tokens: {tokens}}}\n"
    )


def planning_seconds(study: Path, cache: Path) -> float:
    """Of one process, its start included."""
    environment = os.environ | {"RANKWISE_CACHE": str(cache)}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", _PLAN, str(study)], env=environment, check=True, stdout=subprocess.PIPE)
    return time.perf_counter() - began


def prepare_cache(cache: Path, records: int) -> None:
    """A calibration of this machine with made-up speeds, and so many made-up records of it."""
    fingerprint = this_fingerprint()
    path = calibration_path(cache, fingerprint)
    path.parent.mkdir(parents=True)
    path.write_text(made_up_calibration().model_dump_json())
    if records:
        from configs.hardware.architectures import ARCHITECTURES

        config = ARCHITECTURES["llama-110m"]
        experiences = tuple(
            Experience(
                key=cell.key,
                cell=cell,
                config=config_hash(config),
                tokens_per_second=30.0 + number,
                measured_at=f"2026-01-01T00:00:{number:06d}",
            )
            for number in range(records)
            for cell in [Cell(model=_MODEL, workload=GenerateWorkload(batch_size=1 + number), dtype="bfloat16")]
        )
        remember(
            Known(experiences=experiences, configs={config_hash(config): config}), experience_path(cache, fingerprint)
        )


def made_up_calibration() -> Calibration:
    """Round figures of the right size, for this machine's fingerprint."""

    def made_up(seconds: float) -> CalibratedFigure:
        return CalibratedFigure(alone=Spread(median=seconds, low=seconds, high=seconds, rounds=1))

    figures = {"read": 1e-10, "operator": 5e-6, "layer": 3e-4, "step": 1e-4, "logit": 5e-9, "parameter": 1e-9}
    figures |= {"recorded_layer": 2e-5, "recorded_step": 3e-5}
    for number in MEASURED_FORMATS:
        figures |= {f"square/{number}": 1e-11, f"attention/{number}": 3e-11, f"context/{number}": 1e-10}
        figures |= {f"element/{number}": 1e-8, f"training/{number}": 1e-11, f"training_element/{number}": 1e-7}
        figures |= {
            f"linear/{number}/{place}/{rows}": 3e-10 + 2e-11 * rows for place in ("cold", "cached") for rows in _ROWS
        }
    return Calibration(
        fingerprint=this_fingerprint(),
        measured_at="2026-01-01T00:00:00+00:00",
        took_seconds=1.0,
        ranks=1,
        memory_bytes=16 << 30,
        cache_bytes=1 << 20,
        framework_bytes=200 << 20,
        training_framework_bytes=280 << 20,
        figures={name: made_up(seconds) for name, seconds in figures.items()},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    sys.exit(time_planning(options.cells, options.times))
