"""What analysis and report cost for many records, on this machine, now: python -m benchmarks.report

    python -m benchmarks.report [--records 1000 10000 100000] [--forms md+html] [--rounds 5]

For each number it makes up a run folder as the engine leaves one (ten repeats a cell, two models, strong
and weak scaling, optimizations, and two sweeps that grow; 512 samples in every column of every rank),
renders the report in a fresh process held to two cores, and prints wall seconds and the peak resident
memory of that process and all that it starts. Ends with exit code 1 where 100,000 records take more than
60 s or 2 GB, or where time grows faster than the records.

Then one folder of 10,000 records is rendered `--rounds` times as Markdown alone and as Markdown with the page, in turn,
so that other work on the machine slows both. Exit code 1 as well where the median ratio of the pairs is above 1.3.

The folders are written a moment before, so that the files come from memory: what is timed is the program,
not the disk.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from configs.common.base import canonical_json
from configs.common.execution import Layout
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedExperiment, PlannedModel
from configs.records.record import Record, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import LocalTarget
from configs.workloads.generate import GenerateWorkload

REPEATS = 10
SAMPLES = 512
CORES = 2
BAR_RECORDS = 100_000
BAR_SECONDS = 60.0
BAR_BYTES = 2_000_000_000
BAR_RATIO = 1.3
"""Of the time with the page over that of Markdown alone."""
PAIRED_RECORDS = 10_000
LINEAR_ALLOWANCE = 1.2
"""Seconds a record may be so many times those of the next smaller folder: what one run of a few seconds errs by."""
MODELS = (
    PlannedModel(name="small", identity="synthetic:llama-110m@0", manifest="models/a/manifest.json"),
    PlannedModel(name="large", identity="folder:0123456789abcdef", manifest="models/b/manifest.json"),
)
_SAMPLE_SECONDS = 0.25  # looking at all processes takes some milliseconds, of the two cores that are measured
_CODE = """
import sys
from pathlib import Path
from configs.plans.paths import RunPaths
from reports.render import analyze_run, render_analysis, write_page
run, forms = RunPaths(Path(sys.argv[1])), sys.argv[2].split("+")
analysis = analyze_run(run, draws="md" in forms)
if "md" in forms:
    render_analysis(run, analysis)
if "html" in forms:
    write_page(run, analysis)
"""


@dataclass(frozen=True)
class Rendering:
    """One report rendered in a process of its own."""

    records: int
    seconds: float
    peak_bytes: int
    report_bytes: int
    page_bytes: int = 0

    @property
    def microseconds_per_record(self) -> float:
        return self.seconds / self.records * 1e6


def _cell(model: PlannedModel, batch_size: int = 4, prompt_tokens: int = 64, dp: int = 1, **fields: str) -> Cell:
    """A cell that answers one batch a rank in a pass. Two new tokens: one gap, so each column has as many samples."""
    work = GenerateWorkload(
        num_prompts=batch_size * dp, prompt_tokens=prompt_tokens, new_tokens=2, batch_size=batch_size
    )
    return Cell.model_validate({"model": model.identity, "workload": work, "layout": Layout(dp=dp), **fields})


def _experiment(name: str, kind: str, model: PlannedModel, cells: dict[str, Cell]) -> PlannedExperiment:
    points: list[dict[str, object]] = []
    for label, cell in cells.items():
        work = cell.workload
        assert isinstance(work, GenerateWorkload)
        values: dict[str, object] = {
            "workload.batch_size": work.batch_size,
            "workload.prompt_tokens": work.prompt_tokens,
        }
        if kind != "sweep":
            values = {"variant": label} if kind == "optimization" else {"ranks": cell.layout.ranks}
        points.append({"cell": cell.key, "values": values, "label": label, "baseline": not points and kind != "sweep"})
    grow = "dp" if kind in ("strong", "weak") else None
    return PlannedExperiment.model_validate(
        {"name": name, "kind": kind, "model": model.name, "grow": grow, "points": points}
    )


def make_plan(records: int) -> Plan:
    """A plan of so many measurements, `REPEATS` of each cell; the sweeps take what the other experiments leave."""
    cells: dict[str, Cell] = {}
    experiments = []
    each = records // REPEATS // len(MODELS)
    for model in MODELS:
        base = _cell(model, batch_size=8)
        parts = {
            "strong": {f"{dp} ranks": _cell(model, batch_size=8 // dp, dp=dp) for dp in (1, 2, 4)},
            "weak": {f"{dp} ranks": _cell(model, batch_size=8, dp=dp) for dp in (1, 2, 4)},
            "optimization": {"baseline": base}
            | {dtype: _cell(model, 8, dtype=dtype) for dtype in ("bfloat16", "float16")},
        }
        known = {cell.key for group in parts.values() for cell in group.values()}
        grid = (_cell(model, size, 8 * tokens) for tokens, size in product(range(1, 10_000), range(9, 25)))
        swept = islice(grid, max(0, each - len(known)))
        parts["sweep"] = {f"batch {_batch(cell)}, prompt {cell.key[:6]}": cell for cell in swept}
        for kind, group in parts.items():
            cells |= {cell.key: cell for cell in group.values()}
            experiments.append(_experiment(kind, kind, model, group))
    return Plan(
        study="bench-report",
        models=MODELS,
        targets=(LocalTarget(),),
        measuring=Measuring(repeats=REPEATS),
        pack=True,
        experiments=tuple(experiments),
        cells=cells,
        repeats=dict.fromkeys(cells, REPEATS),
    )


def _batch(cell: Cell) -> int:
    assert isinstance(cell.workload, GenerateWorkload)
    return cell.workload.batch_size


def write_run(folder: Path, records: int, samples: int = SAMPLES) -> int:
    """Write the run folder of `make_plan`: every measurement completed, a memory pass for none. Gives the records
    written."""
    plan, run, rng = make_plan(records), RunPaths(folder), np.random.default_rng(0)
    run.environments.mkdir(parents=True)
    run.plan.write_text(plan.model_dump_json())
    run.environment("e1").write_text(canonical_json({"python": "3.11", "commit": "abc123"}))
    for key, cell in plan.cells.items():
        (run.records / key).mkdir(parents=True)
        for repeat in range(REPEATS):
            path = run.record(key, "timed", repeat, 1)
            path.write_text(_record(cell, repeat).model_dump_json())
            np.savez(path.with_suffix(".npz"), allow_pickle=False, **_samples(cell, samples, rng))
    return len(plan.cells) * REPEATS


def _record(cell: Cell, repeat: int) -> Record:
    figures = {"measurement_seconds": 2.0, "cpu_seconds": 1.5, "cpu_busy_seconds": 2.1, "others_cpu_share": 0.02}
    figures |= {"passes": SAMPLES, "num_prompts": _batch(cell), "new_tokens": 2, "prompt_tokens": 512, "threads": 1}
    figures |= {"preprocess_seconds": 0.001, "weights_bytes": 440e6, "model_parameters": 110e6, "machine_cores": 2}
    return Record(
        key=cell.key,
        cell=cell,
        repeat=repeat,
        attempt=1,
        status=Status.COMPLETED,
        job=f"{cell.pack_key}-{repeat}",
        position=0,
        started_at=f"2026-01-01T00:{repeat:02}:00.000000+00:00",
        finished_at=f"2026-01-01T00:{repeat:02}:30.000000+00:00",
        environment="e1",
        hosts=["node-1"] * cell.layout.ranks,
        figures=figures,
        num_columns=6 * cell.layout.ranks,
    )


def _samples(cell: Cell, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What `engine.workloads.generate` leaves on each rank: skewed noise, and a start that is slower in every fourth
    measurement."""
    samples: dict[str, np.ndarray] = {}
    slow = 1 + 0.5 * np.exp(-np.arange(count) / 10) * (rng.random() < 0.25)
    for rank in range(cell.layout.ranks):
        first = 0.010 * _batch(cell) ** 0.5 * slow * rng.lognormal(0, 0.03, count)
        gap = 0.005 * rng.lognormal(0, 0.05, count)
        samples |= {
            f"{rank}/warmup_pass_seconds": np.array([0.03]),
            f"{rank}/pass_seconds": first + gap + 1e-5,
            f"{rank}/ttft_seconds": first,
            f"{rank}/request_seconds": first + gap,
            f"{rank}/gap_seconds": gap,
            f"{rank}/batch_sequences": np.full(count, float(_batch(cell))),
        }
    return samples


def render_alone(folder: Path, records: int, forms: str = "md") -> Rendering:
    """Render `md`, `html` or `md+html` in a fresh process on two cores.

    Raises RuntimeError with its output where it fails.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = psutil.Popen([sys.executable, "-c", _CODE, str(folder), forms], stdout=log, stderr=subprocess.STDOUT)
        process.cpu_affinity(sorted(os.sched_getaffinity(0))[:CORES])
        peak = 0
        while process.poll() is None:
            peak = max(peak, _resident_bytes(process))
            time.sleep(_SAMPLE_SECONDS)
        seconds = time.monotonic() - began
        log.seek(0)
        if process.returncode != 0:
            raise RuntimeError(f"{records:,} records: exit code {process.returncode}\n{log.read()}")
    run = RunPaths(folder)
    written = run.page if forms == "html" else run.report
    page = run.page.stat().st_size if "html" in forms else 0
    return Rendering(records, seconds, peak, written.stat().st_size, page)


def _resident_bytes(process: psutil.Process) -> int:
    """Of the process and all below it, pages that they share counted in each."""
    total = 0
    try:
        for member in [process, *process.children(recursive=True)]:
            total += member.memory_info().rss
    except psutil.Error:
        pass  # one has ended meanwhile
    return total


def paired_ratios(folder: Path, records: int, rounds: int) -> list[float]:
    """Seconds of Markdown with the page over those of Markdown alone, once a round; the first of a round alternates."""
    ratios = []
    for place in range(rounds):
        order = ("md", "md+html") if place % 2 == 0 else ("md+html", "md")
        seconds = {forms: render_alone(folder, records, forms).seconds for forms in order}
        ratios.append(seconds["md+html"] / seconds["md"])
        print(f"{seconds['md']:>9.1f} {seconds['md+html']:>14.1f} {ratios[-1]:>7.3f}", flush=True)
    return ratios


def missed_ratio(ratios: list[float]) -> list[str]:
    """As `missed`, of `paired_ratios`."""
    if not ratios or median(ratios) <= BAR_RATIO:
        return []
    return [f"with the page it takes {median(ratios):.2f} times the time of Markdown alone, expected {BAR_RATIO}"]


def missed(renderings: list[Rendering]) -> list[str]:
    """What the bar asks for and was not reached, in sentences."""
    found = []
    for smaller, larger in pairwise(renderings):
        if larger.microseconds_per_record > LINEAR_ALLOWANCE * smaller.microseconds_per_record:
            found.append(f"{larger.records:,} records take more time each than {smaller.records:,} do")
    for item in renderings:
        if item.records >= BAR_RECORDS and (item.seconds > BAR_SECONDS or item.peak_bytes > BAR_BYTES):
            found.append(f"{item.records:,} records take more than {BAR_SECONDS:.0f} s or {BAR_BYTES / 1e9:.0f} GB")
    return found


def _ratios(rounds: int) -> list[float]:
    """Make up the folder of the pairs and render them."""
    if rounds < 1:
        return []
    with tempfile.TemporaryDirectory(prefix="rankwise-bench-") as scratch:
        written = write_run(Path(scratch) / "run", PAIRED_RECORDS)
        os.sync()
        print(f"{written:,} records in turn, load average {os.getloadavg()[0]:.1f}")
        print(f"{'md s':>9} {'md+html s':>14} {'ratio':>7}")
        ratios = paired_ratios(Path(scratch) / "run", written, rounds)
    print(f"median {median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}, {rounds} pairs; bar {BAR_RATIO}")
    return ratios


def main() -> int:
    """Write, render and print each; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[1000, 10_000, BAR_RECORDS])
    parser.add_argument("--forms", choices=("md", "html", "md+html"), default="md+html")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of renderings in turn; 0: none")
    arguments = parser.parse_args()
    if min(arguments.records) < 200:
        parser.error("--records: expected at least 200, less than the smallest study that this makes up")
    renderings = []
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, of which {min(cores, CORES)} are used; load average at the start {os.getloadavg()[0]:.1f}")
    print(
        f"{'records':>9} {'wall s':>8} {'us/record':>10} {'peak MB':>8} {'report kB':>10} {'page kB':>8} "
        f"{'made in s':>10}"
    )
    for records in sorted(arguments.records):
        with tempfile.TemporaryDirectory(prefix="rankwise-bench-") as scratch:
            began = time.monotonic()
            written = write_run(Path(scratch) / "run", records)
            os.sync()  # or the disk would be written to while the report is timed
            made = time.monotonic() - began
            item = render_alone(Path(scratch) / "run", written, arguments.forms)
        renderings.append(item)
        row = "{:>9,} {:>8.1f} {:>10.0f} {:>8.0f} {:>10.0f} {:>8.0f} {:>10.1f}"
        sizes = (item.peak_bytes / 1e6, item.report_bytes / 1e3, item.page_bytes / 1e3, made)
        print(row.format(item.records, item.seconds, item.microseconds_per_record, *sizes), flush=True)
    lines = missed(renderings) + missed_ratio(_ratios(arguments.rounds))
    print("\n".join(f"MISSED: {line}" for line in lines) or "the bar is met")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
