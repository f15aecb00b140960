"""Our engine beside the others, model by model: python -m benchmarks.engines

Runs the study `bench_engines.yaml` as `rankwise run` in a process of its own, and prints one table a model: the
rate of each engine, layout and batch, and ours over it, taken within blocks, where both were measured minutes apart.
About 25 minutes on two cores, which should have nothing else to do. `--table RUN` prints the tables of a run that
there is already; `--set measuring.repeats=8` measures more blocks (from six on there are 95 % intervals).
"""

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.inference.bench import run_shipped
from benchmarks.inference.rows import ByBlock, Measured, by_block
from configs.common.execution import Dtype, Engine
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.rates import MeasurementSamples, rates_of
from configs.records.record import Status
from configs.records.samples import read_samples
from configs.spec.cell import Cell
from configs.workloads.encode import EncodeWorkload
from configs.workloads.prompted import PromptedWorkload
from reports.numbers.statistics import LEAST_REPEATS, Bounds, estimate, paired_ratio
from tasks.campaign.ledger import read_ledger

STUDY = Path(__file__).parents[1] / "benchmarks" / "studies" / "bench_engines.yaml"
_COLUMNS = (
    "pass_seconds",
    "request_seconds",
    "batch_sequences",
    "gap_seconds",
    "ttft_seconds",
)

Word = Literal["", "ahead", "behind", "undecided"]


@dataclass(frozen=True)
class Point:
    """What distinguishes the rows of a model's table."""

    engine: Engine
    tp: int
    batch: int
    dtype: Dtype

    @classmethod
    def of(cls, cell: Cell) -> "Point":
        """The cell's place in its model's table."""
        assert isinstance(cell.workload, PromptedWorkload)
        return cls(cell.engine, cell.layout.tp, cell.workload.batch_size, cell.dtype)


@dataclass(frozen=True)
class Row:
    """A point's rate, tokens/s or embeddings/s, and ours over it; None: not measured, and `note` says why.

    `bounds` and `ratio_bounds` are 95 % intervals from LEAST_REPEATS blocks on, else ranges.
    """

    point: Point
    rate: float | None = None
    bounds: Bounds | None = None
    ratio: float | None = None
    ratio_bounds: Bounds | None = None
    blocks: int = 0
    note: str = ""

    @property
    def word(self) -> Word:
        """Ahead and behind need all that the ratio may be on one side of 1."""
        if self.ratio is None or self.ratio_bounds is None:
            return ""
        low, high = self.ratio_bounds
        return "ahead" if low > 1 else "behind" if high < 1 else "undecided"


def rate(found: Measured) -> float | None:
    """Embeddings or tokens a second of one record."""
    return rates_of(MeasurementSamples(found.cell, found.samples), found.record.figures).throughput


def model_rows(measured: Iterable[Measured]) -> list[Row]:
    """One model's rows: ours first, then the others', each held against ours of its layout, batch and precision.

    ONNX Runtime is held against our float32, and our bfloat16 has no row of its own beside it.
    """
    grouped: dict[Point, list[Measured]] = {}
    for one in measured:
        grouped.setdefault(Point.of(one.cell), []).append(one)
    rates: dict[Point, ByBlock] = {
        point: by_block((one for one in found if one.record.status is Status.COMPLETED), rate)
        for point, found in grouped.items()
    }
    rows = []
    for point in sorted(grouped, key=_order):
        values = rates[point]
        whole = estimate(values.values())
        if whole is None:
            rows.append(Row(point, note=_why(grouped[point])))
            continue
        ours = rates.get(Point("rankwise", point.tp, point.batch, point.dtype), {})
        ratio = None if point.engine == "rankwise" else paired_ratio(ours, values)
        rows.append(
            Row(
                point,
                rate=whole.median,
                bounds=whole.bounds,
                ratio=None if ratio is None else ratio.value,
                ratio_bounds=None if ratio is None else ratio.bounds,
                blocks=whole.count,
            )
        )
    return rows


def _order(point: Point) -> tuple[int, int, bool, int]:
    engines: tuple[Engine, ...] = ("rankwise", "transformers", "deepspeed", "onnxruntime")
    return point.tp, point.batch, point.dtype == "float32", engines.index(point.engine)


def _why(found: list[Measured]) -> str:
    """Why a point has no rate."""
    reasons = {one.record.failure.message if one.record.failure else str(one.record.status) for one in found}
    return "; ".join(sorted(reasons))


def read_engines(run: RunPaths) -> dict[str, list[Measured]]:
    """The deciding timed records of a run by the model's name, in the order of the study."""
    plan = Plan.model_validate_json(run.plan.read_bytes())
    names = {model.identity: model.name for model in plan.models}
    found: dict[str, list[Measured]] = {name: [] for name in names.values()}
    ledger = read_ledger(run)
    for place in sorted(ledger.entries, key=str):
        entry = ledger.decisive(place)
        if entry is None or place[1] != "timed" or not isinstance(entry.record.cell.workload, PromptedWorkload):
            continue
        whole = entry.status is Status.COMPLETED and entry.record.num_columns
        samples = read_samples(entry.path.with_suffix(".npz"), _COLUMNS) if whole else {}
        found[names[entry.record.cell.model or ""]].append(Measured(entry.record, samples))
    return found


def tables_text(engines: dict[str, list[Measured]]) -> str:
    """A Markdown table for each model, and what the words mean."""
    parts = [_table(name, found) for name, found in engines.items()]
    parts.append(
        f"Medians over blocks; in brackets the 95 % interval from {LEAST_REPEATS} blocks on, else the range. Ours over "
        "theirs is the median of ratios within blocks: ahead or behind only where all of its bracket is on one side of "
        "1, else undecided."
    )
    return "\n\n".join(parts)


def _table(name: str, found: list[Measured]) -> str:
    encodes = any(isinstance(one.cell.workload, EncodeWorkload) for one in found)
    lines = [
        f"## {name}",
        "",
        f"| ranks | batch | precision | engine | {'embeddings' if encodes else 'tokens'}/s | blocks | ours over it | |",
        "| ---: | ---: | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in model_rows(found):
        point = row.point
        start = f"| {point.tp} | {point.batch} | {point.dtype} | {point.engine} |"
        if row.rate is None:
            lines.append(f"{start} | | | not measured: {row.note} |")
        else:
            ratio = "" if row.ratio is None else _shown(row.ratio, row.ratio_bounds)
            lines.append(f"{start} {_shown(row.rate, row.bounds)} | {row.blocks} | {ratio} | {row.word} |")
    return "\n".join(lines)


def _shown(value: float, bounds: Bounds | None) -> str:
    return f"{value:.3g}" + ("" if bounds is None else f" ({bounds[0]:.3g} to {bounds[1]:.3g})")


def run_study(runs: Path, assignments: list[str]) -> RunPaths:
    """Run the study; as `run_shipped`. Nothing here is predicted, so the machine need not be calibrated."""
    return run_shipped(STUDY, runs, assignments, "--no-calibrate")


def main() -> None:
    """Run and print, or print only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="keep the run folder here")
    parser.add_argument("--table", type=Path, metavar="RUN", help="print the tables of this run folder only")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of rankwise run")
    arguments = parser.parse_args()
    if arguments.table:
        print(tables_text(read_engines(RunPaths(arguments.table))))
        return
    with tempfile.TemporaryDirectory(prefix="rankwise-bench-") as scratch:
        runs = arguments.runs or Path(scratch)
        runs.mkdir(parents=True, exist_ok=True)
        print(tables_text(read_engines(run_study(runs, arguments.set))))


if __name__ == "__main__":
    main()
