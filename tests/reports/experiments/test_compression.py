"""A compression experiment: its cells, its table, figure and words, from made-up records of known figures."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from configs.plans.paths import RunPaths
from configs.records.record import Status
from configs.spec.study import StudyError
from reports.experiments.compression import (
    CompressionResult,
    compression,
    compression_lines,
    compression_sentence,
    compression_table,
)
from reports.reading.load import StudyResult, load_run
from reports.render import render_page, render_report
from tests.support.run_folders.made_studies import (
    REPEATS,
    VOCABULARY,
    cells_of,
    planned,
    vectors,
    words,
    write_failure,
    write_plan,
)
from tests.support.run_folders.made_studies import write_measurements as measurements
from tests.support.run_folders.reports import whole_report

GENERATE = """
workload: {kind: generate, new_tokens: 9, num_prompts: 4, batch_size: 1}
experiments:
  small: {kind: compression, passes: [int8, prune_50, int4, aggressive], dtypes: [bfloat16, float32]}
"""
ENCODE = """
workload: {kind: encode, num_prompts: 4, batch_size: 2}
experiments: {small: {kind: compression, passes: [int8, int8_dynamic]}}
"""
MIB = 2**20


def generated(folder: Path) -> RunPaths:
    """int8 is 1.6 times as fast at a hundredth of a nat less, int4 slower and small, prune_50 far off; one fails."""
    plan = planned(GENERATE)
    run = write_plan(folder, plan)
    made = {
        "none": (1.0, 0.0, 200),
        "int8": (0.625, 0.001, 101),
        "int4": (1.25, 0.005, 60),
        "prune_50": (1.0, 2.0, 200),
    }
    for values, cell in cells_of(plan):
        if values["compression"] == "aggressive":
            write_failure(run, cell, Status.UNSUPPORTED, "no kernel for it here")
            continue
        seconds, shift, size = made[values["compression"]]
        wide = values["dtype"] == "float32"
        figures = {"weights_bytes": (2 if wide and shift == 0 else 1) * size * MIB, "answer_vocabulary": VOCABULARY}
        figures |= {"nonzero_share": 0.5} if values["compression"] == "prune_50" else {}
        figures |= {"compression_passes": values["compression"]} if shift else {}
        answers = words(shift) if values["answers"] else None
        measurements(run, cell, seconds * (1.5 if wide else 1.0), answers, peak_mib=size + 100, **figures)
    return run


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyResult, CompressionResult]:
    study = load_run(generated(tmp_path_factory.mktemp("compression") / "made"))
    return study, compression(study, study.plan.experiments[0])


def test_answers_that_are_no_numbers_are_told_and_leave_the_report_whole(tmp_path: Path) -> None:
    """Of a pass whose activations overflow: the page was refused with a traceback, the table had `not a number %`."""
    plan = planned(GENERATE.replace("int8, prune_50, int4, aggressive", "int4"), repeats=3)
    run = write_plan(tmp_path / "run", plan)
    for values, cell in cells_of(plan):
        answers = words(0.0)
        if values["compression"] == "int4":
            answers = {name: column * math.nan if name.endswith("nll") else column for name, column in answers.items()}
        measurements(run, cell, 1.0, answers if values["answers"] else None, repeats=3, answer_vocabulary=VOCABULARY)
    study = load_run(run)
    found = compression(study, study.plan.experiments[0])
    table = compression_table(found)
    assert [row[table.columns.index("perplexity")] for row in table.rows][1] == "not finite"
    assert "not a number" not in table.markdown()
    assert "The answers of int4, bfloat16 and int4, float32 are not finite numbers." in compression_lines(found)
    assert "int4" in render_page(run)


def test_each_pass_has_a_cell_for_its_speed_and_one_for_its_answers() -> None:
    plan = planned(GENERATE)
    points = cells_of(plan)
    assert len(points) == 2 * 5 * 2
    assert [plan.repeats[cell.key] for values, cell in points if values["answers"]] == [1] * 10
    assert {plan.repeats[cell.key] for values, cell in points if not values["answers"]} == {REPEATS}
    assert {cell.compression for values, cell in points if values["compression"] == "none"} == {()}
    assert [point.label for point in plan.experiments[0].points if point.baseline] == [
        "uncompressed, bfloat16",
        "uncompressed, bfloat16, answers",
    ]


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        ("{kind: compression, passes: [int7]}", "unknown pass 'int7'; use one of: int8"),
        ("{kind: compression, passes: [fp8]}", "balanced, aggressive, float8, prune_NN"),
        ("{kind: compression, passes: [int8+balanced]}", "no point"),
        (
            "{kind: compression, base: {workload: {kind: train}}}",
            "compression requires a workload of kind generate or seq2seq or encode",
        ),
    ],
)
def test_what_is_no_pass_is_named(experiment: str, message: str) -> None:
    text = f"workload: {{kind: generate}}\nexperiments: {{c: {experiment}}}"
    if message == "no point":  # the uncompressed model is measured still, and the pass kept as unsupported
        (refused,) = planned(text).experiments[0].refused
        assert "cannot be combined with other passes" in refused.reason
        return
    with pytest.raises(StudyError, match=message.replace("(", r"\(")):
        planned(text)


def test_ratios_sizes_and_losses_are_against_the_first_precision_uncompressed(
    result: tuple[StudyResult, CompressionResult],
) -> None:
    rows = {row.label: row for row in result[1].rows}
    int8 = rows["int8, bfloat16"]
    assert int8.throughput is not None and int8.throughput.value == pytest.approx(1.6)
    assert int8.throughput.interval is not None and int8.latency is not None
    assert int8.latency.value == pytest.approx(1.6)
    assert int8.share == pytest.approx(101 / 200) and int8.peak == pytest.approx(201 / 300)
    assert int8.loss == pytest.approx(math.expm1(0.001)) and int8.quality is not None
    assert 0 < (int8.quality.error or 0) < 0.001
    assert rows["uncompressed, bfloat16"].base and rows["uncompressed, bfloat16"].loss == 0
    wide = rows["uncompressed, float32"]
    assert wide.speed == pytest.approx(1 / 1.5) and wide.share == pytest.approx(2.0) and wide.loss == 0
    assert rows["prune_50, bfloat16"].loss == pytest.approx(math.expm1(2.0))


def test_the_front_is_what_no_pass_beats_in_both(result: tuple[StudyResult, CompressionResult]) -> None:
    assert [row.label for row in result[1].front("speed")] == ["uncompressed, bfloat16", "int8, bfloat16"]
    smallest = [row.label for row in result[1].front("share")]
    assert "int4, bfloat16" in smallest and "prune_50, bfloat16" not in smallest


def test_the_words_recommend_the_fastest_that_loses_little(result: tuple[StudyResult, CompressionResult]) -> None:
    text = compression_sentence(result[1])
    assert text.startswith("int8, bfloat16 gives 1.60 times")
    assert "the throughput of uncompressed, bfloat16 in 50.5 % of the bytes, at +0.100 % perplexity (±" in text
    assert (
        "The smallest of these is int4, bfloat16: 30.0 % of the bytes, 0.800 times as fast, at +0.501 % perplexity"
        in text
    )
    lines = " ".join(compression_lines(result[1]))
    assert "prune_50, bfloat16 (+639 % perplexity" in lines
    assert "aggressive, bfloat16 has no figure: unsupported (no kernel for it here)." in lines


def test_the_fastest_pass_names_those_that_are_as_fast(result: tuple[StudyResult, CompressionResult]) -> None:
    assert "not told apart" not in compression_sentence(result[1])
    rows = {row.label: row for row in result[1].rows}
    int8, int4 = rows["int8, bfloat16"], rows["int4, bfloat16"]
    as_fast = replace(int4, result=int8.result, throughput=int8.throughput)
    found = replace(result[1], rows=tuple(as_fast if row is int4 else row for row in result[1].rows))
    assert ", not told apart from int4, bfloat16. " in compression_sentence(found)


def test_the_table_has_a_row_for_each_with_the_ladder(result: tuple[StudyResult, CompressionResult]) -> None:
    table = compression_table(result[1])
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert len(rows) == 10 and rows["aggressive, float32"]["state"] == "unsupported"
    pruned = rows["prune\\_50, bfloat16"]
    assert pruned["not zero"] == "50.0 %" and pruned["first divergence"] == "prompt 3, token 2"
    assert rows["int8, bfloat16"]["first divergence"] == "none"
    assert rows["int8, bfloat16"]["perplexity"] == "7.396" and "±" in rows["int8, bfloat16"]["change of it"]


def test_a_rise_of_the_peak_has_its_sign(result: tuple[StudyResult, CompressionResult]) -> None:
    """As in tables of optimizations, and as the change of perplexity beside it."""
    first, *rest = result[1].rows
    table = compression_table(replace(result[1], rows=(first, *(replace(row, peak=1.12) for row in rest))))
    place = table.columns.index("change of peak")
    assert [row[place] for row in table.rows] == ["–", *["+12.0 %"] * len(rest)]


def test_the_report_shows_it_with_a_figure(tmp_path: Path) -> None:
    run = generated(tmp_path / "made")
    render_report(run)
    text = whole_report(run)
    assert "## Compression" in text and "![small: tiny](plots/small-tiny.png)" in text
    assert (run.plots / "small-tiny.png").is_file()
    assert "> **Compression of tiny:** int8, bfloat16 gives 1.60 times" in text
    # The fastest is a compressed model, which answers otherwise: what to run is said of the model as it is.
    assert "**Run tiny as 1 rank, bfloat16, batch 1, 9 tokens:**" in text
    assert "| local | 1 | 1 rank, bfloat16, int8 |" not in text


def test_embeddings_are_compared_by_their_angle(tmp_path: Path) -> None:
    plan = planned(ENCODE)
    run = write_plan(tmp_path / "made", plan)
    turned = {"none": 0.0, "int8": 0.01, "int8_dynamic": 0.5}
    for values, cell in cells_of(plan):
        angle = turned[values["compression"]]
        seconds = 0.5 if angle else 1.0
        measurements(run, cell, seconds, vectors(angle) if values["answers"] else None, weights_bytes=MIB)
    study = load_run(run)
    found = compression(study, study.plan.experiments[0])
    assert [row.loss for row in found.rows] == pytest.approx([0, 1 - math.cos(0.01), 1 - math.cos(0.5)], rel=1e-4)
    assert found.base.result.unit == "embeddings/s"
    table = compression_table(found)
    assert "cosine distance, worst" in table.columns and "perplexity" not in table.columns
    assert "at a cosine distance of 5.00e-5" in compression_sentence(found)
    assert "Not within a cosine distance of at most 0.0100: int8_dynamic, float32 (a cosine distance of 0.122)." in (
        compression_lines(found)
    )
    render_report(run)


def test_without_answers_or_base_nothing_is_claimed(tmp_path: Path) -> None:
    plan = planned(ENCODE)
    run = write_plan(tmp_path / "made", plan)
    study = load_run(run)
    found = compression(study, study.plan.experiments[0])
    assert "has no figure (missing), so nothing is compared" in compression_sentence(found)
    for values, cell in cells_of(plan):
        if not values["answers"]:
            measurements(run, cell, 1.0)
    study = load_run(run)
    found = compression(study, study.plan.experiments[0])
    assert "keep the model as it is" in compression_sentence(found)
    assert "What the answers of int8, float32 and int8_dynamic, float32 lost is not known." in compression_lines(found)
    assert compression_sentence(found).startswith("What the answers of the measured passes lost is not known")


@pytest.mark.parametrize(
    ("speeds", "turns", "text"),
    [
        ((), (0.001, 0.002), "int8, float32 and int8_dynamic, float32 have a cosine distance of at most 0.0100, but no "
         "speed in a block with the uncompressed model, so no pass is recommended."),
        (("int8", "int8_dynamic"), (1.0, None), "No judged pass has a cosine distance of at most 0.0100: keep the "
         "model as it is."),
        (("int8", "int8_dynamic"), (1.0, 0.8), "No measured pass has a cosine distance of at most 0.0100: keep the "
         "model as it is."),
    ],
)  # fmt: skip
def test_what_is_not_known_of_a_pass_does_not_speak_against_it(
    tmp_path: Path, speeds: tuple[str, ...], turns: tuple[float | None, ...], text: str
) -> None:
    plan = planned(ENCODE)
    run = write_plan(tmp_path / "made", plan)
    turned = {"none": 0.0, **dict(zip(("int8", "int8_dynamic"), turns, strict=True))}
    for values, cell in cells_of(plan):
        turn = turned[values["compression"]]
        if values["answers"] and turn is not None:
            measurements(run, cell, 1.0, vectors(turn))
        elif not values["answers"] and values["compression"] in ("none", *speeds):
            measurements(run, cell, 1.0)
    study = load_run(run)
    assert compression_sentence(compression(study, study.plan.experiments[0])) == text
