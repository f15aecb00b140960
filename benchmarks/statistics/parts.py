"""The noise that `benchmarks.statistics.bench` tries the statistics on, and the methods that ours are held against.

    studies = simulated(KINDS["skewed"], rng, 2000, 10)    # 2,000 studies of 10 repeats of one cell
    low, high = median_intervals(studies.figures)
    held = (low <= studies.medians(10)) & (studies.medians(10) <= high)

A study's figure is exp(NOISE times noise): positive, and 2 % noise. All noise has median 0 and standard
deviation 1; Student's t with 2 degrees of freedom has none and is given the quartiles of a normal one.
A drift is the same path that the machine takes under all repeats of a study.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import erf, exp, lgamma, log, log1p, sqrt
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats
from configs.spec.measuring import Measuring
from reports.numbers.statistics import CONFIDENCE, Bounds, median_intervals, paired_ratio, unpaired_ratio
from reports.numbers.stopping import confidence, schedule

NOISE = 0.02
RESAMPLES = 500
COUNTS = (6, 10, 20)
DEFAULT_REPEATS = 10
MOST_REPEATS = 60
_NORMAL = NormalDist()
_erf = np.frompyfunc(erf, 1, 1)

Counts = NDArray[np.int64]
Path = Literal["line", "walk"]


@dataclass(frozen=True)
class Kind:
    """A kind of noise. `draw` gives independent values of median 0; `path` is what the machine adds to them."""

    name: str
    draw: Callable[[np.random.Generator, tuple[int, int]], Floats]
    path: Path | None = None


@dataclass(frozen=True)
class Studies:
    """Many studies of one cell: noise and the machine's path by study and repeat."""

    noise: Floats
    path: Floats | None
    """One row where all studies share it."""

    @cached_property
    def figures(self) -> Floats:
        """What would be measured, around 1."""
        return np.exp(NOISE * (self.noise if self.path is None else self.noise + self.path))

    def medians(self, count: int) -> Floats:
        """The true median of each study's first repeats: of the mixture of all their distributions."""
        if count not in self._medians:
            middles = np.zeros(1) if self.path is None else mixture_median(self.path[:, :count])
            self._medians[count] = np.broadcast_to(np.exp(NOISE * middles), len(self.noise))
        return self._medians[count]

    @cached_property
    def _medians(self) -> dict[int, Floats]:
        return {}


def _modes(share: float, distance: float, deviation: float) -> Callable[[np.random.Generator, tuple[int, int]], Floats]:
    """Two normal modes, the upper one with that share of the values; scaled to standard deviation 1 and median 0."""
    scale = sqrt(deviation**2 + share * (1 - share) * distance**2)
    low, high = -4 * deviation, distance + 4 * deviation
    for _ in range(60):
        middle = (low + high) / 2
        below = (1 - share) * _NORMAL.cdf(middle / deviation) + share * _NORMAL.cdf((middle - distance) / deviation)
        low, high = (middle, high) if below < 0.5 else (low, middle)

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
        values = deviation * rng.standard_normal(shape) + distance * (rng.random(shape) < share)
        return np.asarray((values - low) / scale)

    return draw


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return np.asarray(rng.standard_normal(shape))


def _skewed(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Exponential, as waiting times are."""
    return np.asarray(rng.exponential(size=shape) - log(2))


def _very_skewed(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Lognormal of shape 1: skewness 6."""
    return np.asarray((np.exp(rng.standard_normal(shape)) - 1) / sqrt((exp(1) - 1) * exp(1)))


def _heavy(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Student's t with 2 degrees of freedom, whose upper quartile is sqrt(2/3)."""
    return np.asarray(rng.standard_t(2, size=shape) * _NORMAL.inv_cdf(0.75) / sqrt(2 / 3))


def _echo(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Each repeat keeps half of the one before it."""
    values = rng.standard_normal(shape)
    for repeat in range(1, shape[1]):
        values[:, repeat] = 0.5 * values[:, repeat - 1] + sqrt(0.75) * values[:, repeat]
    return values


KINDS = (
    Kind("normal", _normal),
    Kind("skewed (exponential)", _skewed),
    Kind("very skewed (lognormal)", _very_skewed),
    Kind("heavy tails (t, 2 degrees)", _heavy),
    Kind("two modes, 70 to 30", _modes(0.3, 4.0, 0.5)),
    Kind("steady drift", _normal, "line"),
    Kind("wandering drift", _normal, "walk"),
)
EVEN_MODES = Kind("two even modes, 5 deviations apart", _modes(0.5, 2.5, 0.5))
ECHO = Kind("each repeat keeps half of the last", _echo)


def simulated(kind: Kind, rng: np.random.Generator, studies: int, repeats: int) -> Studies:
    """A drift's path changes by about the noise's standard deviation over all the repeats."""
    path: Floats | None = None
    if kind.path == "line":
        path = np.linspace(-0.5, 0.5, repeats)[None, :]
    elif kind.path == "walk":
        path = np.cumsum(rng.standard_normal((studies, repeats)), axis=1) / sqrt(repeats)
    return Studies(kind.draw(rng, (studies, repeats)), path)


def mixture_median(centres: Floats) -> Floats:
    """The median of normal distributions of deviation 1 around each row's centres, mixed evenly; by Newton's method."""
    middle: Floats = centres.mean(axis=1)
    for _ in range(4):
        distance = middle[:, None] - centres
        below = (1 + np.asarray(_erf(distance / sqrt(2)), dtype=np.float64)).mean(axis=1) / 2
        density = np.exp(-(distance**2) / 2).mean(axis=1) / sqrt(2 * np.pi)
        middle = middle + (0.5 - below) / density
    return np.asarray(middle)


def near(samples: Floats, confidence: float, target: float) -> NDArray[np.bool_]:
    """Of each study, whether half its interval is within that share of its median; as `stopping.is_narrow`."""
    found = median_intervals(samples, confidence)
    if found is None:
        return np.zeros(len(samples), dtype=bool)
    return np.asarray((found[1] - found[0]) / 2 <= target * np.median(samples, axis=1))


def stopped_at(samples: Floats, looks: Iterable[tuple[int, int]], confidence: float, target: float) -> Counts:
    """At how many repeats each study ends. As `stopping.next_look`, for many studies at once."""
    counts = np.full(len(samples), samples.shape[1])
    going = np.arange(len(samples))
    for look, confirmed in looks:
        met = going[near(samples[going, :look], confidence, target)]
        met = met[near(samples[met, :confirmed], confidence, target)]
        counts[met] = confirmed
        going = np.setdiff1d(going, met, assume_unique=True)
    return counts


def held(studies: Studies, counts: Counts, confidence: float) -> NDArray[np.bool_]:
    """Of each study, whether the interval of its first so many repeats holds their true median."""
    found = np.zeros(len(counts), dtype=bool)
    for count in np.unique(counts):
        rows = counts == count
        ends = median_intervals(studies.figures[rows, :count], confidence)
        assert ends is not None
        truth = studies.medians(int(count))[rows]
        found[rows] = (ends[0] <= truth) & (truth <= ends[1])
    return found


def found_share(
    pairs: Iterable[tuple[Sequence[float], Sequence[float]]],
    paired: bool,
    comparisons: int = 1,
    level: float = CONFIDENCE,
) -> tuple[int, int]:
    """Of how many comparisons the interval leaves out 1, and how many there were."""
    found = total = 0
    for first, second in pairs:
        if paired:
            ratio = paired_ratio(dict(enumerate(first)), dict(enumerate(second)), comparisons, level)
        else:
            ratio = unpaired_ratio(first, second, comparisons, level)
        found += ratio is not None and ratio.differs is True
        total += 1
    return found, total


def two_cells(
    kind: Kind, rng: np.random.Generator, studies: int, repeats: int, slower: float = 1.0
) -> tuple[Floats, Floats]:
    """The same cell twice, the second divided by `slower`; both under the machine's path of their study."""
    one, other = simulated(kind, rng, studies, repeats), simulated(kind, rng, studies, repeats)
    return one.figures, Studies(other.noise, one.path).figures / slower


def bootstrap_intervals(samples: Floats, rng: np.random.Generator, confidence: float) -> tuple[Floats, Floats]:
    """The plain percentile bootstrap of the median, study by study: what ours is held against."""
    studies, count = samples.shape
    low, high = np.empty(studies), np.empty(studies)
    for study, values in enumerate(samples):
        resampled = np.sort(values[rng.integers(0, count, (RESAMPLES, count))], axis=1)
        medians = (resampled[:, (count - 1) // 2] + resampled[:, count // 2]) / 2
        low[study], high[study] = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return low, high


def signed_rank_interval(values: Floats, confidence: float) -> Bounds | None:
    """Of the centre of symmetry, by inversion of Wilcoxon's signed-rank test: what `paired_ratio` is held against.

    M. Hollander, D. A. Wolfe and E. Chicken, "Nonparametric Statistical Methods", 3rd ed. (2014), section 3.3.
    """
    first, second = np.triu_indices(len(values))
    averages = np.sort((values[first] + values[second]) / 2)
    depth = int(np.searchsorted(_signed_rank(len(values)), (1 - confidence) / 2, side="right"))
    return None if depth == 0 else (float(averages[depth - 1]), float(averages[-depth]))


@cache
def _signed_rank(count: int) -> Floats:
    """Cumulative chances of the number of averages of two values that lie below the centre."""
    chances = np.ones(1)
    for size in range(1, count + 1):
        chances = (np.pad(chances, (0, size)) + np.pad(chances, (size, 0))) / 2
    return np.cumsum(chances)


def upper_bound(events: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided upper bound of a chance (C. J. Clopper and E. S. Pearson, Biometrika 26 (1934) 404-413)."""
    if events == trials:
        return 1.0
    counts = np.arange(events + 1)
    ways = np.array([lgamma(trials + 1) - lgamma(k + 1) - lgamma(trials - k + 1) for k in counts])
    low, high = events / trials, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        so_few = float(np.exp(ways + counts * log(chance) + (trials - counts) * log1p(-chance)).sum())
        low, high = (chance, high) if so_few > 1 - confidence else (low, chance)
    return high


def usual_width(kind: Kind, rng: np.random.Generator, count: int) -> float:
    """Half the median width of a 95 % interval of so many repeats, over the median."""
    figures = simulated(kind, rng, 2_000, MOST_REPEATS).figures[:, :count]
    ends = median_intervals(figures)
    assert ends is not None
    return float(np.median((ends[1] - ends[0]) / 2 / np.median(figures, axis=1)))


def target_for(kind: Kind, rng: np.random.Generator, count: int | None) -> float:
    """A target that is usually met after so many repeats; at once for 0, never for None."""
    return 1e-9 if count is None else usual_width(kind, rng, count) if count else 0.9


@dataclass(frozen=True)
class Rule:
    """A way to stop: the looks, each with its confirmation, and the confidence of the intervals."""

    looks: tuple[tuple[int, int], ...]
    confidence: float


def shipped(least: int, target: float) -> Rule:
    """As `reports.numbers.stopping` has it."""
    rules = Measuring(repeats=least, target_interval=target, max_repeats=MOST_REPEATS)
    return Rule(tuple(schedule(rules)), confidence(rules))


def naive(least: int, _: float) -> Rule:
    """A look after every repeat, with plain 95 % intervals."""
    return Rule(tuple((count, count) for count in range(least, MOST_REPEATS + 1)), CONFIDENCE)


@dataclass(frozen=True)
class Section:
    """One table of the printed result. `figures` are its numbers as JSON has them, `missed` its missed bars."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    figures: list[dict[str, str | float]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def judge(self, passes: bool, what: str) -> str:
        """A mark to print at a figure that misses its bar."""
        if not passes:
            self.missed.append(f"{self.title}: {what}")
        return "" if passes else " (!)"

    def text(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return "\n".join([f"## {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def share(events: float, digits: int = 1) -> str:
    return f"{100 * events:.{digits}f}"


def with_error(rate: float, studies: int) -> str:
    """A rate in per cent with its standard error from so many studies."""
    return f"{share(rate)} ± {share(float(np.sqrt(rate * (1 - rate) / studies)))}"
