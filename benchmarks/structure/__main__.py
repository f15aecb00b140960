"""Print the structure of a checkout: python -m benchmarks.structure [--root PATH] [--trace] [--json]

The checkout's files are parsed, not imported, so two checkouts are measured by one tool. With --trace the smallest
study is run with the checkout's own `rankwise`, and the files that take part in it are listed.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.structure.report import as_json, measure, text
from benchmarks.structure.source import read_mapping
from benchmarks.structure.trace import trace_run


def main(arguments: list[str]) -> int:
    """Measure and print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the checkout; default: this one")
    parser.add_argument("--trace", action="store_true", help="run the smallest study and list the files that take part")
    parser.add_argument("--mapping", type=Path, help="lines `old/path.py new/path.py`: print it as after that move")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    options = parser.parse_args(arguments)
    mapping = read_mapping(options.mapping) if options.mapping else None
    figures = measure(options.root, mapping, trace_run(options.root) if options.trace else None)
    print(json.dumps(as_json(figures), indent=1) if options.json else text(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
