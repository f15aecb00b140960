"""Calibration of a machine with one rank per core, saved in the cache as JSON.

    calibration = read_calibration(path)
    machine = calibration.to_machine(ranks=2)

A single rank does not share caches and memory bandwidth, so every figure is measured twice: for one rank (`alone`)
and for ranks on all cores (`together`). Times for other numbers of ranks are interpolated linearly. Written by
`engine.tools.calibrate` (`rankwise doctor --calibrate`).
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from configs.common.base import Frozen, content_hash
from configs.common.files.reading import read_model
from configs.common.printable import plural
from configs.hardware.hardware import Accelerator, Link, Machine, NumberFormat, OperatorRates

CALIBRATION_VERSION = 4
"""Incremented when figures change their meaning; older files are ignored. 4: `training_element` is without attention,
which predictions add.
"""

QUIET_SHARE = 0.1
"""Maximum CPU share of other processes in a valid calibration."""

MEASURED_FORMATS: tuple[NumberFormat, ...] = ("float32", "bfloat16")


ENGINE_GENERATION = 3
"""Incremented when the engine's kernels change, which invalidates older speeds. 2: packed weights. 3: bfloat16 in tiles
(AMX), groups as wide as one pass without AVX-512.
"""


class Fingerprint(Frozen):
    """Properties that make measured speeds comparable; records have the same in their environment."""

    cpu_model: str | None
    cores: PositiveInt
    torch: str | None

    @property
    def digest(self) -> str:
        """Names the files of this hardware, and of the engine whose operators were timed on it."""
        return content_hash(self.model_dump(mode="json") | {"engine": ENGINE_GENERATION})

    def __str__(self) -> str:
        return f"{self.cpu_model or 'unknown CPU'}, {plural(self.cores, 'core')}, torch {self.torch or 'unknown'}"


class Spread(Frozen):
    """A figure measured several times: the median of the rounds, and their range."""

    median: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    rounds: PositiveInt


class CalibratedFigure(Frozen):
    """A figure of one rank: while the others rest, and while all compute (none: there is one core only)."""

    alone: Spread
    together: Spread | None = None

    def at(self, ranks: int, all_ranks: int) -> float:
        """In seconds, while `ranks` of `all_ranks` compute."""
        one = self.alone.median
        if ranks <= 1 or self.together is None or all_ranks <= 1:
            return one
        return one + (self.together.median - one) * min(1.0, (ranks - 1) / (all_ranks - 1))


LinkTransport = Literal["gloo", "shared memory"]


class MeasuredLink(Frozen):
    """All-reduce between so many ranks in a tight loop: bytes -> seconds, and the line through them.

    sum_seconds, message_seconds: of the smallest all-reduce, and of such a message one way, after work on each rank.
    """

    ranks: PositiveInt
    transport: LinkTransport = "gloo"
    seconds: dict[NonNegativeFloat, PositiveFloat]
    latency_seconds: PositiveFloat = Field(description="of one hop")
    bytes_per_second: PositiveFloat
    error: NonNegativeFloat = Field(description="median share by which the line misses a point")
    sum_seconds: PositiveFloat
    message_seconds: PositiveFloat


class Calibration(Frozen):
    """Everything that was measured of a machine.

    `figures`: seconds by name. `linear/<format>/<cold|cached>/<rows>` a weight; `square/<format>` a FLOP of a product
    of large squares; `read` a byte of memory; `operator` one small operator; `attention/<format>` a FLOP;
    `context/<format>` a byte of keys and values; `layer`, `step` of a pass of one token, `recorded_layer`,
    `recorded_step` of a recorded one; `element/<format>`;
    `training/<format>` a FLOP; `training_element/<format>`; `logit`; `parameter`. See `OperatorRates`.
    """

    calibration_version: int = CALIBRATION_VERSION
    fingerprint: Fingerprint
    measured_at: str
    took_seconds: PositiveFloat
    others_cpu_share: float | None = Field(None, ge=0, description="of the machine's CPU, taken by other processes")
    ranks: PositiveInt = Field(description="that computed together")
    memory_bytes: PositiveInt = Field(description="of the machine")
    cache_bytes: PositiveInt = Field(description="of the last level that a core has for itself")
    framework_bytes: PositiveInt = Field(description="peak of a generating process, less its model and activations")
    training_framework_bytes: PositiveInt = Field(description="the same of one that trains")
    figures: dict[str, CalibratedFigure]
    links: tuple[MeasuredLink, ...] = ()

    def to_machine(self, ranks: int = 1, transport: LinkTransport = "gloo", computing: int | None = None) -> Machine:
        """This machine as it is for each of so many ranks; `transport`: what connects them.

        computing: how many compute at once; None: all of them.
        """
        held = max(1, min(ranks, self.fingerprint.cores))
        used = held if computing is None else max(1, min(computing, held))
        link = self._link(held, "gloo" if ranks > self.fingerprint.cores else transport)
        accelerator = Accelerator(
            name="this-cpu",
            title=f"a core of {self.fingerprint.cpu_model or 'this CPU'}",
            kind="cpu",
            memory_bytes=self.memory_bytes // held,
            bytes_per_second=1 / self.seconds("read", used),
            peak_flops={kind: 1 / self.seconds(f"square/{kind}", used) for kind in MEASURED_FORMATS},
            link=link,
            kernel_seconds=self.seconds("operator", used),
            measured=True,
            operators=self._operators(used),
            others_cpu_share=self.others_cpu_share,
            framework_bytes=self.framework_bytes,
            training_framework_bytes=self.training_framework_bytes,
            source=f"measured here with {used} of {self.fingerprint.cores} cores busy{self._doubt}",
            as_of=self.measured_at[:10],
        )
        return Machine(
            name="this machine",
            accelerator=accelerator,
            accelerators=self.fingerprint.cores,
            inside=link,
            host_memory_bytes=self.memory_bytes,
        )

    @property
    def disturbed(self) -> bool:
        """Whether others took so much of the CPU meanwhile that it should be measured again."""
        return self.others_cpu_share is not None and self.others_cpu_share > QUIET_SHARE

    @property
    def _doubt(self) -> str:
        return f" while other processes used {self.others_cpu_share:.0%} of the CPU" if self.disturbed else ""

    def seconds(self, name: str, ranks: int) -> float:
        """One figure, while `ranks` ranks compute."""
        return self.figures[name].at(ranks, self.ranks)

    def _link(self, ranks: int, transport: LinkTransport) -> Link | None:
        """Measured between no fewer ranks where that is known; of any transport where not of this one."""
        if not self.links:
            return None
        links = [link for link in self.links if link.transport == transport] or self.links
        ordered = sorted(links, key=lambda link: link.ranks)
        link = next((link for link in ordered if link.ranks >= ranks), ordered[-1])
        return Link(
            name=f"{link.transport} between {link.ranks} ranks, measured",
            latency_seconds=link.sum_seconds / (2 * (link.ranks - 1)),
            bytes_per_second=link.bytes_per_second,
            message_seconds=link.message_seconds,
        )

    def _operators(self, ranks: int) -> OperatorRates:
        def by_format(name: str, inverse: bool = False) -> dict[NumberFormat, float]:
            found = {kind: self.seconds(f"{name}/{kind}", ranks) for kind in MEASURED_FORMATS}
            return {kind: 1 / seconds if inverse else seconds for kind, seconds in found.items()}

        def linear(place: str) -> dict[NumberFormat, dict[int, float]]:
            return {
                kind: {rows: self.seconds(f"linear/{kind}/{place}/{rows}", ranks) for rows in self.rows(kind, place)}
                for kind in MEASURED_FORMATS
            }

        return OperatorRates(
            linear=linear("cold"),
            linear_cached=linear("cached"),
            cache_bytes=self.cache_bytes,
            attention_flops=by_format("attention", inverse=True),
            context_bytes_per_second=by_format("context", inverse=True),
            layer_seconds=self.seconds("layer", ranks),
            step_seconds=self.seconds("step", ranks),
            recorded_layer_seconds=self.seconds("recorded_layer", ranks),
            recorded_step_seconds=self.seconds("recorded_step", ranks),
            element_seconds=by_format("element"),
            training_flops=by_format("training", inverse=True),
            training_element_seconds=by_format("training_element"),
            logit_seconds=self.seconds("logit", ranks),
            parameter_seconds=self.seconds("parameter", ranks),
        )

    def rows(self, kind: NumberFormat, place: str) -> list[int]:
        """Numbers of rows that linear layers were measured with."""
        prefix = f"linear/{kind}/{place}/"
        return sorted(int(name.removeprefix(prefix)) for name in self.figures if name.startswith(prefix))


def calibration_path(cache: Path, fingerprint: Fingerprint) -> Path:
    """Where the calibration of such a machine lies."""
    return cache / "calibration" / f"{fingerprint.digest}.json"


def read_calibration(path: Path) -> Calibration | None:
    """What was measured; None where there is no file, or one that this version does not read."""
    try:
        calibration = read_model(path, Calibration)
        calibration.to_machine()  # every figure is there
    except (OSError, ValueError, KeyError):
        return None  # it can be made again in seconds
    return calibration if calibration.calibration_version == CALIBRATION_VERSION else None
