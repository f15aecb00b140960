"""Deploy the shapes of bert-base and t5-small at every level on five targets, and take all of it down; as root.

    python -m benchmarks.deploy.bench [--models A,B] [--levels none,balanced] [--targets local,ssh,aws] [--minutes 7]

One deployment after the other, each by the command line; a row is kept when it is taken down, so an interrupted table
goes on. The SSH host and the instances behind the clouds' APIs are namespaces of this machine with sshd in each, so
speeds are this machine's; prices are the catalog's. Prints the table, and what is left in each provider.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path

from benchmarks.clouds.places import end_hosts_when_terminated
from benchmarks.deploy.places import LEVELS, MODELS, TARGETS, Target, all_targets
from configs.common.base import Frozen, write_atomically
from configs.serving.deployment import OptimizationLevel
from tasks.deployment.first_answers import first_answers, timed_answers
from tasks.deployment.store import Store

RANKWISE = str(Path(sys.executable).with_name("rankwise"))
_TIMED_SECONDS, _LIMIT_SECONDS = 3.0, 900
_MIB = 1 << 20


class Row(Frozen):
    """One deployment, from the command to nothing left. problem: why it was not deployed; none: it was."""

    model: str
    target: str
    asked: OptimizationLevel
    level: str = ""
    weights_bytes: int | None = None
    speed: float | None = None
    loss: str = ""
    verdict: str = ""
    request_seconds: float | None = None
    per_second: str = ""
    usd_per_hour: float | None = None
    usd: float | None = None
    deploy_seconds: float = 0.0
    load: float | None = None
    problem: str | None = None


def main() -> int:
    """Make the table. Returns the exit code: 1 where something failed or is left, 2 where rows are left for a call."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--minutes", type=float, help="begin no deployment after them; the next call goes on")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "bench-deploy", help="rows, models and bundles")
    asked = parser.parse_args()
    end_hosts_when_terminated()
    keep, began = asked.keep.resolve(), time.monotonic()
    (keep / "rows").mkdir(parents=True, exist_ok=True)
    os.environ |= {"RANKWISE_DATA": str(keep / "data"), "RANKWISE_CACHE": str(keep / "cache")}
    wanted = [*product(asked.models.split(","), asked.targets.split(","), asked.levels.split(","))]
    missing = [row for row in wanted if not _path(keep, *row).exists()]
    left: list[str] = []
    if missing:
        with ExitStack() as stack:
            targets = all_targets(stack, keep, {target for _, target, _ in missing})
            for model, target, level in missing:
                if asked.minutes is not None and time.monotonic() - began > 60 * asked.minutes:
                    break
                row = _deployed(keep, model, targets[target], level)
                print(row.model_dump_json(exclude_none=True), flush=True)
                if row.problem is None:
                    write_atomically(_path(keep, model, target, level), row.model_dump_json(indent=1))
                else:
                    left.append(f"{model} {target} {level}: {row.problem}")
            left += [f"{name}: {item}" for name, each in targets.items() for item in each.left()]
    rows = [Row.model_validate_json(path.read_text()) for each in wanted if (path := _path(keep, *each)).exists()]
    print("\n".join(_table(rows)))
    print("\n".join(left) or "nothing is left in any target")
    return 1 if left else 2 if len(rows) < len(wanted) else 0


def _path(keep: Path, model: str, target: str, level: str) -> Path:
    return keep / "rows" / f"{model.removeprefix('synthetic:').replace('@', '-')}-{target}-{level}.json"


def _deployed(keep: Path, model: str, target: Target, level: str) -> Row:
    """Deploy, look, take down."""
    store, name = Store(keep / "data", keep / "data" / "rented", keep / "cache"), f"bench-{target.name}"
    base = Row.model_validate({"model": model, "target": target.name, "asked": level})
    began = time.monotonic()
    argv = ["deploy", "--model", model, "--target", target.text, "--optimization", level, "--name", name]
    code, text = run_rankwise(keep, *argv, "--hours", "0.5", "--yes", *target.options)
    seconds = time.monotonic() - began
    found = base.model_copy(update={"problem": f"exit code {code}: {text[-600:]}"})
    if code == 0:
        deployment = store.read(name)
        bundle = store.bundle(deployment)
        key = Path(deployment.key_file).read_text().strip()
        timing = timed_answers(deployment.url, key, bundle, _TIMED_SECONDS)
        check = bundle.check
        assert check is not None
        found = base.model_copy(
            update={
                "level": f"{bundle.level} ({'+'.join(bundle.compression) or 'unchanged'})",
                "weights_bytes": check.weights_bytes,
                "speed": check.speed,
                "loss": check.loss_text,
                "verdict": bundle.verdict,
                "request_seconds": timing.seconds,
                "per_second": f"{timing.per_second:.3g} {timing.unit}",
                "usd_per_hour": deployment.usd_per_hour,
                "deploy_seconds": seconds,
                "load": os.getloadavg()[0],
                "problem": first_answers(deployment.url, key, bundle),
            }
        )
    if (keep / "data" / "deployments" / name).exists():
        code, text = run_rankwise(keep, "undeploy", name)
        cost = re.search(r"it cost ([\d.]+) USD", text)
        kept = (keep / "data" / "deployments" / name).exists()
        problem = f"undeploy: exit code {code}: {text[-600:]}" if code or kept else found.problem
        found = found.model_copy(update={"usd": float(cost[1]) if cost else 0.0, "problem": problem})
    return found


def run_rankwise(keep: Path, *arguments: str) -> tuple[int, str]:
    """Run the command line in a folder; returns exit code and what it printed."""
    done = subprocess.run(
        [RANKWISE, *arguments], cwd=keep, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=_LIMIT_SECONDS, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout


def _table(rows: list[Row]) -> Iterator[str]:
    """Markdown."""
    yield (
        "| model | target | asked | deployed | MiB | speed-up | answers lose | verdict | ms a request | one user | "
        "USD/h | USD | deployed in, s | load |"
    )
    yield "| --- | --- | --- | --- | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in rows:
        size = "" if row.weights_bytes is None else f"{row.weights_bytes / _MIB:.1f}"
        speed = "" if row.speed is None else f"{row.speed:.2f}"
        took = "" if row.request_seconds is None else f"{1000 * row.request_seconds:.1f}"
        price = "own" if row.usd_per_hour is None else f"{row.usd_per_hour:.3f}"
        usd = "" if row.usd_per_hour is None or row.usd is None else f"{row.usd:.2f}"
        cells = (row.model, row.target, row.asked, row.level, size, speed, row.loss, row.verdict, took, row.per_second,
                 price, usd, f"{row.deploy_seconds:.0f}", "" if row.load is None else f"{row.load:.1f}")  # fmt: skip
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
