"""The communication workload on real ranks, and what the report makes of its samples."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.common.execution import Layout
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.records.rates import MeasurementSamples, rates_of
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.communication import CommunicationWorkload
from engine.context import Context
from engine.parallel.communicator import open_communicators
from engine.parallel.grid import Grid
from engine.workloads import communication as workload
from reports.experiments.communication import (
    OPERATIONS,
    bus_factor,
    communication,
    communication_sentence,
    communication_table,
    fit_line,
    links_table,
    size_text,
    slowest_seconds,
)
from reports.reading.load import load_run
from tests.support.rank_pool import RankPool
from tests.support.run_folders.report_runs import experiment, plan_of, write_plan, write_record

CPU = torch.device("cpu")
SIZES = (1000, 65536)


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


def cell_of(ranks: int = 3, **fields: Any) -> Cell:
    work = CommunicationWorkload(**{"sizes_bytes": SIZES, **fields})
    return Cell(workload=work, layout=Layout(tp=ranks))


def reached(rank: int, cell: Cell, measuring_pass: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Figures, samples, and the operations that were made within the profiled region."""
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    rules = Measuring(warmup=1, min_passes=2, min_seconds=0.0)
    job = Job(
        name="job",
        study="s",
        measuring_pass=measuring_pass,
        measuring=rules,
        measurements=(measurement,),
        ranks_per_node=3,
        timeout_seconds=60,
        inputs="",
        cache="",
    )
    size = cell.layout.ranks
    context = Context(job, JobPaths(Path()), rank, size, CPU, None, lambda: None)
    if size > 1:
        context.communicators = open_communicators(Grid.of(cell.layout, rank), CPU, "gloo", 30.0, "gloo")
    seen: list[str] = []
    context.communicators.tensor.listener = lambda event: seen.append(event.operation)
    outcome = workload.run(measurement, context)
    return outcome.figures, outcome.samples, seen


def test_every_operation_and_size_is_sampled_on_every_rank(three: RankPool) -> None:
    cell = cell_of()
    found = three.run(reached, cell, "timed")
    samples: dict[str, Any] = {}
    for rank, (figures, columns, _) in enumerate(found):
        assert figures == {"transport": "gloo", "num_probes": 10, "passes": 2}
        assert {len(columns[name]) for name in ("operation", "size_bytes", "call_seconds")} == {2 * 10 * 3}
        samples |= {f"{rank}/{name}": column for name, column in columns.items()}
        idle = np.isnan(columns["call_seconds"])
        alone = columns["operation"] == OPERATIONS.index("point_to_point")
        assert np.array_equal(idle, alone & (rank == 2))  # three ranks make one pair
        assert (columns["call_seconds"][~idle] > 0).all()
    times = slowest_seconds(samples)
    # Parts of 333 bytes hold 83 numbers of float32: the size that is recorded is the one that was moved.
    assert {size for operation, size in times if operation == "all_gather"} == {996, 65532}
    assert {size for operation, size in times if operation == "all_reduce"} == set(SIZES)
    assert len(times) == 10
    rates = rates_of(MeasurementSamples(cell, samples), {})
    assert rates.passes == 2


def test_other_passes_make_each_operation_once_and_time_nothing(three: RankPool) -> None:
    cell = cell_of(operations=("all_reduce", "broadcast"), sizes_bytes=(4096,))
    for figures, samples, seen in three.run(reached, cell, "memory"):
        assert samples == {}
        assert figures["num_probes"] == 2
        assert {"all_reduce", "broadcast", "barrier"} <= set(seen)
        assert not {"send", "receive", "reduce_scatter"} & set(seen)


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("all_gather", 4, 0.75), ("reduce_scatter", 2, 0.5),
     ("broadcast", 8, 1.0), ("point_to_point", 8, 1.0)],
)  # fmt: skip
def test_bus_factors_are_those_of_nccl_tests(operation: Any, ranks: int, factor: float) -> None:
    assert bus_factor(operation, ranks) == factor


def test_a_line_is_found_again() -> None:
    line = fit_line({size: 5e-6 + size / 8e9 for size in (1 << 10, 1 << 14, 1 << 20, 1 << 24)})
    assert line is not None
    assert (line.latency_seconds, line.bytes_per_second) == pytest.approx((5e-6, 8e9))
    assert line.error == pytest.approx(0, abs=1e-9)
    assert fit_line({1024: 1e-6, 2048: 2e-6}) is None
    assert fit_line({1024: 3e-6, 2048: 2e-6, 1 << 20: 1e-6}) is None
    through_zero = fit_line({1 << 10: 1e-7, 1 << 20: 1.1e-3, 1 << 24: 2e-2})
    assert through_zero is not None and through_zero.latency_seconds == 0


def test_sizes_as_a_person_writes_them() -> None:
    assert [size_text(size) for size in (996, 16384, 1 << 24)] == ["996 B", "16 KiB", "16 MiB"]


def made_up(ranks: int, latency: float, bytes_per_second: float) -> dict[str, Any]:
    """Rank r is 10 % slower than rank r - 1; the first sample of three is an outlier."""
    samples: dict[str, Any] = {}
    operation = OPERATIONS.index("all_reduce")
    sizes = np.repeat([1 << 10, 1 << 16, 1 << 20, 1 << 24], 3)
    for rank in range(ranks):
        seconds = (latency + sizes / bytes_per_second) * (1 + 0.1 * rank)
        seconds[::3] *= 50
        samples[f"{rank}/pass_seconds"] = np.array([1.0])
        samples[f"{rank}/operation"] = np.full(len(sizes), operation, dtype=np.int8)
        samples[f"{rank}/size_bytes"] = sizes
        samples[f"{rank}/call_seconds"] = seconds
    return samples


def test_the_report_says_what_was_measured(tmp_path: Path) -> None:
    cells = [cell_of(ranks=4, transport="shared memory"), cell_of(ranks=2, transport="gloo")]
    points = [(cell, {"ranks": cell.layout.ranks}, str(cell.layout)) for cell in cells]
    run = write_plan(tmp_path / "run", plan_of(cells, [experiment("links", "communication", points)], repeats=6))
    for repeat in range(6):
        drift = 1 + repeat / 100
        samples = made_up(4, 4e-6 * drift, 8e9 / drift)
        write_record(run, cells[0], repeat, samples=samples, figures={"transport": "shared memory"})
    study = load_run(run)
    result = communication(study, study.plan.experiments[0])
    assert result is not None and len(result) == 1  # the other cell was not measured
    table = communication_table(result)
    assert table is not None and len(table.rows) == 4
    last = dict(zip(table.columns, table.rows[-1], strict=True))
    assert (last["operation"], last["transport"], last["ranks"], last["size"]) == (
        "all-reduce", "shared memory", "4", "16 MiB"
    )  # fmt: skip
    # The slowest of four ranks takes 1.3 times as long; the median repeat 1.025 times.
    seconds = (4e-6 + 2**24 / 8e9) * 1.3 * 1.025
    assert float(last["algorithm, GB/s"]) == pytest.approx(2**24 / seconds / 1e9, rel=0.01)
    assert float(last["bus, GB/s"]) == pytest.approx(1.5 * 2**24 / seconds / 1e9, rel=0.01)
    links = links_table(result)
    assert links is not None
    link = dict(zip(links.columns, links.rows[0], strict=True))
    assert link["latency, us"].startswith("5.33 (")
    assert float(link["algorithm bandwidth, GB/s"].split()[0]) == pytest.approx(8 / 1.3 / 1.025, rel=0.01)
    assert link["sizes"] == "1 KiB to 16 MiB"
    sentence = communication_sentence(result)
    assert sentence.startswith("Over shared memory, all-reduce of 1 KiB among 4 ranks takes 5.5")
    assert sentence.endswith("GB/s, all-reduce of 16 MiB.")
    assert communication(study, study.plan.experiments[0].model_copy(update={"points": ()})) is None
