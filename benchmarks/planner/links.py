"""Decoding predicted and measured over links of known speed: python -m benchmarks.planner.links

On labs of this machine, as root: one node of two cores, then two nodes of one core with each link speed, where the
ranks split the model by tensors (tp=2) or by blocks (pp=2), beside one rank alone. Rankwise's own pipeline measures
and predicts; what it predicts from is a calibration of this machine and the link that the preflight measured, never a
run of the model.

Printed: each cell's tokens/s beside the prediction, the median error, and for each link and batch whether the faster
split was foreseen, where the two differ clearly. Exit code 1 where the median error is above the bar or a clear order
is wrong. With --runs, a place whose run is in that folder is read and not measured again. The machine must be idle
otherwise: what other processes take of the CPU is printed beside each cell.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from configs.common.execution import Layout
from configs.hardware.calibration import QUIET_SHARE
from configs.plans.paths import RunPaths
from flows.server.local import lease_server
from flows.server.settings import api_named_by_environment
from reports.planning.accuracy import accuracy_headline, judge
from reports.reading.load import CellResult, load_run
from reports.reading.run_figures import OTHERS_SHARE
from slurm.lab import cluster
from slurm.lab.plan import UNSHAPED, LabPlan, LabRequest

ERROR_BAR = 0.15
CLEAR = 1.25
"""Two layouts differ clearly where one is measured to be faster by this factor."""
LINKS = ("100mbit", "1gbit", UNSHAPED)
ONE_NODE = "one node"
BATCHES = (1, 4)
_RUN_LIMIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Row:
    """One cell: where, in which layout, what was said and what came of it."""

    place: str
    batch: int
    layout: str
    predicted: float
    measured: float
    low: float
    high: float
    others: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Order:
    """Which of two layouts is faster: tokens/s of the first over the second, measured and predicted."""

    place: str
    batch: int
    layouts: tuple[str, str]
    measured: float
    predicted: float

    @property
    def clear(self) -> bool:
        """Whether one of them is measured to be clearly faster."""
        return max(self.measured, 1 / self.measured) >= CLEAR

    @property
    def right(self) -> bool:
        """Whether the faster one was foreseen."""
        return (self.measured > 1) == (self.predicted > 1)


def places(links: Sequence[str]) -> list[str]:
    """One node, and two nodes by each link: `one node`, `two nodes, 1gbit`."""
    return [ONE_NODE, *(f"two nodes, {link}" for link in links)]


def study_of(place: str, model: str, repeats: int = 3) -> dict[str, Any]:
    """Decoding split by tensors and by blocks, for one link speed."""
    link = place.rpartition(", ")[2]
    workload = {"kind": "generate", "prompt_tokens": 32, "new_tokens": 16}
    nodes, ranks = (1, 2) if place == ONE_NODE else (2, 1)
    return {
        "study": place.replace(", ", "_").replace(" ", "_"),
        "models": [{"id": model}],
        "workload": workload,
        "dtype": "bfloat16",
        "targets": [
            {
                "kind": "slurm",
                "name": place,
                "partition": "lab" if place == ONE_NODE or link == UNSHAPED else f"link-{link}",
                "nodes": nodes,
                "ranks_per_node": ranks,
                "max_running": 1,
                "poll_seconds": 1,
                "on_this_machine": True,
            }
        ],
        "experiments": {
            f"batch_{batch}": {
                "kind": "optimization",
                "base": {"workload": {**workload, "batch_size": batch, "num_prompts": batch}},
                "variants": {"tp=2": {"tp": 2}, "pp=2": {"pp": 2}},
            }
            for batch in BATCHES
        },
        "measuring": {
            "repeats": repeats,
            "warmup": 1,
            "min_seconds": 1.0,
            "min_passes": 2,
            "memory": False,
            "cell_timeout_seconds": 240,
        },
    }


@contextmanager
def lab_up(request: LabRequest) -> Iterator[LabPlan]:
    """A lab while the block runs."""
    try:
        cluster.up(request)
        yield cluster.find_lab(request.name)
    finally:
        with suppress(OSError):
            cluster.down(request.name, request.folder)


def rankwise(arguments: Sequence[str], log: Path, environment: dict[str, str]) -> None:
    """Run the command. Raises RuntimeError with the end of its output where it fails."""
    command = [str(Path(sys.executable).with_name("rankwise")), *arguments]
    with log.open("a") as out:
        done = subprocess.run(command, env=environment, stdout=out, stderr=out, timeout=_RUN_LIMIT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"rankwise {arguments[0]} ended with {done.returncode}:\n{log.read_text()[-2000:]}")


def measure(folder: Path, name: str, links: Sequence[str], model: str, repeats: int) -> list[RunPaths]:
    """The runs of all places; what is there already is left as it is."""
    environment = dict(os.environ) | {"RANKWISE_CACHE": str(folder / "cache")}
    wanted = {place: study_of(place, model, repeats) for place in places(links)}
    runs = {place: RunPaths(folder / "runs" / study["study"]) for place, study in wanted.items()}
    missing = [place for place in wanted if not runs[place].report.is_file()]  # a run that was cut off goes on
    if missing and not (folder / "calibrated").exists():
        rankwise(["doctor", "--calibrate"], folder / "log", environment)
        (folder / "calibrated").touch()
    two = tuple(link for link in links if link != UNSHAPED)
    labs = [
        (LabRequest(name=name, folder=folder / "lab1", nodes=1, cores_per_node=2), [ONE_NODE]),
        (LabRequest(name=name, folder=folder / "lab2", nodes=2, bandwidths=two), places(links)[1:]),
    ]
    for request, there in labs:
        left = [place for place in there if place in missing]
        if not left:
            continue
        with lab_up(request) as lab:
            for place in left:
                path = folder / f"{wanted[place]['study']}.yaml"
                path.write_text(json.dumps(wanted[place]))  # JSON is YAML too
                slurm = environment | {"SLURM_CONF": str(lab.slurm_conf)}
                rankwise(["run", str(path), "--runs", str(folder / "runs")], folder / "log", slurm)
    return list(runs.values())


def rows_of(run: RunPaths) -> list[Row]:
    """The cells of a run. Raises RuntimeError for one that was not measured or not predicted."""
    study = load_run(run)
    judged = {item.result.key: item for item in accuracy_headline(judge(study))}
    found = []
    for key, result in study.cells.items():
        if key not in judged:
            said = study.plan.predictions.get(key)
            raise RuntimeError(f"{run.folder.name}: {result.name}: {result.status}, {said and said.reason}")
        item = judged[key]
        low, high = item.measured.bounds
        found.append(
            Row(
                place=result.cell.target,
                batch=(result.cell.workload.size_of_pass(1) or (0,))[0],
                layout=_layout(result.cell.layout),
                predicted=item.predicted,
                measured=item.measured.median,
                low=low,
                high=high,
                others=others_share(result),
            )
        )
    return found


def _layout(layout: Layout) -> str:
    named = {"tp": layout.tp, "pp": layout.pp}
    return ", ".join(f"{name}={ranks}" for name, ranks in named.items() if ranks > 1) or "1 rank"


def others_share(result: CellResult) -> float:
    """Of the CPU, taken by other processes while this was measured: the median over its repeats."""
    shares = [reading.figure(OTHERS_SHARE) for reading in result.completed.values()]
    return median([share for share in shares if share is not None] or [float("nan")])


def orders_of(rows: Sequence[Row]) -> list[Order]:
    """Every two layouts of a place and batch."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.place, row.batch), []).append(row)
    return [
        Order(*place, (one.layout, other.layout), one.measured / other.measured, one.predicted / other.predicted)
        for place, group in groups.items()
        for one, other in combinations(group, 2)
    ]


def tables(rows: Sequence[Row]) -> tuple[str, list[str]]:
    """Markdown, and what is wrong."""
    lines = [
        "| where | batch | layout | measured, tokens/s | predicted | error | CPU taken by others |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        measured = f"{row.measured:.1f} ({row.low:.1f} to {row.high:.1f})"
        lines.append(
            f"| {row.place} | {row.batch} | {row.layout} | {measured} | {row.predicted:.1f} | {row.error:+.0%} "
            f"| {row.others:.0%} |"
        )
    middle = median(abs(row.error) for row in rows)
    worst = max(abs(row.error) for row in rows)
    lines += ["", f"{len(rows)} cells: median error {middle:.1%}, worst {worst:.1%}.", ""]
    others = median(row.others for row in rows)
    if others > QUIET_SHARE:
        lines += [f"Other processes took {others:.0%} of the CPU: these figures say nothing of the planner.", ""]
    lines += ["| where | batch | layouts | first over second, measured | predicted | order |"]
    lines += ["| --- | ---: | --- | ---: | ---: | --- |"]
    orders = orders_of(rows)
    for order in orders:
        said = ("right" if order.right else "wrong") if order.clear else "too near to tell"
        pair = ", ".join(order.layouts)
        lines.append(
            f"| {order.place} | {order.batch} | {pair} | {order.measured:.2f} | {order.predicted:.2f} | {said} |"
        )
    wrong = [f"the median error is {middle:.1%}, above {ERROR_BAR:.0%}"] if middle > ERROR_BAR else []
    wrong += [
        f"{order.place}, batch {order.batch}: of {' and '.join(order.layouts)} the slower was foreseen as the faster"
        for order in orders
        if order.clear and not order.right
    ]
    return "\n".join(lines), wrong


def main() -> int:
    """Bring labs up, measure, take them down, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default=",".join(LINKS), help="rates between two nodes, `none` for unshaped")
    parser.add_argument("--model", default="synthetic:llama-110m@0")
    parser.add_argument("--repeats", type=int, default=3, help="of each cell, each in a launch of its own")
    parser.add_argument("--runs", type=Path, help="keep run folders and the lab's logs here; a short absolute path")
    parser.add_argument("--name", default="links", help="of the lab")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rankwise-links-", dir="/tmp") as scratch:
        folder = arguments.runs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        asked = (folder, arguments.name, arguments.links.split(","), arguments.model, arguments.repeats)
        if api_named_by_environment():
            runs = measure(*asked)
        else:
            with lease_server() as lease:
                lease.wait_until_healthy()
                runs = measure(*asked)
        text, wrong = tables([row for run in runs for row in rows_of(run)])
    print(text)
    print("\n".join(wrong) or "all bars are met")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
