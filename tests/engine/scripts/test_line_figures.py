"""Figures of the lines that a script prints."""

import pytest

from configs.workloads.script import ScriptWorkload
from configs.workloads.script_figures import PRESETS, LinePattern
from engine.scripts.line_figures import LineReader, number
from engine.scripts.outputs import Line
from engine.scripts.series import missing_figures


def seen(pattern: LinePattern, lines: list[str], ranks: int = 2, rank: int = 0) -> LineReader:
    reader = LineReader(pattern, ranks)
    for place, text in enumerate(lines):
        reader.see(Line(rank, False, text, float(place)))
    return reader


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8,123", 8123),
        ("-1,234,567.5", -1234567.5),
        ("8,", 8),
        ("8.1k", 8100),
        ("3e-4", 3e-4),
        (" -1 ", -1),
        ("2M", 2e6),
        ("inf", float("inf")),
    ],
)
def test_numbers_of_lines(text: str, value: float) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", ["0,52", "1,5", "0,512", "12,3456", "1,5e3"])
def test_a_decimal_comma_is_no_thousands_separator(text: str) -> None:
    """A step of 0,52 s was one of 52 s."""
    with pytest.raises(ValueError, match="not a number"):
        number(text)


@pytest.mark.parametrize("part", ["1", "1_", " ", ",111"])
def test_a_long_line_that_is_no_number_takes_no_time_to_speak_of(part: str) -> None:
    """Hours, where two parts of a number take the same characters."""
    with pytest.raises(ValueError, match="not a number"):
        number(f"1{part * (1 << 20)}x")


def test_lines_with_times_rates_and_own_figures() -> None:
    pattern = LinePattern(
        pattern=r"step (?P<step>\S+) loss (?P<loss>\S+) (?P<step_seconds>\S+) ms (?P<tflops>\S+) TF",
        units={"step_seconds": "ms"},
    )
    reader = seen(
        pattern, ["step 1 loss 2.5 20 ms 3 TF", "noise", "step 2 loss x 20 ms 3 TF", "step 3 loss 2 30 ms 5 TF"]
    )
    assert reader.series.seconds == pytest.approx([0.02, 0.03, 0.03])  # line 3 stands for the broken step too
    assert (reader.seen, reader.broken, reader.steps) == (4, 1, 3)
    assert reader.series.own_figures() == {"tflops": 4}


def test_steps_between_lines_share_their_time() -> None:
    reader = LineReader(LinePattern(pattern=r"it (?P<step>\d+)"), 1)
    for step, at in ((10, 1.0), (20, 2.0), (30, 4.0), (40, 4.0), (50, 5.0)):
        reader.see(Line(0, False, f"it {step}", at))
    assert reader.series.seconds[1:11] == pytest.approx([0.1] * 10)
    assert reader.series.seconds[11:31] == pytest.approx([0.1] * 20)  # two lines that were read at once
    assert reader.series.seconds[31:] == pytest.approx([0.1] * 10)


def test_lines_that_were_read_at_once_share_what_their_rates_made_of_the_time() -> None:
    reader = LineReader(LinePattern(pattern=r"it (?P<step>\d+) (?P<units_per_second>\S+)"), 1)
    for step, at in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 3.0), (5, 3.0), (6, 3.0)):
        reader.see(Line(0, False, f"it {step} 100", at))
    assert reader.series.seconds[1:] == pytest.approx([1.0] + [0.25] * 4)
    assert reader.series.units[1:] == pytest.approx([100.0] + [25.0] * 4)  # 100 a second, however they were read


def test_lines_that_come_with_the_first_one_have_no_time() -> None:
    reader = LineReader(LinePattern(pattern=r"it (?P<step>\d+)"), 1)
    for step, at in ((1, 1.0), (2, 1.0), (3, 1.0), (4, 3.0), (5, 3.0)):
        reader.see(Line(0, False, f"it {step}", at))
    assert reader.series.seconds == [None, None, None, 1.0, 1.0]


@pytest.mark.parametrize("rate", ["inf", "nan", "-3"])
def test_a_rate_that_is_no_number_is_a_broken_line(rate: str) -> None:
    pattern = LinePattern(pattern=r"it (?P<step>\d+) (?P<units_per_second>\S+) (?P<step_seconds>\S+)")
    reader = seen(pattern, [f"it 1 {rate} 0.5", "it 2 10 0.5"])
    assert reader.broken == 1 and reader.series.units == [5.0]


def test_a_script_that_resumes_is_counted_from_its_first_step() -> None:
    """It was ended after its first line, which showed more steps than stop_after asks for."""
    reader = seen(LinePattern(pattern=r"it (?P<step>\d+)"), ["it 10000", "it 10001", "it 10002"])
    assert (reader.steps, len(reader.series), reader.last_step) == (3, 3, 10002)


def test_lines_that_match_and_cannot_be_read_are_told_from_those_that_do_not_match() -> None:
    pattern = LinePattern(pattern=r"took (?P<step_seconds>\S+)", units={"step_seconds": "ms"})
    reader = seen(pattern, ["begin", "took 12.5ms", "took 12.7ms"])
    work = ScriptWorkload(command=("t.py",), measure="lines", lines=pattern)
    assert missing_figures(work, reader.seen, reader.broken, reader.why_broken) == (
        "workload.lines.pattern matched 2 of 3 lines, none with figures that can be read (step_seconds: not a number: "
        "'12.7ms'). Let each group match a number alone"
    )
    assert "matched none of 3 lines" in missing_figures(work, 3)


def test_lines_of_other_ranks_do_not_count() -> None:
    assert seen(LinePattern(pattern=r"(?P<loss>\d)", rank="last"), ["1"], ranks=4, rank=0).seen == 0
    assert seen(LinePattern(pattern=r"(?P<loss>\d)", rank="last"), ["1"], ranks=4, rank=3).seen == 1


TORCHTITAN = (
    "[rank0]:[titan] 2025-01-01 00:00:00,000 - root - INFO - step:  1  loss: 12.2721  grad_norm:  3.1234  "
    "memory: 47.12GiB(49.60%)  tps: 5,762  tflops: 299.37  mfu: 30.27%"
)
MEGATRON = (
    " [2025-01-01 00:00:00.000000] iteration        5/     100 | consumed samples:           40 | "
    "elapsed time per iteration (ms): 812.5 | learning rate: 1.500000E-04 | global batch size:     8 | "
    "lm loss: 1.054321E+01 | loss scale: 1.0 | grad norm: 2.345 |"
)
DEEPSPEED = (
    "[2026-11-24 09:20:25,172] [INFO] [timer.py:264:stop] epoch=0/micro_step=4/global_step=4, "
    "RunningAvgSamplesPerSec=4919.2833895323265, CurrSamplesPerSec=5064.74565280458, MemAllocated=0.44GB, "
    "MaxMemAllocated=0.44GB"
)


def test_presets_read_the_lines_of_their_programs() -> None:
    titan = seen(PRESETS["torchtitan"], [TORCHTITAN, TORCHTITAN.replace("step:  1", "step: 11")])
    assert titan.broken == 0 and titan.series.losses[0] == 12.2721
    assert titan.series.units[1] == pytest.approx(5762 * 2 * 0.1)  # per device, on two; ten steps in a second
    assert seen(PRESETS["torchtitan"], ["validate step:  1  loss:  1.0  memory: 1.00GiB(1.00%)  tps: 5"]).steps == 0
    megatron = seen(PRESETS["megatron"], [MEGATRON], ranks=2, rank=1)
    assert megatron.series.seconds == [0.8125] and megatron.series.losses == [10.54321]
    deepspeed = seen(PRESETS["deepspeed"], [DEEPSPEED, DEEPSPEED.replace("global_step=4", "global_step=6")])
    assert deepspeed.series.seconds[1:] == [0.5, 0.5]
    assert deepspeed.series.own_figures() == {"samples_per_second": pytest.approx(5064.74565)}
