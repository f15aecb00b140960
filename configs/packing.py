"""From missing visits to launches: what shares a process group, and in which order.

A study of R repeats has R blocks. In each block every pack key gets one launch that visits its cells
once, in seeded random order; launches of a block are in random order too, so that drift of the machine
hits all alike (a randomized block design) and comparisons within a block are paired. Memory, and then
the profile, are measured in blocks of their own, at the end.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from configs.base import content_hash
from configs.job import Visit
from configs.record import MeasuringPass

Item = TypeVar("Item")


@dataclass(frozen=True)
class Launch:
    """Visits that one process group makes, in this order."""

    measuring_pass: MeasuringPass
    visits: tuple[Visit, ...]

    @property
    def pack_key(self) -> str:
        """What all visits share."""
        return self.visits[0].cell.pack_key

    @property
    def block(self) -> int:
        """The repeat that this launch makes."""
        return self.visits[0].repeat


def pack_launches(visits: Iterable[Visit], measuring_pass: MeasuringPass, seed: int, pack: bool = True) -> list[Launch]:
    """Group visits by block and pack key; `pack=False` gives every visit a launch of its own.

    So does a pass under nsys, which leaves one report for each process that it started.
    The same visits and seed give the same order on every machine.
    """
    pack = pack and measuring_pass != "nsys"
    groups: dict[tuple[int, str, str], list[Visit]] = {}
    for visit in visits:
        alone = "" if pack else visit.cell.key
        groups.setdefault((visit.repeat, visit.cell.pack_key, alone), []).append(visit)
    launches = [
        Launch(
            measuring_pass, tuple(_shuffled(sorted(group, key=lambda visit: visit.name), seed, block, pack_key, alone))
        )
        for (block, pack_key, alone), group in groups.items()
    ]
    ordered = sorted(launches, key=lambda launch: (launch.block, launch.visits[0].name))
    in_blocks: dict[int, list[Launch]] = {}
    for launch in ordered:
        in_blocks.setdefault(launch.block, []).append(launch)
    return [
        launch for block in sorted(in_blocks) for launch in _shuffled(in_blocks[block], seed, block, measuring_pass)
    ]


def _shuffled(items: list[Item], *seeds: object) -> list[Item]:
    generator = random.Random(content_hash([str(seed) for seed in seeds]))
    return generator.sample(items, len(items))
