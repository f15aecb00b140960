"""Tables of nodes and batch sizes: like with like, and a failure where there is no figure."""

from pathlib import Path

from configs.common.execution import Layout
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.targets.target import LocalTarget
from configs.workloads.generate import GenerateWorkload
from configs.workloads.noop import NoopWorkload
from reports.decisions.nodes import (
    MOST_TABLES,
    NodeCell,
    batch_of,
    longest,
    node_cells,
    node_latency_table,
    node_memory_table,
    node_table,
    nodes_sentence,
    throughput_table,
)
from reports.reading.load import CellResult, load_run
from tests.support.run_folders.priced_runs import (
    LARGE,
    cell,
    make_plan,
    train_cell,
    write_measurements,
    write_record,
    write_run,
)

TARGETS = (LocalTarget(name="gpu-a"), LocalTarget(name="gpu-b"))


def two_nodes(folder: Path) -> list[NodeCell]:
    """Node a has batches 1 and 4; node b has lost batch 4 to its memory and half of batch 1."""
    cells = {(node, size): cell(target=node, batch_size=size) for node in ("gpu-a", "gpu-b") for size in (1, 4)}
    run = write_run(folder / "run", make_plan(list(cells.values()), repeats=2, targets=TARGETS))
    write_measurements(run, cells["gpu-a", 1], [100.0, 100.0])
    write_measurements(run, cells["gpu-a", 4], [300.0, 300.0])
    write_record(run, cells["gpu-a", 4], measuring_pass="memory", figures={"peak_memory_bytes": 7 * 2**20})
    write_measurements(run, cells["gpu-b", 1], [50.0])
    for repeat in range(2):
        write_record(run, cells["gpu-b", 4], repeat, status=Status.OUT_OF_MEMORY)
    return node_cells(load_run(run))


def test_rows_are_nodes_and_columns_batch_sizes(tmp_path: Path) -> None:
    cells = two_nodes(tmp_path)
    (throughput,) = throughput_table(cells)
    assert throughput.title == "tiny, 1 rank, float32, generate, new tokens 5: tokens/s, median (interval)"
    assert throughput.table.columns == ("node", "batch 1", "batch 4")
    assert throughput.table.rows == (
        ("gpu-a", "100 [100 to 100]", "300 [300 to 300]"),
        ("gpu-b", "50.0", "out of memory"),
    )
    (latency,) = node_latency_table(cells)
    # 5 tokens at 100 tokens/s: 50 ms, half of it for the four tokens after the first.
    assert latency.table.rows[0][1] == "6.25 [6.25 to 6.25]" and latency.title.endswith("ms TPOT, median (interval)")
    (memory,) = node_memory_table(cells)
    assert memory.table.rows == (("gpu-a", "–", "7.00"), ("gpu-b", "–", "out of memory"))


def test_tokens_that_are_learnt_are_not_averaged_with_those_that_are_generated(tmp_path: Path) -> None:
    """Of 100 generated and 700 learnt tokens/s a node had 400."""
    one, other = cell(target="gpu-a"), train_cell(target="gpu-a")
    run = write_run(tmp_path / "run", make_plan([one, other], repeats=2, targets=TARGETS))
    write_measurements(run, one, [100.0, 100.0])
    write_measurements(run, other, [700.0, 700.0])
    table = node_table(node_cells(load_run(run)))
    assert table is not None
    assert [row[:4] for row in table.rows] == [
        ("gpu-a", "tokens/s (generate)", "1 of 1", "100"),
        ("gpu-a", "tokens/s (train)", "1 of 1", "700"),
    ]


def test_success_and_failures_of_nodes(tmp_path: Path) -> None:
    table = node_table(two_nodes(tmp_path))
    assert table is not None
    assert table.rows[0] == ("gpu-a", "tokens/s", "2 of 2", "200", "100 %", "4 of 4", "none", "50.0 %")
    assert table.rows[1][:7] == (
        "gpu-b",
        "tokens/s",
        "1 of 2",
        "50.0",
        "25.0 %",
        "1 of 4",
        "missing 1, out of memory 2",
    )


def test_what_differs_in_work_or_layout_has_a_table_of_its_own(tmp_path: Path) -> None:
    cells = [cell(), cell(LARGE), cell(dp=2), cell(new_tokens=9), train_cell(), cell(answers=True)]
    run = write_run(tmp_path / "run", make_plan(cells, repeats=1))
    for item in cells[:5]:
        write_measurements(run, item, [100.0])
    tables = throughput_table(node_cells(load_run(run)))
    assert len(tables) == 5 and len({table.title for table in tables}) == 5
    (step,) = [table for table in node_latency_table(node_cells(load_run(run))) if "train" in table.title]
    assert step.title.endswith("ms a step, median (interval)") and step.table.rows == (("local", "10,200"),)


def test_modes_of_an_engine_and_states_of_the_page_cache_have_tables_of_their_own(tmp_path: Path) -> None:
    """The first of them was shown as the engine's figure, and the faster one nowhere."""
    choices: list[dict[str, object]] = [
        {"engine": "transformers"},
        {"engine": "transformers", "engine_mode": "compiled"},
        {"page_cache": "cold"},
        {"page_cache": "warm"},
    ]
    cells = [Cell.model_validate(cell().model_dump() | each) for each in choices]
    run = write_run(tmp_path / "run", make_plan(cells, repeats=1))
    for place, item in enumerate(cells):
        write_measurements(run, item, [100.0 * (place + 1)])
    found = {table.title: table.table.rows for table in throughput_table(node_cells(load_run(run)))}
    end = ", generate, new tokens 5: tokens/s, median (interval)"
    names = ("transformers", "transformers compiled", "cold cache", "warm cache")
    assert found == {
        f"tiny, 1 rank, float32, {name}{end}": (("local", f"{100 * (place + 1)}"),) for place, name in enumerate(names)
    }


def test_the_sentence_is_true_of_cells_that_differ_in_a_variable(tmp_path: Path) -> None:
    """It said that cells of one place differ in their prompts or labels only; they had one figure of two."""
    cells = [cell().model_copy(update={"env": {"OMP_NUM_THREADS": threads}}) for threads in ("1", "2")]
    run = write_run(tmp_path / "run", make_plan(cells, repeats=1))
    for place, item in enumerate(cells):
        write_measurements(run, item, [100.0 * (place + 1)])
    found = node_cells(load_run(run))
    assert [table.table.rows for table in throughput_table(found)] == [(("local", "100"),)]
    assert "or a variable of the environment, the first of the plan is shown." in nodes_sentence(found)


def test_noop_has_items_and_passes(tmp_path: Path) -> None:
    one = Cell(workload=NoopWorkload(items=3, seconds=0.1), layout=Layout())
    run = write_run(tmp_path / "run", make_plan([one], repeats=1))
    write_record(run, one, samples={"0/pass_seconds": [0.3, 0.3]})
    cells = node_cells(load_run(run))
    assert batch_of(one) == 3 and throughput_table(cells)[0].table.rows == (("local", "10.0"),)
    assert node_latency_table(cells)[0].table.rows == (("local", "300"),)


def test_a_dozen_tables_at_most(tmp_path: Path) -> None:
    cells = [cell(new_tokens=size) for size in range(2, 18)]
    run = write_run(tmp_path / "run", make_plan(cells, repeats=1))
    for item in cells:
        write_measurements(run, item, [100.0])
    found = node_cells(load_run(run))
    assert len(throughput_table(found)) == MOST_TABLES == 12
    assert f"The first 12 of {len(cells)} combinations are shown" in nodes_sentence(found)


def test_no_cells() -> None:
    assert node_table([]) is None and node_latency_table([]) == throughput_table([]) == node_memory_table([]) == []


def test_how_many_prompts_a_pass_has_is_no_choice() -> None:
    def result(prompts: int, batch: int = 4, dp: int = 1) -> CellResult:
        work = GenerateWorkload(num_prompts=prompts, prompt_tokens=8, new_tokens=2, batch_size=batch)
        cell = Cell(model="folder:abc", workload=work, layout=Layout(dp=dp))
        return CellResult(cell.key, cell, f"{prompts}", "tiny", 1, {}, None)

    few, many, other, wide = result(4), result(8), result(8, batch=2), result(8, dp=2)
    assert longest([few, many, other, wide]) == ([many, other, wide], [few])
    assert longest([many]) == ([many], [])
