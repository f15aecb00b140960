"""A loop that sleeps until each due time of a Poisson process and does nothing else; prints its lateness in seconds.

python -m benchmarks.load.bare_loop RATE SECONDS SEED
"""

import sys
from time import monotonic, sleep

import numpy as np

from configs.load.arrivals import PoissonArrivals
from engine.load.arrivals import arrival_seconds


def main() -> None:
    rate, seconds, seed = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    due = arrival_seconds(PoissonArrivals(rate=rate), seconds, None, np.random.default_rng((seed, 3))).tolist()
    begin, late = monotonic() + 0.1, []
    for moment in due:
        rest = begin + moment - monotonic()
        if rest > 0:
            sleep(rest)
        late.append(monotonic() - begin - moment)
    print(*late)


if __name__ == "__main__":
    main()
