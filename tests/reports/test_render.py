"""The report of made-up run folders: every number that it prints is known beforehand."""

import csv
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2
import numpy as np
import pytest
from markdown_it import MarkdownIt
from pyarrow import parquet

from configs.common.base import canonical_json
from configs.plans.paths import RunPaths
from configs.records.record import Failure, SchemaError, Status
from configs.spec.cell import Cell
from configs.workloads.generate import GenerateWorkload
from configs.workloads.noop import NoopWorkload
from configs.workloads.train import TrainWorkload
from reports import render
from reports.render import ReportSummary, render_report, report_text
from reports.templating import template_environment
from tests.support.run_folders.report_runs import (
    MODEL,
    RANDOM,
    REPEATS,
    experiment,
    generate,
    generated,
    plan_of,
    write_measurements,
    write_plan,
    write_record,
)
from tests.support.run_folders.reports import whole_report


def answers(tokens: list[list[int]], vocabulary: int = 4) -> dict[str, Any]:
    """Answers, and the noise that a reference measures beside them: 4 orders."""
    count, new = len(tokens), len(tokens[0])
    noise = {"nll": 3 * count, "rms": 2 * count, "largest": 2 * count, "kl": 2 * count, "flips": 2 * count}
    noise |= {"columns": vocabulary, "gaps": count * new * (vocabulary - 1), "chain": 1}
    return {
        "0/answer_prompts": np.arange(count, dtype=np.int32),
        "0/answer_tokens": np.asarray(tokens, dtype=np.int32).ravel(),
        "0/answer_nll": np.full(3 * count, 2.0),
        "0/answer_nll_prompts": np.repeat(np.arange(count), 3),
        "0/answer_logits": np.tile(np.linspace(-1, 1, vocabulary, dtype=np.float32), 2 * count),
        "0/answer_logit_prompts": np.repeat(np.arange(count), 2),
        "0/answer_logit_positions": np.tile([0, 3], count),
        "0/answer_gaps": np.zeros(count * new, dtype=np.float32),
        "0/answer_top_tokens": np.tile(np.arange(vocabulary), count * new),
        "0/answer_top_logits": np.tile(np.linspace(1, -1, vocabulary, dtype=np.float32), count * new),
        **{f"0/noise_float32_{name}": np.full(4 * size, 1e-6) for name, size in noise.items()},
    }


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, ReportSummary]:
    run = quick_run(tmp_path_factory.mktemp("reports") / "quick")
    return run, render_report(run)


def quick_run(folder: Path) -> RunPaths:
    """All five experiments and a training cell. 80 tokens in two passes: 1 s a pass gives 40 tokens/s."""
    one, two, wide = generate(), generate(dp=2), generate(num_prompts=16, dp=2)
    large, huge, half = generate(batch_size=8), generate(batch_size=16), generate(dtype="bfloat16")
    single = generate(RANDOM)
    reference = Cell(
        model=MODEL.identity,
        workload=GenerateWorkload(num_prompts=2, new_tokens=3, answers=True),
        engine="transformers",
    )
    candidate = reference.model_copy(update={"engine": "rankwise"})
    train = Cell(model=MODEL.identity, workload=TrainWorkload(steps=4))
    experiments = [
        experiment("strong", "strong", [(one, {"ranks": 1}, "1 rank"), (two, {"ranks": 2}, "2 ranks")], grow="dp"),
        experiment("weak", "weak", [(one, {"ranks": 1}, "1 rank"), (wide, {"ranks": 2}, "2 ranks")], grow="dp"),
        experiment(
            "batch",
            "sweep",
            [
                (cell, {"workload.batch_size": size}, f"batch_size {size}")
                for cell, size in ((one, 4), (large, 8), (huge, 16))
            ],
        ),
        experiment(
            "half", "optimization", [(one, {"variant": "baseline"}, "baseline"), (half, {"variant": "bf|16"}, "bf|16")]
        ),
        experiment(
            "right", "correctness", [(reference, {}, "transformers"), (candidate, {}, "rankwise, 1 rank, float32")]
        ),
    ]
    cells = [one, two, wide, large, huge, half, single, reference, candidate, train]
    plan = plan_of(cells, experiments)
    plan = plan.model_copy(update={"repeats": {**plan.repeats, reference.key: 1, candidate.key: 1, train.key: 1}})
    run = write_plan(folder, plan)
    write_measurements(run, one, [1.0, 1.25, 0.8], peak_mib=100)
    write_measurements(run, two, [0.5, 0.5, 0.5], peak_mib=80, others_cpu_share=0.25)
    write_measurements(run, wide, [1.0, 1.0, 1.0])
    write_measurements(run, large, [0.9, 0.9, 0.9], peak_mib=150)
    failure = Failure(message="needs | about <31> GiB", rank=1, log="jobs/j/rank_1.log")
    for repeat in range(REPEATS):
        write_record(run, huge, repeat, status=Status.OUT_OF_MEMORY, failure=failure)
    write_measurements(run, half, [0.5, 0.5, 0.5])
    write_measurements(run, single, [2.0, 2.0, 2.0], peak_mib=200)
    for cell in (reference, candidate):
        samples = {**generated(cell, 1.0), **answers([[1, 2, 3], [4, 5, 6]])}
        path = write_record(run, cell, samples=samples, figures={"answer_vocabulary": 4})
        line = '{"prompt_index": 0, "prompt": "def f", "completion": "(x):\\n  return *x*"}\n'
        path.with_name(f"{path.stem}.completions_rank_0.jsonl").write_text(line)
    figures = {"tokens_per_step": 1024, "heldout_loss": 1.5, "heldout_perplexity": 4.4817, "heldout_tokens": 2048}
    losses = {"0/step_seconds": [0.5, 0.5, 0.25], "0/loss": [3.0, 2.0, 1.75, 1.5]}
    write_record(run, train, samples=losses, figures=figures)
    return run


def files_of(folder: Path) -> dict[str, bytes]:
    names = ["report.md", "appendix.md", "cells.csv", "records.parquet"]
    found = [folder / name for name in names] + sorted((folder / "plots").glob("*"))
    return {path.name: path.read_bytes() for path in found}


def cells_of(run: RunPaths) -> dict[str, dict[str, str]]:
    with run.cells_csv.open(newline="") as file:
        return {line["key"]: line for line in csv.DictReader(file)}


def test_numbers_of_a_whole_study(rendered: tuple[RunPaths, ReportSummary]) -> None:
    quick, summary = rendered
    text = whole_report(quick)
    # 2 ranks: 80 tokens in 1 s; 1 rank: the median of 40, 32 and 50 tokens/s.
    assert "| 1 (baseline) | 3 of 3 | 40.0 [32.0 to 50.0] | 1 | 100 % | 5.00 [5.00 to 5.00] |" in text
    assert "| 2 | 3 of 3 | 80.0 [80.0 to 80.0] | 2.00 [1.60 to 2.50] | 100 % [80.0 to 125] |" in text
    assert "2 ranks give 2.00 times (1.60 to 2.50, range of 3 pairs) the throughput of 1 rank with the work" in text
    # Pairs: 80/40, 80/32, 80/50.
    assert "| bf\\|16 | 3 | 80.0 [80.0 to 80.0] | 2.00 [1.60 to 2.50] |" in text
    assert "out of memory" in text and "needs \\| about &lt;31&gt; GiB" in text and "`jobs/j/rank_1.log`" in text
    assert (
        "**agrees** (not reached: rows 2 to 8 of a batch; decode steps 1 to 5) | 2 of 2" in text
        and "return \\*x\\*" in text
    )
    assert "Other processes took more than 10 % of the machine's CPU during 1 cell, tiny, " in text
    assert "). Its figures are of a machine that was busy with something else: measure it again" in text
    assert "| 4 | 3.00 | 1.50 | 1.50 | 4.482 | 2,048 |" in text
    assert summary.statuses == {"completed": 21, "out_of_memory": 3, "memory pass missing": 3}
    assert "missing. Further passes planned: 8 memory." in text
    assert summary.cells_without_measurement == 1
    assert summary.path == quick.report


def test_the_opening_says_what_to_run(rendered: tuple[RunPaths, ReportSummary]) -> None:
    tiny, random, scaling, right, lost = rendered[1].sentences
    assert tiny.startswith("Run tiny as 1 rank, bfloat16, batch 4, 5 tokens: 80.0 tokens/s (80.0 to 80.0, range of 3")
    assert "2.00 times (1.60 to 2.50, range of 3 pairs) the simplest (1 rank, float32, batch 4, 5 tokens)" in tiny
    assert random.startswith("Run llama-110m (random weights) as 1 rank")
    assert random.endswith("; 1 more kind of work under recommendations.")
    assert scaling == (
        "More ranks add throughput, up to the 2 ranks measured: strong scaling of tiny gives 100 % [80.0 to 125] of "
        "linear at 2 ranks; 1 rank is recommended, as no larger layout does clearly more per rank."
    )
    assert right.startswith(
        "The answers are right. tiny, rankwise, 1 rank, float32, differs from the reference by the noise"
    )
    assert lost == (
        "1 of 10 cells has no figure: tiny, 1 rank, float32, batch 16, 5 tokens: "
        "out of memory (needs | about <31> GiB)."
    )


def test_cells_and_records_for_other_programs(rendered: tuple[RunPaths, ReportSummary]) -> None:
    quick, _ = rendered
    one, two = generate(), generate(dp=2)
    line = cells_of(quick)[two.key]
    assert line["experiments"] == "strong" and cells_of(quick)[one.key]["experiments"] == "strong; weak; batch; half"
    assert [float(line[f"tokens_per_second_{what}"]) for what in ("median", "min", "max")] == [80.0, 80.0, 80.0]
    assert float(line["ttft_seconds_median"]) == pytest.approx(0.010)
    assert int(line["peak_memory_bytes_all_ranks"]) == 2 * int(line["peak_memory_bytes_largest_rank"]) == 160 * 2**20
    assert line["repeats_completed"] == "3" and line["workload_new_tokens"] == "5" and line["workload_steps"] == ""
    table = parquet.read_table(quick.records_parquet)
    rows = {row["path"]: row for row in table.to_pylist()}
    assert len(rows) == len(list(quick.records.glob("*/*.json")))
    row = rows[f"records/{one.key}/r1-a1.json"]
    assert row["used"] and row["tokens_per_second"] == pytest.approx(32.0) and row["figure_cpu_seconds"] == 1.5
    failed = next(row for row in rows.values() if row["status"] == "out_of_memory")
    assert failed["failure_rank"] == 1 and failed["tokens_per_second"] is None
    assert "out_of_memory" not in whole_report(quick)  # beside the states of tables and the opening


def test_rendering_again_gives_the_same_bytes(rendered: tuple[RunPaths, ReportSummary], tmp_path: Path) -> None:
    quick, _ = rendered
    first = files_of(quick.folder)
    leave_out = shutil.ignore_patterns(*first)
    copy = RunPaths(shutil.copytree(quick.folder, tmp_path / "elsewhere", ignore=leave_out))
    (copy.plots / "of-an-older-report.png").write_bytes(b"old")
    render_report(copy)
    assert files_of(copy.folder) == first
    assert len([name for name in first if name.endswith(".svg")]) == 12
    text = (first["report.md"] + first["appendix.md"]).decode()
    assert all(f"plots/{name}" in text for name in first if name.endswith(".png"))
    assert str(quick.folder) not in text


def test_the_slowest_rank_ends_a_pass(tmp_path: Path) -> None:
    cell = generate(dp=2)
    run = write_plan(tmp_path / "run", plan_of([cell], [], repeats=1))
    write_record(run, cell, samples=generated(cell, 0.5, slow=0.5))
    render_report(run)
    assert float(cells_of(run)[cell.key]["tokens_per_second_median"]) == pytest.approx(40.0)


def test_no_record_at_all(tmp_path: Path) -> None:
    one, two = generate(), generate(dp=2)
    points = [(one, {"ranks": 1}, "1 rank"), (two, {"ranks": 2}, "2 ranks")]
    kinds = ("strong", "weak", "sweep", "optimization", "correctness")
    run = write_plan(tmp_path / "run", plan_of([one, two], [experiment(kind, kind, points) for kind in kinds]))
    summary = render_report(run)
    assert summary.statuses == {"missing": 6} and summary.cells_without_measurement == 2
    assert summary.sentences[-1].startswith(
        "2 of 2 cells have no figure: tiny, 1 rank, float32, batch 4, 5 tokens: not"
    )
    assert "no attempt has left a record" in whole_report(run)
    assert not run.plots.exists()
    assert parquet.read_table(run.records_parquet).num_rows == 0


def test_a_plan_without_experiments_and_only_failures(tmp_path: Path) -> None:
    cell = Cell(workload=NoopWorkload(label="dies"))
    run = write_plan(tmp_path / "run", plan_of([cell], [], repeats=1))
    write_record(run, cell, status=Status.TIMEOUT, failure=Failure(message="no sign of life for 60 s"))
    write_record(run, cell, measuring_pass="memory", status=Status.LOST)
    summary = render_report(run)
    text = whole_report(run)
    assert summary.statuses == {"timeout": 1}
    assert "no sign of life for 60 s" in text and "memory pass | lost" in text
    assert "## Strong scaling" not in text and "## Memory and CPU" not in text


def test_the_attempt_that_decides(tmp_path: Path) -> None:
    """A completed attempt wins over a later failure; else the last counts. Another plan's records are counted."""
    cell, other = generate(), generate(new_tokens=7)
    run = write_plan(tmp_path / "run", plan_of([cell], [], repeats=2))
    write_record(run, cell, 0, attempt=1, samples=generated(cell, 1.0))
    write_record(run, cell, 0, attempt=2, status=Status.FAILED)
    write_record(run, cell, 1, attempt=1, status=Status.NODE_FAILED, failure=Failure(message="first"))
    write_record(run, cell, 1, attempt=2, status=Status.PREEMPTED, failure=Failure(message="second"))
    write_record(run, cell, 2, samples=generated(cell, 1.0))
    write_record(run, other, 0, samples=generated(other, 1.0))
    summary = render_report(run)
    text = whole_report(run)
    assert summary.statuses == {"completed": 1, "preempted": 1, "memory pass missing": 1}
    assert "memory pass | missing" in text, "a pass that was asked for and is not there is a failure"
    assert "second" in text and "first |" not in text
    assert "2 records of 2 cells in this folder are no part of this plan and are left out." in text
    assert summary.sentences[-1] == "Every cell has a figure, but 1 repeat was not measured (preempted)."


def test_a_report_that_is_made_while_the_run_ends_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the place of the run's own report, with the records of a moment before."""
    cell = generate()
    run = write_plan(tmp_path / "run", plan_of([cell], [], repeats=2))
    write_record(run, cell, 0, samples=generated(cell, 1.0))
    analyzed, ended = render.analyze_run, list[str]()

    def while_the_run_ends(of: RunPaths) -> render.Analysis:
        found = analyzed(of)
        if not ended:
            write_record(run, cell, 1, samples=generated(cell, 1.0))
            render.render_analysis(run, analyzed(run))
            ended.append(run.report.read_text())
        return found

    monkeypatch.setattr(render, "analyze_run", while_the_run_ends)
    assert render_report(run).statuses == {"completed": 2, "memory pass missing": 1}
    assert [run.report.read_text()] == ended


def test_several_environments_are_said(tmp_path: Path) -> None:
    cell = generate()
    run = write_plan(tmp_path / "run", plan_of([cell], [], repeats=2))
    run.environment("e2").write_text(canonical_json({"python": "3.11.2", "commit": "def456", "variables": {"A": "1"}}))
    write_record(run, cell, 0, samples=generated(cell, 1.0))
    write_record(run, cell, 1, samples=generated(cell, 1.0), environment="e2")
    render_report(run)
    text = whole_report(run)
    assert "The records come from 2 environments that differ in commit: " in text
    assert "| `commit` | abc123 | def456 |" in text and "| `variables.A` | 1 |" in text


def test_damaged_records_are_left_out_and_told(tmp_path: Path) -> None:
    cells = [generate(), generate(new_tokens=9)]
    run = write_plan(tmp_path / "run", plan_of(cells, [], repeats=1))
    path = write_record(run, cells[0], samples=generated(cells[0], 1.0))
    write_record(run, cells[1], samples=generated(cells[1], 1.0))
    whole = path.with_suffix(".npz").read_bytes()
    path.with_suffix(".npz").write_bytes(whole[: len(whole) // 2])
    summary = render_report(run)
    relative = path.relative_to(run.folder).as_posix()
    assert summary.statuses == {"completed": 1, "missing": 1, "memory pass missing": 1}
    assert summary.sentences[0].startswith(f"1 file of the run cannot be read: {relative} (")
    assert "figures and recommendations may be others" in summary.sentences[0]
    text = whole_report(run)
    assert text.split("\n")[2].startswith("> **1 file of the run cannot be read:**"), "before any recommendation"
    assert f"| `{relative}` | {relative[:-5]}.npz: the record's samples cannot be read" in text
    assert ": no record that can be read." in summary.sentences[-1] and "not measured yet" not in text
    assert "batch 4, 5 tokens | 0 | missing | 1 | no attempt has left a record that can be read |" in text
    again = render_report(run)
    assert again == summary and whole_report(run) == text
    path.write_text("{")
    assert "not JSON" in render_report(run).sentences[0]
    path.write_text('{"schema_version": 99}')
    with pytest.raises(SchemaError, match=r"r0-a1\.json"):
        render_report(run)


def test_of_the_repeats_without_a_figure_the_unreadable_are_told_apart(tmp_path: Path) -> None:
    """It was said of all that no attempt had left a record."""
    cell = generate()
    run = write_plan(tmp_path / "run", plan_of([cell], [], repeats=4))
    paths = [write_record(run, cell, repeat, samples=generated(cell, 1.0)) for repeat in (0, 1, 2)]
    paths[1].write_text("{")
    run.set_aside.mkdir()
    paths[2].rename(run.set_aside / f"{cell.key}--{paths[2].name}")
    summary, text = render_report(run), whole_report(run)
    told = "but 2 repeats had no record that can be read and 1 repeat had no record yet."
    assert summary.sentences[-1] == f"Every cell has a figure, {told}"
    assert "| 1 and 2 | missing | 1 | no attempt has left a record that can be read |" in text
    assert "| 3 and memory pass | missing | 0 | no attempt has left a record |" in text


def test_many_missing_repeats_are_told_as_rows(tmp_path: Path) -> None:
    """Each row of a study that had hardly begun listed every number of thousands."""
    cell = generate()
    run = write_plan(tmp_path / "run", plan_of([cell], [], repeats=2000))
    for repeat in (0, 3, 7):
        write_record(run, cell, repeat, samples=generated(cell, 1.0))
    render_report(run)
    told = "1, 2, 4, 5, 6, 8 to 1999 and memory pass"
    assert f"| {told} | missing | 0 | no attempt has left a record |" in whole_report(run)


def live_markup(text: str) -> list[str]:
    """What a reader of CommonMark with tables takes for HTML, a link or an image, whatever it leads to."""
    reader = MarkdownIt("commonmark").enable("table")
    reader.validateLink = lambda url: True  # type: ignore[method-assign]
    found, left = list[str](), reader.parse(text)
    while left:
        token = left.pop()
        left += token.children or []
        found += [token.content] if token.type.startswith("html") else [str(value) for value in token.attrs.values()]
    return found


def test_the_markup_of_others_would_be_seen() -> None:
    evil = "<img src=x onerror=alert(1)> [a](javascript:b)"
    for text in (evil, f"| a |\n| --- |\n| {evil} |\n"):
        assert sorted(live_markup(text)) == ["<img src=x onerror=alert(1)>", "javascript:b"]
    assert live_markup("`<img onerror=a>` \\<img onerror=a> &lt;img onerror=a> \\[a\\](javascript:b)") == []


def test_names_of_others_neither_move_the_cursor_nor_the_markup(tmp_path: Path) -> None:
    """Escape codes, line ends, Markdown and HTML of names, hosts, labels and messages are text in all that is made."""
    evil = "\x1b]0;x\x07\x1b[2J\u202e|<img src=x onerror=alert(1)>\n# head [a](javascript:b) `c` *d*"
    model = MODEL.model_copy(update={"name": evil})
    cell = generate(model)
    point = experiment(evil, "sweep", [(cell, {"dtype": evil}, evil)], model=evil)
    plan = plan_of([cell], [point], repeats=2).model_copy(update={"models": (model,), "study": evil})
    run = write_plan(tmp_path / "run", plan)
    run.environment("e1").write_text(canonical_json({evil: evil, "commit": evil}))
    write_record(run, cell, 0, samples=generated(cell, 1.0), hosts=[evil])
    failure = Failure(message=evil, log=evil, kind=evil)
    write_record(run, cell, 1, status=Status.FAILED, failure=failure, hosts=[evil])
    summary = render_report(run)
    assert "onerror" in whole_report(run)
    live = live_markup(whole_report(run))
    assert live and not [found for found in live if "onerror=" in found or "javascript:" in found]
    for text in (whole_report(run), *summary.sentences):
        assert not set(text) & set("\x1b\x07\u202e")
        assert "\n# head" not in text
    for image in run.plots.glob("*.svg"):
        ElementTree.parse(image)
    assert all(len(path.name) < 120 for path in run.plots.iterdir())


def test_a_long_name_has_a_report(tmp_path: Path) -> None:
    """Names are bounded when a study is read; a folder of another origin may still have a long one."""
    cell, name = generate(), "x" * 300
    experiments = [experiment(name + end, "sweep", [(cell, {"dtype": "float32"}, "a")]) for end in "ab"]
    run = write_plan(tmp_path / "run", plan_of([cell], experiments, repeats=1))
    write_record(run, cell, samples=generated(cell, 1.0))
    render_report(run)
    drawn = sorted(path.name for path in run.plots.glob("*.png") if path.name.startswith("xxx"))
    assert len(drawn) >= 2 and all(len(name) < 100 for name in drawn)
    assert all(f"plots/{name}" in whole_report(run) for name in drawn)


def test_a_thousand_records_render_quickly(tmp_path: Path) -> None:
    cells = [Cell(workload=NoopWorkload(label=f"n{index}")) for index in range(250)]
    run = write_plan(tmp_path / "run", plan_of(cells, [], repeats=4))
    for cell in cells:
        for repeat in range(4):
            write_record(run, cell, repeat, samples={"0/pass_seconds": [0.01]})
    assert render_report(run).statuses == {"completed": 1000, "memory pass missing": 250}
    assert len(cells_of(run)) == 250 and "100 items/s" in whole_report(run)


def test_the_template_refuses_unknown_names() -> None:
    with pytest.raises(jinja2.UndefinedError, match="misspelt"):
        template_environment().from_string("{{ misspelt }}").render()
    with pytest.raises(jinja2.UndefinedError):
        report_text({})


def test_links_of_names_that_differ_in_a_dot_lead_to_each_ones_heading(tmp_path: Path) -> None:
    """GitHub drops the dot of opt-1.3b: both links led to the first of the two headings."""
    small, large = (MODEL.model_copy(update={"name": name, "identity": name}) for name in ("opt-1.3b", "opt-13b"))
    cells = [generate(small), generate(large)]
    experiments = [
        experiment("speed", "sweep", [(cell, {"workload.batch_size": 4}, "batch_size 4")], model=model.name)
        for cell, model in zip(cells, (small, large), strict=True)
    ]
    run = write_plan(tmp_path / "run", plan_of(cells, experiments).model_copy(update={"models": (small, large)}))
    for cell in cells:
        write_measurements(run, cell, [1.0])
    render_report(run)
    headings: dict[str, str] = {}
    times: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", run.appendix.read_text(), re.MULTILINE):
        fragment = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        times[fragment] += 1
        headings[f"{fragment}-{times[fragment] - 1}" if times[fragment] > 1 else fragment] = heading
    linked = re.findall(r"^## (.+?)\n.*?\(\[more\]\(appendix.md#(.+?)\)\)", run.report.read_text(), re.DOTALL | re.M)
    assert [(heading, headings[fragment]) for heading, fragment in linked] == [
        ("speed: opt-1.3b", "speed: opt-1.3b"), ("speed: opt-13b", "speed: opt-13b")
    ]  # fmt: skip
