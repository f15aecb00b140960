"""How well the planner predicts what others measured, beside what a simpler rule would have said.

    python -m benchmarks.planner.bench [throughput|decode|engines|few|memory|cells] [--published DIR]

Each part is a module of its own with a `main(published)`; they can be run by themselves, with more options.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

PARTS = {
    "throughput": "benchmarks.planner.throughput",
    "decode": "benchmarks.planner.decode",
    "engines": "benchmarks.planner.engines",
    "few": "benchmarks.planner.few",
    "memory": "benchmarks.planner.memory",
    "cells": "benchmarks.planner.cells",
}
PUBLISHED = Path("docs/measurements/published")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of one part, or of all. 2 with a message where a file is not there or not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=list(PARTS), help="none: all")
    parser.add_argument("--published", type=Path, default=PUBLISHED, metavar="DIR", help="folder with the CSV files")
    options = parser.parse_args(arguments)
    try:
        for part in [options.part] if options.part else PARTS:
            import_module(PARTS[part]).main(options.published)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
