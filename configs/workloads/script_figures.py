"""How figures are read from a script that was not changed: patterns of lines, event files, JSON.

LinePattern(pattern=r"step (?P<step>\\d+) .* (?P<step_milliseconds>[\\d.]+) ms", units={...})
PRESETS["torchtitan"]          # lines that well-known programs print, each quoted from its source
"""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from configs.common.base import Frozen

TimeUnit = Literal["s", "ms", "us", "ns", "min"]
UNIT_SECONDS: dict[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0}
FigureName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,59}$")]
PresetName = Literal["torchtitan", "megatron", "deepspeed"]

STEP, SECONDS, UNITS, RATE, LOSS = "step", "step_seconds", "step_units", "units_per_second", "loss"
RANK_RATE = "rank_units_per_second"
"""Names of groups that are understood; any other is a figure of the record, the median over all lines."""
TAKEN = frozenset({
    "steps", "units_per_step", "stopped_early", "device_clock", "aborted_in_teardown", "broken_lines", "device",
    "cpu_seconds", "measurement_seconds", "machine_cores", "cpu_busy_seconds", "others_cpu_share",
    "children_cpu_seconds", "peak_memory_bytes", "baseline_memory_bytes", "memory_growth_bytes", "throttled",
    "gpu_samples", "gpu_busy_share", "gpu_sm_clock_mhz",
    "gpu_memory_clock_mhz", "gpu_power_watts", "gpu_temperature_celsius", "gpu_energy_joules", "gpu_throttle_reasons",
})  # fmt: skip
"""Figures that Rankwise itself puts into a script's record: one of the script's would take the place of it."""


class LinePattern(Frozen):
    """A regular expression over each line of a rank's output, with named groups.

    Groups: `step` (its number), `step_seconds`, `step_units` (tokens or items of one step), `units_per_second`,
    `rank_units_per_second` (of one rank), `loss`. Without `step_seconds` a step lasts from line to line, divided by the
    steps between them.
    """

    pattern: str = Field(min_length=1, max_length=2000)
    units: dict[str, TimeUnit] = Field({}, description="unit of groups that are times; none: seconds")
    rank: Literal["first", "last", "any"] = Field("first", description="whose lines are read: of rank 0, the last, any")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groupindex
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"not a regular expression ({error})") from error
        if not groups:
            raise ValueError("has no named group, expected at least one such as (?P<step_seconds>[0-9.]+)")
        wrong = [name for name in groups if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name)]
        if wrong:
            raise ValueError(f"group {wrong[0]}: expected lower-case letters, digits and _")
        for name in groups:
            _check_free(name, "group ")
        return pattern

    @model_validator(mode="after")
    def _units_of_groups(self) -> "LinePattern":
        unknown = [name for name in self.units if name not in self.groups]
        if unknown:
            raise ValueError(f"units.{unknown[0]}: the pattern has no such group. It has {', '.join(self.groups)}")
        return self

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups."""
        return tuple(re.compile(self.pattern).groupindex)


class EventFiles(Frozen):
    """TensorBoard event files below the script's folder: the scalar that is written once a step."""

    tag: str = Field("loss", min_length=1, max_length=300, description="scalar that is written at each step")
    loss_tag: str | None = Field(None, description="scalar that is the loss; none: `tag`, where it ends in loss")
    folder: str = Field(".", description="where they are, relative to the script's folder")


class JsonFigures(Frozen):
    """A JSON document of a command: a file, or the last one on its standard output."""

    file: str | None = Field(None, description="relative to the script's folder; none: standard output")
    figures: dict[FigureName, str] = Field(min_length=1, description="name -> dotted path, e.g. jobs.0.read.bw_bytes")

    @field_validator("figures")
    @classmethod
    def _are_free(cls, figures: dict[str, str]) -> dict[str, str]:
        for name in figures:
            _check_free(name)
        return figures


def _check_free(name: str, kind: str = "") -> None:
    if name in TAKEN:
        raise ValueError(
            f"{kind}{name}: is a figure that Rankwise measures itself. Use another name, such as own_{name}"
        )


PRESETS: dict[str, LinePattern] = {
    # torchtitan at commit 00fbaafa6ea1, torchtitan/components/metrics.py, MetricsProcessor.log; colours are removed
    # before a line is matched. tps are "tokens per second per device".
    "torchtitan": LinePattern(
        pattern=r"(?<!validate )step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)"
        r".*?\btps:\s*(?P<rank_units_per_second>\S+)"
    ),
    # Megatron-LM core_r0.13.0, megatron/training/training.py, training_log; the last rank prints it.
    "megatron": LinePattern(
        pattern=r"iteration\s+(?P<step>\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\):\s*(?P<step_seconds>\S+)"
        r".*?lm loss:\s*(?P<loss>\S+)",
        units={"step_seconds": "ms"},
        rank="last",
    ),
    # DeepSpeed 0.19.8, deepspeed/utils/timer.py, ThroughputTimer.stop; samples a second over all ranks.
    "deepspeed": LinePattern(
        pattern=r"epoch=\d+/micro_step=\d+/global_step=(?P<step>\d+), RunningAvgSamplesPerSec=[^,]+, "
        r"CurrSamplesPerSec=(?P<samples_per_second>[^,\s]+)"
    ),
}
