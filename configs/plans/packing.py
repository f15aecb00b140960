"""From missing measurements to launches: what shares a process group, and in which order.

A study of R repeats has R blocks. In each block every pack key gets one launch that measures its cells
once, in seeded random order; launches of a block are in random order too, so that drift of the machine
hits all alike (a randomized block design) and comparisons within a block are paired. Memory, and then
the profile, are measured in blocks of their own, at the end.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from configs.common.base import content_hash
from configs.plans.job import Measurement
from configs.records.record import MeasuringPass

Item = TypeVar("Item")


@dataclass(frozen=True)
class Launch:
    """Measurements that one process group makes, in this order."""

    measuring_pass: MeasuringPass
    measurements: tuple[Measurement, ...]

    @property
    def pack_key(self) -> str:
        """What all measurements share."""
        return self.measurements[0].cell.pack_key

    @property
    def block(self) -> int:
        """The repeat that this launch makes."""
        return self.measurements[0].repeat


def pack_launches(
    measurements: Iterable[Measurement], measuring_pass: MeasuringPass, seed: int, pack: bool = True
) -> list[Launch]:
    """Group measurements by block and pack key; `pack=False` gives every measurement a launch of its own.

    So does a pass under nsys, which leaves one report for each process that it started.
    The same measurements and seed give the same order on every machine.
    """
    pack = pack and measuring_pass != "nsys"
    groups: dict[tuple[int, str, str], list[Measurement]] = {}
    for measurement in measurements:
        alone = "" if pack else measurement.cell.key
        groups.setdefault((measurement.repeat, measurement.cell.pack_key, alone), []).append(measurement)
    launches = [
        Launch(
            measuring_pass,
            tuple(_shuffled(sorted(group, key=lambda measurement: measurement.name), seed, block, pack_key, alone)),
        )
        for (block, pack_key, alone), group in groups.items()
    ]
    ordered = sorted(launches, key=lambda launch: (launch.block, launch.measurements[0].name))
    in_blocks: dict[int, list[Launch]] = {}
    for launch in ordered:
        in_blocks.setdefault(launch.block, []).append(launch)
    return [
        launch for block in sorted(in_blocks) for launch in _shuffled(in_blocks[block], seed, block, measuring_pass)
    ]


def _shuffled(items: list[Item], *seeds: object) -> list[Item]:
    generator = random.Random(content_hash([str(seed) for seed in seeds]))
    return generator.sample(items, len(items))
