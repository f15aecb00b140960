"""Command line of the checks; prints the table and what to do about what was not reached.

    python -m benchmarks.gpu --budget-minutes 14 --out results/ [--only decode --only prefill] [--rehearse]

Exit status 0: every check finished and no bar is missed; 1 otherwise. A second call with the same --out runs what has
not finished.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.catalog import CHECKS
from benchmarks.gpu.reporting.results import pack_results, write_text
from benchmarks.gpu.reporting.table import markdown, summary, table
from benchmarks.gpu.running.needs import advice, missing_packages
from benchmarks.gpu.running.plants import PLANTS, parse_plants
from benchmarks.gpu.running.runner import Settings, run_checks


def main() -> int:
    """Run the checks that were asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--budget-minutes", type=float, default=14.0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, one JSON file for each check")
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="may be repeated")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--again", action="store_true", help="run checks that have finished before, too")
    parser.add_argument("--plant", action="append", default=[], metavar=f"CHECK={'|'.join(PLANTS)}", help="a crash")
    parser.add_argument("--list", action="store_true", help="say what would run and what is missing, and end")
    asked = parser.parse_args()
    names = {check.name for check in CHECKS}
    if unknown := set(asked.only) - names:
        parser.error(f"--only: no check {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CHECKS)}")
    try:
        plants = parse_plants(asked.plant, names)
    except ValueError as error:
        parser.error(str(error))
    checks = [check for check in CHECKS if not asked.only or check.name in asked.only]
    print("\n".join(advice(missing_packages(checks))), flush=True)
    if asked.list:
        print("\n".join(f"{check.name}: {check.title}" for check in checks))
        return 0
    settings = Settings(asked.out, asked.budget_minutes * 60, asked.rehearse, asked.again, plants)
    results = run_checks(checks, settings, lambda line: print(line, flush=True))
    print(f"\n{table(results)}\n\n{summary(results)}")
    write_text(asked.out / "table.md", f"{markdown(results)}\n\n{summary(results)}\n")
    pack_results(asked.out)
    return 0 if all(result.is_clean for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
