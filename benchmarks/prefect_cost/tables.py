"""Tables of `benchmarks.prefect_cost.bench`, as they are in docs/measurements/prefect.md, from samples.

print(launches_table(samples))
"""

import statistics
from collections.abc import Callable

from benchmarks.prefect_cost.parts import Samples

COUNTS = (10, 100, 1000)
WAYS = {
    "plain": "plain function call",
    "sequential": "task per cell, called in turn",
    "submitted": "task per cell, `.submit()`",
    "subflow": "subflow per cell",
}
# Subflows last a second each: a thousand are twenty minutes.
SIZES = {"plain": [*COUNTS], "sequential": [*COUNTS], "submitted": [*COUNTS], "subflow": [10]}
LAUNCHES = {
    count: ["pack=false", f"experiments.grid.over.items={items}", "experiments.grid.over.allocate_bytes=[0]"]
    for count, items in ((10, [1]), (60, [1, 2, 3, 4, 5, 6]))
}
"""Ten launches are drawn side by side, sixty in groups."""
PAIRS = {
    "Prefect, now": ("with", "without"),
    "Prefect, before": ("before", "before_without"),
    "launches without Prefect, now and before": ("without", "before_without"),
}
"""Two ways to run launches, of which the first costs more by what is named. The last two need another checkout."""
_KINDS = ("wall", "run_cpu", "server_cpu")


def figure(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """`median (least..most)`; the bare value where there is one or all look the same."""
    shown = [f"{scale * value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} ({shown[1]}..{shown[2]})"


def table(header: str, rows: list[list[str]]) -> str:
    """A Markdown table, all columns but the first to the right."""
    names = header.split("|")
    rule = ["---", *(["---:"] * (len(names) - 1))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ([name.strip() for name in names], rule, *rows))


def start_table(samples: Samples) -> str:
    """What it takes until a first flow run has ended, and what the server takes at rest."""
    rows = [
        ("first flow run, new data folder: database made", "cold", 1.0, "s"),
        ("first flow run, database there", "warm", 1.0, "s"),
        ("first flow run, server up", "up", 1.0, "s"),
        ("`import prefect`", "import", 1.0, "s"),
        ("`from prefect import flow, task`", "import_used", 1.0, "s"),
        ("server, resident", "memory", 2**-20, "MiB"),
        ("server at rest, CPU in a minute", "idle_cpu", 1.0, "s"),
    ]
    lines = [
        [what, figure(samples[f"start/{name}"], scale, 0 if unit == "MiB" else 2), unit]
        for what, name, scale, unit in rows
    ]
    return table("what | median (least..most) | unit", lines)


def cells_table(samples: Samples) -> str:
    """Ways to do a cell."""
    rows = []
    for way, counts in SIZES.items():
        for count in counts:
            found = {
                name: samples[f"cells/{way}/{count}/{name}"] for name in ("body", "flow", "recorded", "server_cpu")
            }
            per_cell = figure(found["body"], 1000 / count, 2 if way != "plain" else 4)
            cpu = figure(found["server_cpu"], 1000 / count, 0)
            rows.append([WAYS[way], f"{count:,}", per_cell, figure(found["flow"]), figure(found["recorded"]), cpu])
    return table(
        "way | cells | ms per cell | whole flow run, s | recorded after, s | CPU of the server, ms per cell", rows
    )


def added_seconds(samples: Samples, count: int) -> list[float]:
    """What Prefect adds to a run, repetition by repetition."""
    return [a - b for a, b in zip(samples[f"run/{count}/with"], samples[f"run/{count}/without"], strict=True)]


def run_table(samples: Samples) -> str:
    """The pipeline with and without Prefect."""
    rows = []
    for count in COUNTS:
        run, added = f"run/{count}", added_seconds(samples, count)
        rows.append(
            [
                f"{count:,}",
                *(figure(samples[f"{run}/{arm}"]) for arm in ("with", "without")),
                figure(added),
                figure(added, 1000 / count, 0 if count < 1000 else 1),
                *(figure(samples[f"{run}/{kind}"], 1, 0) for kind in ("flows", "tasks")),
            ]
        )
    return table(
        "cells | as shipped, s | without Prefect, s | difference, s | per cell, ms | flow runs | task runs", rows
    )


def added_by(samples: Samples, count: int, arm: str, reference: str, kind: str) -> list[float]:
    """What runs of one arm take more than those of another, repetition by repetition. kind: one of _KINDS."""
    found = (samples[f"launches/{count}/{of}/{kind}"] for of in (arm, reference))
    return [a - b for a, b in zip(*found, strict=True)]


def launches_table(samples: Samples) -> str:
    """The price of a launch: as shipped less without Prefect, and before, if that was measured too."""
    few, _ = LAUNCHES
    rows = []
    for name, (arm, reference) in PAIRS.items():
        if f"launches/{few}/{arm}/wall" not in samples or f"launches/{few}/{reference}/wall" not in samples:
            continue
        for count in LAUNCHES:
            walls = [figure(samples[f"launches/{count}/{of}/wall"]) for of in (arm, reference)]
            more = [figure(added_by(samples, count, arm, reference, kind), 1.0, 2) for kind in _KINDS]
            rows.append([f"{name}: {count} launches", *walls, *more])
        per_launch = [figure(_each_more(samples, arm, reference, kind), 1000.0, 0) for kind in _KINDS]
        rows.append([f"{name}: each launch more", "", "", *(f"{each} ms" for each in per_launch)])
    return table("run | with, s | without, s | difference, s | its CPU, s | the server's CPU, s", rows)


def _each_more(samples: Samples, arm: str, reference: str, kind: str) -> list[float]:
    """Seconds that a launch more costs, by repetition."""
    few, many = LAUNCHES
    both = (added_by(samples, count, arm, reference, kind) for count in (few, many))
    return [(b - a) / (many - few) for a, b in zip(*both, strict=True)]


def memory_line(samples: Samples) -> str:
    """What the server holds after all ways to do a cell."""
    held = samples["cells/memory"]
    return f"Guard and server after {len(held)} such repetitions, resident: {held[-1] / 2**20:.0f} MiB"


def share_table(samples: Samples) -> str:
    """Per cent of a cell of one second: medians."""

    def row(what: str, seconds_per_cell: Callable[[int], float | None]) -> list[str]:
        shares = [seconds_per_cell(count) for count in COUNTS]
        return [what, *("not measured" if share is None else f"{100 * share:.2f} %" for share in shares)]

    def body(way: str, count: int) -> float | None:
        found = samples.get(f"cells/{way}/{count}/body")
        return None if found is None else statistics.median(found) / count

    def stages(count: int) -> float:
        price = body("sequential", 10)
        assert price is not None
        return price * statistics.median(samples[f"run/{count}/tasks"]) / count

    rows = [row(name, lambda count, way=way: body(way, count)) for way, name in WAYS.items()]  # type: ignore[misc]
    rows.append(row("as shipped, task per stage of a launch", stages))
    rows.append(
        row("as shipped, start-up and all", lambda count: statistics.median(added_seconds(samples, count)) / count)
    )
    return table(" | ".join(["way", *(f"{count:,} cells" for count in COUNTS)]), rows)


def seams_table(samples: Samples) -> str:
    """Single calls."""
    names = {
        "artifact": "an artifact created",
        "poll": "the flow run's state read",
    }
    rows = [[what, figure(samples[f"seams/{name}"], 1000)] for name, what in names.items()]
    return table("call | ms", rows)
