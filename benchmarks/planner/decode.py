"""How well the planner predicts published tensor-parallel decode, beside perfect scaling.

    python -m benchmarks.planner.decode [docs/measurements/published]

Three predictors of the same rows: the planner from hardware constants alone; the planner from constants and the
smallest row of each model; and perfect scaling, tokens/s of the smallest row times how many more GPUs there are.
The smallest rows are fitted on, so errors of the last two leave them out.
"""

import sys
from pathlib import Path
from statistics import median

from engine.planner.check.decode import MEASURED, predict
from engine.planner.check.rows import PublishedRow
from engine.planner.check.table import read_published_rows

FILE = "tensor_parallel_decode.csv"
PUBLISHED = Path("docs/measurements/published")


def main(published: Path) -> None:
    """Print rows, predictions and errors of the file in a folder."""
    rows, _, _ = read_published_rows(published / FILE)
    smallest = smallest_rows(rows)
    constants, fitted = predict(rows, []), predict(rows, smallest)
    print("Tokens/s of tensor-parallel decode at batch 1, measured by others; error in % of the measured")
    print(
        f"{'model':12} {'GPUs':>4} {'dtype':5} {'measured':>9} {'constants':>15} {'smallest row':>15} {'perfect':>15}"
    )
    errors: dict[str, list[float]] = {"constants": [], "smallest row": [], "perfect scaling": []}
    for row, alone, scaled in zip(rows, constants, fitted, strict=True):
        measured, first = float(row[MEASURED]), _smallest_of(row, smallest)
        perfect = float(first[MEASURED]) * int(row["num_gpus"]) / int(first["num_gpus"])
        line = f"{row['model']:12} {row['num_gpus']:>4} {row['dtype']:5} {measured:9.2f}"
        for name, value in zip(errors, (alone.predicted, scaled.predicted, perfect), strict=True):
            if value is None:
                line += f" {'-':>15}"
            elif row is first and name != "constants":
                line += f" {value:9.2f} (fit)"
            else:
                errors[name].append(abs(value - measured) / measured)
                line += f" {value:9.2f} {(value / measured - 1) * 100:+5.1f}"
        print(line)
    for name, found in errors.items():
        if found:
            print(f"{name}: {len(found)} rows, median {median(found) * 100:.1f} %, worst {max(found) * 100:.1f} %")


def smallest_rows(rows: list[PublishedRow]) -> list[PublishedRow]:
    """Of each model and dtype the row with the fewest GPUs."""
    found: dict[tuple[str, str, str], PublishedRow] = {}
    for row in sorted(rows, key=lambda row: int(row["num_gpus"])):
        found.setdefault((row["model"], row["gpu"], row["dtype"]), row)
    return list(found.values())


def _smallest_of(row: PublishedRow, smallest: list[PublishedRow]) -> PublishedRow:
    return next(one for one in smallest if all(one[name] == row[name] for name in ("model", "gpu", "dtype")))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PUBLISHED)
