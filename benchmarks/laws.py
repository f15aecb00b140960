"""How often the intervals of the scaling laws hold what they should, by simulation.

    python -m benchmarks.laws [--studies 1000]

Noise is relative: of each value, of each block (all values of a repeat alike), and of each point (all
repeats of a number of ranks alike: how far it truly lies off any simple law). Printed is the share of
studies whose 95 % interval holds the true parameter; docs/explanation/scaling-laws.md has the table.
"""

import argparse
from dataclasses import dataclass

import numpy as np

from reports.laws.fit import fit_law
from reports.laws.laws import MeasuredPoint, centres_of


@dataclass(frozen=True)
class Case:
    """One kind of study: the true law, the ranks, repeats, and the three parts of the noise."""

    law: str
    truth: dict[str, float]
    ranks: tuple[int, ...]
    repeats: int
    noise: float = 0.02
    block: float = 0.0
    point: float = 0.0

    def throughput(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The true one at each number of ranks."""
        n, truth = np.array(self.ranks, dtype=np.float64), self.truth
        if self.law == "gustafson":
            return truth["lambda"] * (n - truth["serial_fraction"] * (n - 1))
        slowed = 1 + truth.get("sigma", truth.get("serial_fraction", 0.0)) * (n - 1)
        return truth["lambda"] * n / (slowed + truth.get("kappa", 0.0) * n * (n - 1))


_USL = {"lambda": 100.0, "sigma": 0.05, "kappa": 0.001}
_SIX, _FOUR = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)
_NOISES = ((1, 0.0, 0.0), (10, 0.0, 0.0), (10, 0.03, 0.0), (10, 0.03, 0.01), (3, 0.03, 0.0))
CASES = [
    *(Case("usl", _USL, _SIX, repeats, block=block, point=point) for repeats, block, point in _NOISES),
    Case("usl", _USL | {"kappa": 0.0}, _SIX, 10),
    *(
        Case("amdahl", {"lambda": 100.0, "serial_fraction": 0.1}, _FOUR, repeats, block=block, point=point)
        for repeats, block, point in _NOISES
    ),
    Case("gustafson", {"lambda": 100.0, "serial_fraction": 0.1}, _FOUR, 10),
]


def coverage(case: Case, studies: int, seed: int = 1) -> dict[str, float]:
    """Parameter -> share of the studies whose interval holds its true value."""
    random = np.random.default_rng(seed)
    held = dict.fromkeys(case.truth, 0)
    logs, shape = np.log(case.throughput()), (case.repeats, len(case.ranks))
    for _ in range(studies):
        noise = random.normal(0, case.noise, shape)
        noise += random.normal(0, case.block, (shape[0], 1)) + random.normal(0, case.point, (1, shape[1]))
        values = np.exp(logs + noise)
        points = [
            MeasuredPoint(ranks, dict(enumerate(column)))
            for ranks, column in zip(case.ranks, values.T.tolist(), strict=True)
        ]
        intervals = fit_law(case.law, case.ranks, *centres_of(points, paired=True)).intervals
        for name, true in case.truth.items():
            low, high = intervals[name]
            held[name] += (low is None or low <= true) and (high is None or true <= high)
    return {name: count / studies for name, count in held.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000)
    studies = parser.parse_args().studies
    print(f"share of {studies:,} studies whose 95 % interval holds the true value; each value has 2 % noise")
    print("| law | ranks | repeats | noise of blocks | of points | held |\n| --- | --- | ---: | ---: | ---: | --- |")
    for case in CASES:
        name = f"{case.law}, kappa 0" if case.truth.get("kappa") == 0 else case.law
        shares = ", ".join(f"{parameter} {share:.1%}" for parameter, share in coverage(case, studies).items())
        where = f"{len(case.ranks)}, to {case.ranks[-1]}"
        print(f"| {name} | {where} | {case.repeats} | {case.block:.0%} | {case.point:.0%} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
