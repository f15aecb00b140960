"""Calibrate this machine with one rank a core, in a quarter of a minute to one; not imported elsewhere.

    python -m engine.tools.calibrate FILE.json [--quick]

The parent starts one process per core, pinned like the ranks of a study. First rank 0 measures alone, then all measure
at once, then they all-reduce tensors over gloo and through shared memory. Only rank 0's figures are kept, as those of a
typical core. GPUs are not measured here; the planner takes them from the catalog of data sheets.
"""

import ctypes
import importlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import get_args

from configs.common.base import utc_now, write_atomically
from configs.common.files.reading import MIB, read_json, read_tail
from configs.common.system.memory import host_memory_available
from configs.common.system.versions import version_of
from configs.hardware.calibration import CalibratedFigure, Calibration, Fingerprint, LinkTransport, MeasuredLink, Spread
from engine.planner.local import cpu_model
from engine.rank import host_usage
from engine.rank.binding import bind
from engine.rank.processes import die_with_parent, leave, place_from_environment

LIMIT_SECONDS = 400.0  # 26 times what a quiet machine needs, six times one on which torch emulates bfloat16
_RANK_BYTES = 1 << 30
_MOST_RANKS = 32
_LINK_SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
_LINK_REPEATS = 9
LINK_TRANSPORTS: tuple[LinkTransport, ...] = get_args(LinkTransport)
_LINK_CALLS: dict[LinkTransport, int] = {"gloo": 1, "shared memory": 20}  # in a row: one is too short to time
_DEFAULT_CACHE_BYTES = 1 << 20
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 65536  # mallopt(3); same value as in `slurm.launch` for the memory pass


def main(arguments: list[str]) -> int:
    """Write the calibration of this machine. Returns 0, or 1 if a rank failed."""
    quick = "--quick" in arguments
    target = Path(next(argument for argument in arguments if not argument.startswith("--")))
    calibration = measure_operators(quick)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, calibration.model_dump_json(indent=1))
    return 0


def measure_operators(quick: bool = False) -> Calibration:
    """Start one rank per core and wait for their figures. Raises RuntimeError with the output of a failed rank."""
    cores = len(os.sched_getaffinity(0))
    # Of the machine's memory a job or a container may have a small part, and is killed beyond it.
    ranks = max(1, min(cores, _MOST_RANKS, host_memory_available() // _RANK_BYTES))
    allowed = sorted(os.sched_getaffinity(0))
    busy, own, began = host_usage.machine_busy_seconds(allowed), _children_seconds(), time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="rankwise-calibrate-"))
    try:
        _run_ranks(ranks, quick, folder)
        found = read_json(folder / "figures.json")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    took = time.perf_counter() - began
    busy_after = host_usage.machine_busy_seconds(allowed)
    others = None
    if busy is not None and busy_after is not None:
        others = max(0.0, busy_after - busy - (_children_seconds() - own)) / (took * cores)
    together = found["together"] or {}
    return Calibration(
        fingerprint=Fingerprint(cpu_model=cpu_model(), cores=cores, torch=version_of("torch")),
        measured_at=utc_now(),
        took_seconds=took,
        others_cpu_share=others,
        ranks=ranks,
        memory_bytes=host_usage.machine_memory_bytes(),
        cache_bytes=private_cache_bytes(),
        framework_bytes=found["framework_bytes"],
        training_framework_bytes=found["training_framework_bytes"],
        figures={
            name: CalibratedFigure(
                alone=_spread(rounds), together=_spread(together[name]) if name in together else None
            )
            for name, rounds in found["alone"].items()
        },
        links=tuple(fitted_link(**link) for link in found["links"]),
    )


def private_cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the second-level cache of core 0 (sysfs), the last private one; a typical size if unknown."""
    for folder in caches.glob("index*"):
        with suppress(OSError):  # some machines give a level and no size
            level, size = (folder / "level").read_text().strip(), (folder / "size").read_text().strip()
            if level == "2" and size[:-1].isdigit() and size[-1] in "KMG":
                return int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]]
    return _DEFAULT_CACHE_BYTES


def fitted_link(
    ranks: int, seconds: dict[str, float], after_work: tuple[float, float], transport: LinkTransport = "gloo"
) -> MeasuredLink:
    """Fit hop latency and ring bandwidth to all-reduces: 2 (n-1) hops, 2 (n-1)/n of the bytes.

    after_work: seconds of a small all-reduce and of a small message between pieces of work.

    Least squares of relative errors: small and large messages have equal weight. Both stay above 0.
    """
    hops, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    points = [(float(size), taken) for size, taken in seconds.items()]
    # Of t = a h + b s x, weighted by 1/t: the normal equations of two unknowns.
    rows = [(hops / taken, share * size / taken) for size, taken in points]
    aa, ab, bb = sum(u * u for u, _ in rows), sum(u * v for u, v in rows), sum(v * v for _, v in rows)
    a, b = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = aa * bb - ab * ab
    latency, inverse = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    smallest = min(points)[1] / hops
    latency = latency if latency > 0 else smallest
    inverse = inverse if inverse > 0 else max(points)[1] / (share * max(points)[0])
    errors = [abs(hops * latency + share * size * inverse - taken) / taken for size, taken in points]
    return MeasuredLink(
        ranks=ranks,
        transport=transport,
        seconds={size: taken for size, taken in points},
        latency_seconds=latency,
        bytes_per_second=1 / inverse,
        error=statistics.median(errors),
        sum_seconds=after_work[0],
        message_seconds=after_work[1],
    )


def _children_seconds() -> float:
    """Return CPU seconds of all ended children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _spread(rounds: list[float]) -> Spread:
    return Spread(median=statistics.median(rounds), low=min(rounds), high=max(rounds), rounds=len(rounds))


def _run_ranks(ranks: int, quick: bool, folder: Path) -> None:
    """Start all ranks and wait. Raises RuntimeError if one fails or on time-out; no process is left behind."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    argv = [
        sys.executable,
        "-m",
        "engine.tools.calibrate",
        "--rank",
        str(os.getpid()),
        str(folder),
        *["--quick"] * quick,
    ]
    log = folder / "ranks.log"
    with log.open("wb") as output:
        processes = [
            subprocess.Popen(
                argv, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=output, stderr=output
            )
            for rank in range(ranks)
        ]
        deadline, late = time.monotonic() + LIMIT_SECONDS, False
        try:
            while any(process.poll() is None for process in processes):
                late = time.monotonic() > deadline
                if late or any(process.poll() for process in processes):
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
    if late:
        raise RuntimeError(f"the calibration did not end within {LIMIT_SECONDS:.0f} s. Repeat it on an idle machine")
    if any(process.returncode for process in processes):
        said = read_tail(log, MIB).strip().splitlines()
        raise RuntimeError(f"a rank of the calibration ended early: {said[-1] if said else 'without a word'}")


def run_rank(parent: int, folder: Path, quick: bool) -> int:
    """Run one rank: pinned, in a gloo group with the others; rank 0 writes the figures."""
    die_with_parent(parent)
    place = place_from_environment()
    bind(place, 1)
    import torch
    import torch.distributed as dist

    from engine.tools.calibrate_probes import a_little_generation, a_little_training, measure_rank
    from engine.tools.calibration_figures import QUICK, Sizes

    torch.set_num_threads(1)
    sizes = QUICK if quick else Sizes()
    ranks = place.world_size
    framework: dict[str, int] = {}
    if place.rank == 0:  # before any group or thread exists: a fork would copy their locks
        for name, module, work in (
            ("framework_bytes", "engine.workloads.generate", a_little_generation),
            ("training_framework_bytes", "engine.workloads.train", a_little_training),
        ):
            importlib.import_module(module)  # as in `engine.worker` before it forks
            framework[name] = _framework_bytes(work)
    if ranks > 1:
        store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]  # not in __all__
        limit = timedelta(seconds=LIMIT_SECONDS)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=ranks, timeout=limit)
    alone = measure_rank(sizes, lambda: None) if place.rank == 0 else {}
    together = None
    links: list[dict[str, object]] = []
    if ranks > 1:
        dist.barrier()
        together = measure_rank(replace(sizes, rounds=max(1, sizes.rounds - 1)), dist.barrier)
        links = [
            {"ranks": count, "transport": transport, "seconds": measured[0], "after_work": measured[1]}
            for transport in LINK_TRANSPORTS
            for count in sorted({2, ranks})
            if (measured := _exchanges(transport, count, place.rank, quick)) is not None
        ]
        dist.barrier()
    if place.rank == 0:
        found = {"alone": alone, "together": together, "links": links, **framework}
        write_atomically(folder / "figures.json", json.dumps(found))
    return 0


def _framework_bytes(work: Callable[[], None]) -> int:
    """Return the peak of a process that does minimal work, as measured by the memory pass: in a forked child.

    Libraries were imported before the fork, so only pages touched by the work count.
    """
    from_child, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
            host_usage.reset_peak_memory()
            work()
            os.write(to_parent, str(host_usage.peak_memory_bytes()).encode())
        except BaseException:
            traceback.print_exc()
            leave(1)  # otherwise there would be two ranks from here on
        leave(0)
    os.close(to_parent)
    _, status = os.waitpid(child, 0)
    with os.fdopen(from_child) as answer:
        said = answer.read()
    if status or not said.isdigit():
        raise RuntimeError(f"the process whose memory was to be measured ended with status {status}")
    return int(said)


def _exchanges(
    transport: LinkTransport, count: int, rank: int, quick: bool
) -> tuple[dict[int, float], tuple[float, float]] | None:
    """Return median seconds of all-reduces over the first `count` ranks by bytes, and of a small one and a message
    after work. Other ranks wait and get None, as all do if they cannot be connected this way.
    """
    import torch
    import torch.distributed as dist

    from engine.parallel.exchange_times import cold_products, message_seconds, sum_seconds
    from engine.parallel.opening import connect

    ranks = tuple(range(count))
    found: tuple[dict[int, float], tuple[float, float]] | None = None
    try:
        ways, _ = connect([ranks], rank, torch.device("cpu"), "gloo", LIMIT_SECONDS, transport)
    except ValueError:  # on all ranks
        return found
    if rank < count:
        way, calls = ways[ranks], _LINK_CALLS[transport]
        seconds: dict[int, float] = {}
        for size in _LINK_SIZES[: 3 if quick else None]:
            tensor, taken = torch.zeros(size // 4), []
            for _ in range(2 if quick else _LINK_REPEATS):
                way.barrier()
                began = time.perf_counter()
                for _ in range(calls):
                    way.all_reduce(tensor)
                taken.append((time.perf_counter() - began) / calls)
            seconds[size] = statistics.median(taken)
        small, work = torch.zeros(_LINK_SIZES[0] // 4), cold_products()
        summed = sum_seconds(way, small, work)
        found = seconds, (summed, message_seconds(way, small, work, (0, 1), rank))
        way.close()
    dist.barrier()
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        leave(run_rank(int(sys.argv[2]), Path(sys.argv[3]), "--quick" in sys.argv))
    sys.exit(main(sys.argv[1:]))
