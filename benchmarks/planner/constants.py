"""Fit the constants of inference engines to the published rows and write the file that the planner ships.

python -m benchmarks.planner.constants [docs/measurements/published] [--output configs/catalog/engine_constants.json]
"""

import argparse
from pathlib import Path

from engine.planner.check.generation import calibrated_on
from engine.planner.check.table import read_published_rows
from engine.planner.engines.saved import SHIPPED, write

FILE = "inference_throughput.csv"
PUBLISHED = Path("docs/measurements/published")


def main(published: Path, output: Path = SHIPPED) -> None:
    """Fit and write."""
    rows, _, _ = read_published_rows(published / FILE)
    calibrated = calibrated_on(rows)
    write(calibrated, output, f"docs/measurements/published/{FILE}")
    print(f"{output}: {len(calibrated.fitted.order)} deviations from {len(calibrated.residuals.places)} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", type=Path, nargs="?", default=PUBLISHED, help="folder with the CSV file")
    parser.add_argument("--output", type=Path, default=SHIPPED)
    arguments = parser.parse_args()
    main(arguments.published, arguments.output)
