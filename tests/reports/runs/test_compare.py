"""Two runs held against each other: verdicts on numbers whose answer is known, and what the texts say of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as xml

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.numbers.statistics import ROUNDING, Ratio
from reports.reading.load import load_run
from reports.reading.run_figures import FIGURE_KINDS, RunFigures, run_figures
from reports.runs.between_runs import BetweenRuns, between_runs
from reports.runs.compare import compare, judge_change, repeats_for_interval, repeats_needed
from reports.runs.compare_export import as_json, junit_xml
from reports.runs.compare_text import change_table, comparison_headline, markdown, run_line, terminal_text
from reports.runs.comparison import Comparison, ComparisonVerdict
from reports.text import aligned
from tests.support.run_folders.compared_runs import HOME, around, cell_of, run_of
from tests.support.run_folders.made_studies import planned, write_plan

THROUGHPUT, TTFT = FIGURE_KINDS[:2]


def compared(first: Sequence[float], second: Sequence[float], figure: str = "throughput") -> Comparison:
    """One cell, one figure."""
    cells = [cell_of(figures={figure: values}) for values in (first, second)]
    return compare(run_of(cells[0]), run_of(cells[1], name="b"))


def test_slower_by_ten_per_cent_is_a_regression() -> None:
    comparison = compared(around(100), around(90))
    (cell,) = comparison.cells
    change = cell.change("throughput")
    assert change is not None and change.bounds is not None
    assert change.ratio.value == pytest.approx(0.9, rel=1e-6)
    assert change.bounds[0] < 0.9 < change.bounds[1] < 0.95
    assert cell.verdict is ComparisonVerdict.WORSE and comparison.regressions == (cell,)
    assert comparison_headline(comparison) == "Regression: 1 of 1 cell is worse by more than 5 %."


def test_faster_the_same_and_not_to_be_told() -> None:
    assert compared(around(90), around(100)).cells[0].verdict is ComparisonVerdict.BETTER
    same = compared(around(100), around(100.2))
    assert same.cells[0].verdict is ComparisonVerdict.SAME and not same.regressions
    wide = compared(around(100, 0.3), around(96, 0.3))
    (cell,) = wide.cells
    assert cell.verdict is ComparisonVerdict.CANNOT_TELL and not wide.regressions
    change = cell.change("throughput")
    assert change is not None and change.repeats_needed is not None and change.repeats_needed > 10
    assert comparison_headline(wide) == "No regression of more than 5 % is shown. Of 1 cell, 1 cannot be told."


@pytest.mark.parametrize("figure", ["throughput", "step_seconds"])
def test_what_rounding_leaves_of_equal_figures_is_the_same(figure: str) -> None:
    """Steps read with a coarse clock have no noise: 0.1 + 0.2 is not quite 0.3."""
    for first, second in ((0.3, 0.1 + 0.2), (0.1 + 0.2, 0.3)):
        assert compared([first] * 8, [second] * 8, figure).cells[0].verdict is ComparisonVerdict.SAME


def test_worse_within_the_threshold_closes_no_gate() -> None:
    comparison = compared(around(100, 0.002), around(98, 0.002))
    assert comparison.cells[0].verdict is ComparisonVerdict.WORSE and not comparison.regressions
    assert "1 worse by less" in comparison_headline(comparison)


def test_latency_is_worse_when_it_grows() -> None:
    figures = [{"throughput": around(100), "ttft_seconds": around(ttft)} for ttft in (0.010, 0.012)]
    comparison = compare(run_of(cell_of(figures=figures[0])), run_of(cell_of(figures=figures[1])))
    (cell,) = comparison.cells
    ttft, throughput = cell.change("ttft_seconds"), cell.change("throughput")
    assert throughput is not None and throughput.verdict is ComparisonVerdict.SAME
    assert ttft is not None and ttft.verdict is ComparisonVerdict.WORSE and ttft.regression
    assert cell.verdict is ComparisonVerdict.WORSE and comparison.comparisons == 2
    assert "time to first token 20.0 % higher" in terminal_text(comparison) and "10.0 to 12.0 ms" in terminal_text(
        comparison
    )


def test_intervals_are_corrected_for_every_ratio_of_the_table() -> None:
    one = compared(around(100), around(95))
    cells = [
        [cell_of(f"k{index}", figures={"throughput": around(middle)}) for index in range(50)] for middle in (100, 95)
    ]
    many = compare(run_of(*cells[0]), run_of(*cells[1]))
    single, corrected = one.cells[0].changes[0].bounds, many.cells[0].changes[0].bounds
    assert many.comparisons == 50 and single is not None and corrected is not None
    assert corrected[0] < single[0] and single[1] < corrected[1]


def test_too_few_repeats_give_no_interval_and_no_alarm() -> None:
    comparison = compared(around(100, count=5), around(50, count=5))
    (change,) = comparison.cells[0].changes
    assert change.bounds is None and change.repeats_needed == 6 and not comparison.regressions
    assert "cannot tell; 6 repeats in each run would give an interval, there are 5" in terminal_text(comparison)
    assert repeats_for_interval(1) == 6 and repeats_for_interval(1000) > 6


def test_a_verdict_is_seen_in_the_ratio_beside_it() -> None:
    """`better` stood beside `1.00 (1.00 to 1.00)` where the noise is so little that 0.2 per cent are told apart."""
    first, second = cell_of(figures={"throughput": around(1000, 0.0003)}), around(1002, 0.0003)
    found = compare(run_of(first), run_of(cell_of(figures={"throughput": second})))
    (row,) = change_table(found).rows
    assert row[1] == "better" and row[4] == "1.002 (1.002 to 1.002)", row
    same = compare(run_of(first), run_of(first))
    assert change_table(same).rows[0][4].startswith("1.00 ("), "no more digits than they say something"


def test_peak_memory_is_shown_and_not_judged() -> None:
    cells = [cell_of(figures={"throughput": around(100), "peak_memory_bytes": [peak]}) for peak in (2e8, 4e8)]
    comparison = compare(run_of(cells[0]), run_of(cells[1]))
    change = comparison.cells[0].change("peak_memory_bytes")
    assert (
        change is not None
        and change.ratio.value == pytest.approx(2)
        and change.verdict is None
        and not comparison.regressions
    )
    assert comparison.comparisons == 1 and change_table(comparison).rows[0][-1] == "2.00"
    said = "peak memory, all ranks 100 % higher, 191 to 381 MiB, from one pass of each, so without a verdict"
    assert said in terminal_text(comparison)


@pytest.mark.parametrize(
    ("first", "second", "verdict", "regression", "why"),
    [
        ("completed", "out_of_memory", ComparisonVerdict.WORSE, True, "newly fails: out of memory"),
        ("completed", "lost", ComparisonVerdict.WORSE, True, "newly fails: lost"),
        ("timeout", "completed", ComparisonVerdict.BETTER, False, "works again: timeout before"),
        ("completed", "missing", ComparisonVerdict.CANNOT_TELL, False, "no figure in the second: not measured"),
        ("completed", "over_budget", ComparisonVerdict.CANNOT_TELL, False, "no figure in the second: over budget"),
        (
            "failed",
            "failed",
            ComparisonVerdict.CANNOT_TELL,
            False,
            "no figure in the first: failed and the second: failed",
        ),
    ],
)
def test_a_cell_without_a_figure(
    first: str, second: str, verdict: ComparisonVerdict, regression: bool, why: str
) -> None:
    comparison = compare(run_of(cell_of("ok"), cell_of(status=first)), run_of(cell_of("ok"), cell_of(status=second)))
    cell = comparison.cells[1]
    assert (cell.verdict, cell.regression, cell.why) == (verdict, regression, why)
    assert comparison.comparisons == 1 and why in terminal_text(comparison)


def test_a_comparison_without_a_ratio_says_nothing_of_ratios() -> None:
    """`The intervals hold for 0 ratios at once.`"""
    comparison = compare(run_of(cell_of(status="failed")), run_of(cell_of()))
    assert comparison.comparisons == 0 and "ratio" not in terminal_text(comparison)


def test_repeats_that_failed_are_said() -> None:
    comparison = compare(run_of(cell_of()), run_of(cell_of(failed=2)))
    assert comparison.cells[0].verdict is ComparisonVerdict.SAME
    assert "repeats failed: 2 of 10 in the second" in terminal_text(comparison)


def test_unmatched_cells_and_those_that_keep_answers_are_listed() -> None:
    kept = cell_of("answers", compared=False)
    comparison = compare(run_of(cell_of(), cell_of("old"), kept), run_of(cell_of(), cell_of("new"), kept))
    assert [cell.key for cell in comparison.cells] == ["k1"]
    text = terminal_text(comparison)
    assert "Only in the first: tiny, old (old)." in text and "Only in the second: tiny, new (new)." in text
    assert "keeping answers takes time: tiny, answers (answers)." in text


def test_loads_and_operations_are_not_said_to_keep_answers(tmp_path: Path) -> None:
    """They were listed under `keeping answers takes time`, and two runs of them refused with that."""
    plan = planned(
        """
        workload: {kind: serve, rate: 1, duration_seconds: 5}
        experiments: {load: {kind: load}, links: {kind: communication, operations: [all_reduce]}}
        """
    )
    loads = run_figures(load_run(write_plan(tmp_path / "run", plan)), "loads")
    assert not any(cell.compared or cell.keeps_answers for cell in loads.cells.values())
    with pytest.raises(ValueError, match=r"are of single requests or operations; they are not compared"):
        compare(loads, loads)
    both = run_of(cell_of(), *loads.cells.values())
    comparison = compare(both, both)
    text, data = terminal_text(comparison), as_json(comparison)
    assert "Not compared, because their figures are of single requests or operations: " in text
    assert "keeping answers" not in text
    assert data["of_single"].keys() == loads.cells.keys() and not data["answers_kept"]


def test_nothing_to_compare_is_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match=r"no cell in common.*differ in: workload\.batch_size"):
        compare(run_of(cell_of("x")), run_of(cell_of("y")))
    kept = run_of(cell_of(compared=False))
    with pytest.raises(ValueError, match="keep their answers"):
        compare(kept, kept)
    with pytest.raises(ValueError, match="threshold: 5 is not a share"):
        compare(run_of(cell_of()), run_of(cell_of()), threshold=5)


def test_environment_differences_come_first() -> None:
    second = run_of(cell_of(), name="b", environment={"torch": "2.10", "commit": "beef", "zeta": "None"})
    comparison = compare(run_of(cell_of()), second)
    assert [item.what for item in comparison.differences] == ["commit", "torch", "zeta"]
    text = terminal_text(comparison)
    assert text.index("The environments differ in commit, torch and zeta") < text.index("No regression")
    said = markdown(comparison)
    assert "| `zeta` | – | none |" in said, "not as Python writes it"
    assert "| `torch` | 2.9 | 2.10 |" in said and said.index("torch") < said.index("No regression")


def test_only_environments_of_compared_cells_count() -> None:
    far = cell_of("far", environments=("e2",))
    environments = {"e1": HOME, "e2": HOME | {"torch": "1.0"}}
    comparison = compare(run_of(cell_of()), run_of(cell_of(), far, environments=environments))
    assert comparison.differences == () and "Both were measured in the same environment." in terminal_text(comparison)


def test_hosts_rules_and_changed_code_are_said() -> None:
    first, second = (
        run_of(cell_of(hosts=("n1",))),
        run_of(cell_of(hosts=("n2",)), name="b", environment={"dirty": "True"}, rules={"measuring.warmup": "3"}),
    )
    text = terminal_text(compare(first, second))
    assert "differ in hosts and dirty" in text and "different rules: measuring.warmup" in text
    assert "The code of b was changed since its commit" in text
    unsure = run_of(cell_of(), name="b", environment={"dirty": "None"})  # git took too long to say
    assert "The code of b may have been changed since its commit" in terminal_text(compare(first, unsure))
    unknown = terminal_text(compare(first, run_of(cell_of(), environments={"e1": None})))
    assert "no environment is known" in unknown


def test_noise_larger_than_the_threshold_is_said() -> None:
    assert "The noise of the machine is larger than the threshold" in terminal_text(
        compared(around(100, 0.3), around(100, 0.3))
    )
    assert "noise of the machine" not in terminal_text(compared(around(100), around(100)))
    drifting = compared(around(100), [100 - repeat for repeat in range(10)])
    assert "In b throughput drifted by -9.0 % from the first repeat to the last" in terminal_text(drifting)
    busy = [cell_of(figures={"throughput": around(100), "others_cpu_share": [0.02, 0.4]}) for _ in range(2)]
    assert "In a other processes took over 10 %" in terminal_text(compare(run_of(busy[0]), run_of(busy[1])))


def test_noise_between_runs_widens_the_interval() -> None:
    """Runs of one commit at 100, 108 and 92: 10 % less is no alarm then, though the repeats alone would give one."""
    kept = [run_of(cell_of(figures={"throughput": around(middle)})) for middle in (100, 108, 92)]
    keys = frozenset({"k1"})
    noise = between_runs(kept, keys)["throughput"]
    logs = np.log([100, 108, 92])
    # Student's t at 97.5 % with 2 degrees of freedom is 4.3027.
    assert noise.margin == pytest.approx(np.exp(4.3027 * logs.std(ddof=1) * np.sqrt(2)), rel=1e-4)
    assert (noise.runs, noise.cells) == (3, 1)
    slow = run_of(cell_of(figures={"throughput": around(90)}), name="b")
    assert compare(kept[0], slow).regressions
    widened = compare(kept[0], slow, between={"throughput": noise})
    assert not widened.regressions and widened.cells[0].verdict is ComparisonVerdict.CANNOT_TELL
    text = terminal_text(widened)
    assert "Two runs of the same code differ by up to" in text and "noise between runs is too wide" in text


def test_noise_between_runs_needs_three_runs_of_known_code() -> None:
    keys = frozenset({"k1", "k2"})

    def runs(count: int, **environment: str) -> list[RunFigures]:
        return [run_of(cell_of(), cell_of("k2"), environment=environment) for _ in range(count)]

    assert between_runs(runs(2), keys) == {}
    for unknown in ({"dirty": "True"}, {"dirty": "None"}, {"commit": "None"}):
        assert between_runs(runs(3, **unknown), keys) == {}
    assert between_runs(runs(3), keys)["throughput"] == BetweenRuns(pytest.approx(1.0), 3, 2)
    # Two pairs of runs, each pair in an environment of its own: two degrees of freedom.
    elsewhere = [run_of(cell_of(environments=("e2",)), environments={"e2": HOME | {"hostname": "b"}}) for _ in range(2)]
    assert between_runs(runs(2) + elsewhere, keys)["throughput"].runs == 4


def test_runs_of_a_script_on_other_gpus_are_no_noise() -> None:
    """Its environment is the same on both: three times the speed of another GPU hid every regression."""
    pairs = [("A10G", 100.0), ("H100", 300.0)] * 3
    kept = [
        run_of(cell_of(figures={"throughput": around(middle)}), environment={"device": device})
        for device, middle in pairs
    ]
    noise = between_runs(kept, frozenset({"k1"}))["throughput"]
    assert noise.margin == pytest.approx(1) and noise.runs == 6
    before, after = (
        run_of(cell_of(figures={"throughput": around(middle)}), environment={"device": "H100"}) for middle in (300, 240)
    )
    assert compare(before, after, between={"throughput": noise}).regressions


@given(low=st.floats(0.2, 3), width=st.floats(0, 2), more=st.booleans(), threshold=st.floats(0.001, 0.5))
def test_each_interval_has_one_verdict(low: float, width: float, more: bool, threshold: float) -> None:
    bounds, kind = (low, low + width), THROUGHPUT if more else TTFT
    verdict, regression = judge_change(kind, bounds, low + width / 2, threshold)
    if low <= 1 + ROUNDING and low + width >= 1 - ROUNDING:
        assert verdict in (ComparisonVerdict.SAME, ComparisonVerdict.CANNOT_TELL) and not regression
    else:
        assert verdict is (ComparisonVerdict.BETTER if (low > 1) == more else ComparisonVerdict.WORSE)
    assert not regression or verdict is ComparisonVerdict.WORSE
    assert judge_change(kind, None, 0.5, threshold) == (ComparisonVerdict.CANNOT_TELL, False)


def test_repeats_needed_shrink_with_the_square_root() -> None:
    ratio = Ratio(1.0, 0.9, 1.1, 10, (1 / 1.1, 1.1))
    # From +-10 % to +-5 % about a ratio of 1: (log 1.1 / log 1.05)^2 = 3.8 times as many.
    assert repeats_needed(ratio, ratio.interval, 10, 0.05) == 39
    assert repeats_needed(ratio, (0.5, 2.0), 10, 0.05) is None


def test_names_of_others_are_text_on_a_terminal() -> None:
    """A folder or a history from elsewhere may have any name."""
    evil = "\x1b[2J\u202e"
    text = terminal_text(
        compare(run_of(cell_of(title=evil), name=f"a{evil}\nb"), run_of(cell_of(figures={"throughput": around(50)})))
    )
    assert not set(text) & set(evil[0] + evil[-1])
    assert text.startswith(r"first   a\x1b[2J\u202e b: study ")


def test_junit_counts_and_is_read_by_a_parser() -> None:
    bad = "tiny \x00\x1b<&> \ud83d"
    first = run_of(cell_of("slow"), cell_of("wide"), cell_of("fine"), cell_of("gone"), cell_of("broken", title=bad))
    second = run_of(
        cell_of("slow", figures={"throughput": around(80)}),
        cell_of("wide", figures={"throughput": around(100, 0.5)}),
        cell_of("fine"),
        cell_of("broken", status="failed"),
        environment={"torch": "2.10\x07"},
    )
    text = junit_xml(compare(first, second))
    text.encode()
    root = xml.fromstring(text)
    suite = root.find("testsuite")
    assert root.tag == "testsuites" and suite is not None
    for element in (root, suite):
        assert {name: element.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
            "tests": "5",
            "failures": "2",
            "errors": "0",
            "skipped": "2",
        }
    cases = suite.findall("testcase")
    assert len(cases) == 5 and all(case.get("classname") == "s" for case in cases)
    by_name = {case.get("name"): case for case in cases}
    failure = by_name["tiny, slow"].find("failure")
    assert failure is not None and "throughput 20.0 % lower" in (failure.get("message") or "")
    assert by_name["tiny, fine"].find("failure") is None and by_name["tiny, fine"].find("skipped") is None
    assert by_name["tiny, wide"].find("skipped") is not None and by_name["tiny, gone"].find("skipped") is not None
    assert by_name["tiny <&> "].find("failure") is not None
    values = {item.get("name"): item.get("value") for item in suite.iter("property")}
    assert values["run"] == "a -> a" and values["torch"] == "2.9 -> 2.10"


def test_json_holds_what_the_table_holds() -> None:
    data = json.loads(json.dumps(as_json(compared(around(100), around(90))), allow_nan=False))
    (cell,) = data["cells"]
    figure = cell["figures"]["throughput"]
    assert data["regressions"] == ["k1"] and cell["verdict"] == "worse" and figure["regression"]
    assert figure["ratio"] == pytest.approx(0.9) and figure["repeats"] == [10, 10] and len(figure["interval"]) == 2
    assert cell["unit"] == "tokens/s", "a program could not tell what the throughput counts"


def test_markdown_is_safe_and_the_terminal_has_none_of_its_marks() -> None:
    title = "tiny | *x* <b> `y`"
    comparison = compare(run_of(cell_of(title=title)), run_of(cell_of(title=title, figures={"throughput": around(80)})))
    table = change_table(comparison)
    assert "| tiny \\| \\*x\\* &lt;b&gt; \\`y\\` | **worse** |" in table.markdown()
    assert "tiny | *x* <b> `y`  worse" in aligned(table)
    lines = aligned(table).splitlines()
    assert len(lines) == 2 and lines[0].index("verdict") == lines[1].index("worse")


def test_figures_of_different_devices_are_in_no_ratio() -> None:
    """A GPU twice as fast is no improvement of the code, nor a slower one a regression."""
    for first, second in ((100, 200), (200, 100)):
        comparison = compare(
            run_of(cell_of(figures={"throughput": around(first)}), environment={"device": "NVIDIA A10G"}),
            run_of(cell_of(figures={"throughput": around(second)}), name="b", environment={"device": "NVIDIA H100"}),
        )
        (cell,) = comparison.cells
        assert cell.verdict is ComparisonVerdict.CANNOT_TELL and cell.changes == () and not comparison.regressions
        assert comparison.comparisons == 0
        for text in (terminal_text(comparison), markdown(comparison)):
            assert "on NVIDIA A10G in the first, on NVIDIA H100 in the second: no ratio" in text


def test_a_device_that_one_run_does_not_name_keeps_nothing_apart() -> None:
    known = run_of(cell_of(), environment={"device": "NVIDIA A10G"})
    assert compare(known, run_of(cell_of(), name="b")).cells[0].verdict is ComparisonVerdict.SAME


def test_a_throughput_of_0_closes_the_gate_although_it_has_no_ratio() -> None:
    steps = {"step_seconds": around(0.1)}
    works, idles = ({"throughput": [rate] * 10, **steps} for rate in (100.0, 0.0))
    fell = compare(run_of(cell_of(figures=works)), run_of(cell_of(figures=idles)))
    assert [cell.why for cell in fell.regressions] == ["throughput fell to 0"]
    assert comparison_headline(fell) == "Regression: 1 of 1 cell is worse by more than 5 %."
    again = compare(run_of(cell_of(figures=idles)), run_of(cell_of(figures=works)))
    assert (again.cells[0].verdict, again.cells[0].why) == (ComparisonVerdict.BETTER, "throughput was 0 before")
    both = compare(run_of(cell_of(figures=idles)), run_of(cell_of(figures=idles)))
    assert both.cells[0].verdict is not ComparisonVerdict.WORSE and not both.regressions


def test_repeats_without_any_throughput_are_said() -> None:
    """Three of ten repeats had come to nothing, and the comparison said "same" of the others without a word."""
    second = cell_of(figures={"throughput": [*around(100)[:7], 0.0, 0.0, 0.0]})
    found = compare(run_of(cell_of()), run_of(second))
    assert "repeats with a throughput of 0, which are in no ratio: 3 of 10 in the second." in terminal_text(found)
    assert "throughput of 0" not in terminal_text(compare(run_of(cell_of()), run_of(cell_of())))


def test_when_a_run_was_measured_is_told_with_its_time_zone() -> None:
    """Moments are kept in UTC: a reader elsewhere took them for those of their own clock."""
    assert run_line(run_of(cell_of(figures={"throughput": around(100)}))).startswith("a: study s, 2026-11-21 10:00 UTC")
