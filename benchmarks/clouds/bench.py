"""One study over SSH hosts, AWS, GCP and Azure, two nodes each: python -m benchmarks.clouds.bench [--keep FOLDER]

The clouds' APIs run on this machine, with a real host behind each instance; the vendors' clients are unmodified. AWS
has no spot capacity in its first region. Prints what `rankwise run` prints, the seconds of each stage by target, and
what the providers list afterwards. Exit code 0 only if every measurement completed and nothing is left.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from benchmarks.clouds import places as places_module
from configs.plans.paths import RunPaths
from configs.plans.plan import read_plan
from configs.plans.rentals import Rentals
from configs.records.record import Record, Status, read_record
from flows.folders import rented_folder
from tasks.campaign.ledger import planned_repeats as places_of
from tasks.providers.leases import read_entries

STUDY = {
    "study": "four-targets",
    "models": [{"id": "synthetic:llama-1m@7", "name": "llama-1m"}],
    "workload": {"kind": "generate", "prompt_tokens": 16, "new_tokens": 8, "batch_size": 2, "num_prompts": 2},
    "experiments": {
        "inference": {"kind": "strong", "grow": "tp", "to": 2},
        "training": {
            "kind": "strong",
            "grow": "dp",
            "to": 2,
            "base": {"workload": {"kind": "train", "global_batch_size": 4, "sequence_length": 32, "steps": 4}},
        },
    },
    "measuring": {"repeats": 2, "warmup": 1, "min_seconds": 0.2, "min_passes": 2, "memory": False,
                  "cell_timeout_seconds": 120},
}  # fmt: skip
STAGES = (
    "create call answered -> SSH ready",
    "SSH ready -> first measurement",
    "last record -> giving back",
    "giving back -> nothing left",
)
_LIMIT_SECONDS = 1800.0


def records(run: RunPaths) -> list[Record]:
    """All records of a run folder."""
    return [read_record(path) for path in sorted(run.records.glob("*/*.json"))]


def wrong(run: RunPaths, left: Sequence[str]) -> list[str]:
    """What is wrong with a finished run: measurements missing or failed, and what is left in a provider."""
    made = records(run)
    found = [f"left behind: {each}" for each in left]
    found += [f"{record.key}, repeat {record.repeat}: {record.status}" for record in made
              if record.status != Status.COMPLETED]  # fmt: skip
    planned = len(places_of(read_plan(run.plan)))
    return found if len(made) == planned else [*found, f"{len(made)} records of {planned} planned measurements"]


def stage_seconds(run: RunPaths) -> list[tuple[str, list[float | None]]]:
    """Seconds of STAGES for each rented target, from the last line of each kind in its ledger and from its records."""
    rows = []
    for rental in Rentals.model_validate_json(run.rentals.read_bytes()).rentals:
        entries = read_entries(rented_folder() / rental.name / "ledger.jsonl")
        at = {str(entry["event"]): float(entry["epoch"]) for entry in entries}
        began, ended = _measured(run, rental.target)
        moments = [at.get("created"), at.get("ready"), began, ended, at.get("giving_back"), at.get("given_back")]
        pairs = [(0, 1), (1, 2), (3, 4), (4, 5)]
        rows.append((rental.target, [_between(moments[first], moments[second]) for first, second in pairs]))
    return rows


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _measured(run: RunPaths, target: str) -> tuple[float | None, float | None]:
    """When the first measurement of a target began and its last ended, in seconds since 1970."""
    mine = [record for record in records(run) if record.cell.target == target]
    starts = [_epoch(record.started_at) for record in mine if record.started_at is not None]
    ends = [_epoch(record.finished_at) for record in mine if record.finished_at is not None]
    return min(starts, default=None), max(ends, default=None)


def _epoch(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def main() -> int:
    """Run, print, judge."""
    places_module.end_hosts_when_terminated()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder for the run folder and terminal.txt")
    arguments = parser.parse_args()
    missing = places_module.why_not()
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="rankwise-clouds-") as scratch:
        folder = Path(scratch)
        kept = arguments.keep or folder / "kept"
        kept.mkdir(parents=True, exist_ok=True)
        with places_module.all_places(folder) as places:
            places_module.no_spot_in_the_first_region(places)
            study = places_module.write_study(folder, places, STUDY)
            command = [str(Path(sys.executable).with_name("rankwise")), "run", str(study), "--runs", str(kept)]
            with (kept / "terminal.txt").open("w") as log:
                code = subprocess.run(command, stdout=log, stderr=log, timeout=_LIMIT_SECONDS).returncode
            print((kept / "terminal.txt").read_text())
            run = RunPaths(kept / "four-targets")
            left = places.left()
        found = wrong(run, left)
        for target, seconds in stage_seconds(run):
            for stage, value in zip(STAGES, seconds, strict=True):
                print(f"{target:8} {stage:36} {'unknown' if value is None else f'{value:6.1f} s'}")
    print("\n".join(found) or "all measurements completed; nothing is left in any provider")
    return 1 if found or code else 0


if __name__ == "__main__":
    sys.exit(main())
