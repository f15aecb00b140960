"""Kill a study on rented nodes again and again: python -m benchmarks.clouds.kills [--kills 20] [--minutes 6]

`rankwise run` of a study on two rented nodes is ended with SIGKILL and resumed each time; in the end it finishes. Every
other kill comes at a random moment after the start (seeded), the rest at one after a measurement has begun. Where a
study has ended before all kills are made, another follows on nodes of its own; kills that do not fit into --minutes are
left to the next call. What each study came to is in --results. Exit code 0 only if in every study each measurement has
exactly one completed record, none was made twice, and nothing was left in the provider; 2 where kills are left.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import NonNegativeInt

from benchmarks.clouds import bench
from benchmarks.clouds import places as places_module
from benchmarks.resume import findings
from configs.common.base import Frozen
from configs.plans.paths import RunPaths
from configs.plans.plan import read_plan
from configs.plans.rentals import Rentals
from tasks.campaign.ledger import planned_repeats

STUDY = {
    "study": "killed",
    "workload": {"kind": "noop", "seconds": 3.0},
    "experiments": {
        "pairs": {"kind": "sweep", "over": {"label": ["a", "b", "c"]}, "base": {"dp": 2, "items": 2}},
    },
    "measuring": {"repeats": 8, "memory": False, "cell_timeout_seconds": 60},
}  # fmt: skip
_LATEST_KILL_SECONDS = 30.0
_LATEST_WHILE_MEASURING_SECONDS = 3.0
_BEGIN_LIMIT_SECONDS = 240.0
_LIMIT_SECONDS = 600.0


class Kill(Frozen):
    """One SIGKILL. measuring: a rank was inside a measurement at that moment. had_ended: the study had, before it."""

    asked_while_measuring: bool
    measuring: bool
    seconds: float
    records: NonNegativeInt
    had_ended: bool


class KilledStudy(Frozen):
    """A study from its first start to nothing left. problems: what is wrong; none: nothing."""

    cloud: str
    kills: tuple[Kill, ...]
    planned: int
    records: int
    rented: int
    usd: float | None
    unused_usd: float | None
    minutes_up: float
    minutes_unused: float
    load: float
    problems: tuple[str, ...]

    @property
    def killed(self) -> list[Kill]:
        """Without those that came after the study's end."""
        return [kill for kill in self.kills if not kill.had_ended]


def _kills(study: Path, runs: Path, first: int, last: int, seed: int, until: float) -> Iterator[Kill]:
    """Start the study and kill it until kill `last`, until it has ended or until it is late; yields each kill."""
    run = RunPaths(runs / "killed")
    for number in range(first, last + 1):
        if time.monotonic() > until:
            return
        asked = number % 2 == 0
        latest = _LATEST_WHILE_MEASURING_SECONDS if asked else _LATEST_KILL_SECONDS
        moment = random.Random(f"{seed}/{number}").uniform(0.0, latest)
        began, started = time.monotonic(), time.time()
        with (runs / f"kill_{number}.log").open("w") as log:
            process = subprocess.Popen(_command(study, runs), stdout=log, stderr=log, start_new_session=True)
            deadline = time.monotonic() + _BEGIN_LIMIT_SECONDS
            while asked and process.poll() is None and time.monotonic() < deadline and not _measures(run, started):
                time.sleep(0.05)
            time.sleep(moment)
            measuring, ended = _measures(run, started), process.poll() is not None
            process.kill()
            process.wait()
        kill = Kill(
            asked_while_measuring=asked, measuring=measuring and not ended, seconds=round(time.monotonic() - began, 1),
            records=len(bench.records(run)), had_ended=ended,
        )  # fmt: skip
        where = "while measuring" if kill.measuring else "between measurements"
        how = "had ended" if ended else f"killed {where}"
        print(f"run {number}: {how} after {kill.seconds:5.1f} s, {kill.records} records", flush=True)
        yield kill
        if ended:
            return


def _command(study: Path, runs: Path) -> list[str]:
    return [str(Path(sys.executable).with_name("rankwise")), "run", str(study), "--runs", str(runs)]


def _measures(run: RunPaths, since: float) -> bool:
    """Whether a rank is inside a measurement, as was told after `since`: an earlier run's last word is none."""
    for path in run.jobs.glob("*/progress_0.json"):
        told = path.stat().st_mtime >= since and b'"phase":"measurement"' in path.read_bytes()
        if told and not (path.parent / "end.json").exists():
            return True
    return False


def _killed_study(cloud: str, runs: Path, scratch: Path, first: int, last: int, seed: int, until: float) -> KilledStudy:
    """Kill a study, let it finish, and look for what is wrong."""
    with places_module.all_places(scratch / "clouds", (cloud,), lab=False) as places:
        study = places_module.write_study(scratch, places, STUDY)
        kills = tuple(_kills(study, runs, first, last, seed, until))
        with (runs / "last.log").open("w") as log:
            code = subprocess.run(_command(study, runs), stdout=log, stderr=log, timeout=_LIMIT_SECONDS).returncode
        run = RunPaths(runs / "killed")
        problems = bench.wrong(run, places.left())
    problems += findings(run) + ([f"last run: exit code {code}"] if code else [])
    (rental,) = Rentals.model_validate_json(run.rentals.read_bytes()).rentals
    if rental.unused_usd and "No run used them for" not in run.report.read_text():
        problems.append("the report does not tell what the lost time cost")
    return KilledStudy(
        cloud=cloud, kills=kills, planned=len(planned_repeats(read_plan(run.plan))), records=len(bench.records(run)),
        rented=sum(attempt.seconds > 0 for attempt in rental.attempts), usd=rental.usd, unused_usd=rental.unused_usd,
        minutes_up=sum(attempt.seconds for attempt in rental.attempts) / 60,
        minutes_unused=sum(attempt.unused_seconds for attempt in rental.attempts) / 60,
        load=os.getloadavg()[0], problems=tuple(problems),
    )  # fmt: skip


def _table(studies: list[KilledStudy]) -> Iterator[str]:
    """Markdown."""
    yield "| kills | of these while measuring | rented | measured | USD | of that while no run used the nodes | wrong |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for each in studies:
        usd, unused = ("unknown" if cost is None else f"{cost:.4f}" for cost in (each.usd, each.unused_usd))
        unused += f", {each.minutes_unused:.1f} of {each.minutes_up:.1f} min"
        cells = (str(len(each.killed)), str(sum(kill.measuring for kill in each.killed)), str(each.rented),
                 f"{each.records} of {each.planned}", usd, unused, "; ".join(each.problems) or "nothing")  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    """Kill, resume, judge."""
    places_module.end_hosts_when_terminated()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cloud", choices=("aws", "gcp", "azure"), default="aws")
    parser.add_argument("--minutes", type=float, default=60.0, help="no kill is begun after them")
    parser.add_argument("--results", type=Path, default=Path("cloud-kills.jsonl"))
    parser.add_argument("--keep", type=Path, help="folder for the run folder and the logs")
    asked = parser.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    missing = places_module.why_not()
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    lines = asked.results.read_text().splitlines() if asked.results.exists() else []
    studies = [each for each in map(KilledStudy.model_validate_json, lines) if each.cloud == asked.cloud]
    done = sum(len(each.killed) for each in studies)
    while done < asked.kills and time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="rankwise-kills-") as scratch:
            runs = (asked.keep or Path(scratch) / "runs") / str(len(studies) + 1)
            runs.mkdir(parents=True, exist_ok=True)
            made = _killed_study(asked.cloud, runs, Path(scratch), done + 1, asked.kills, asked.seed, until)
        with asked.results.open("a") as file:
            file.write(made.model_dump_json() + "\n")
        studies.append(made)
        done += len(made.killed)
    print("\n".join(_table(studies)))
    wrong = any(each.problems for each in studies)
    return 1 if wrong else 2 if done < asked.kills else 0


if __name__ == "__main__":
    sys.exit(main())
