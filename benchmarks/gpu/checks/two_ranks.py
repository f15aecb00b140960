"""Two ranks on one GPU, over gloo: launch, the same answers, shutdown; and three ways to fail.

NCCL refuses one device twice, which is told. Out of memory is to be classified as such, a kernel that hangs is ended by
the limit, and after both the device's memory is as free as before.
"""

import json
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.rank_program import RANKS, greedy_tokens, shard_of_rank
from engine.parallel.communicator import Communicator

_RETURNED_MIB = 64
"""That the driver may keep after the processes have ended."""


def run(bench: Bench) -> None:
    """Report each work of the two ranks."""
    shard = shard_of_rank(bench, 0, Communicator((0,), 0), ranks=1)
    alone = greedy_tokens(bench, shard)
    del shard
    free_memory(bench.device)
    before = _free_bytes(bench)
    bench.attempt("tp=2 over gloo, then out of memory", partial(_forward, bench, alone))
    bench.attempt("out of memory: memory", partial(_memory_returned, bench, "out of memory", before))
    bench.attempt("hung kernel", partial(_hang, bench))
    bench.attempt("NCCL", partial(_nccl, bench))


def _forward(bench: Bench, alone: list[int]) -> None:
    began = time.perf_counter()
    found = _both(bench, ("forward", "oom"), 90.0)
    taken = time.perf_counter() - began
    if any("tokens" not in one for one in found["forward"]):
        raise RuntimeError(f"a rank said: {found['forward']}")
    first = found["forward"][0]
    same = sum(one["tokens"] == alone for one in found["forward"]) / RANKS
    note = f"greedy tokens of tp=2 over {first['transport']} against one rank, share of the ranks"
    bench.judged("tp=2: same tokens as one rank", same, 1.0, "is", note=note)
    bench.seen("tp=2: from start to end of both ranks", taken, "s")
    bench.seen("tp=2: until the group had met", max(one["met"] for one in found["forward"]), "s")
    bench.seen("tp=2: shutdown", max(one["closed"] for one in found["forward"]), "s")
    told = found["oom"][0]
    bench.judged("out of memory: status", told.get("status", "none"), "out_of_memory", "is", note=told["said"])


def _nccl(bench: Bench) -> None:
    name = "NCCL with one device twice"
    if bench.device.type != "cuda":  # two processes more would import torch only to say this
        bench.seen(name, "no GPU")
        return
    bench.seen(name, _both(bench, ("nccl",), 45.0)["nccl"][0]["said"] or "it was taken")


def _hang(bench: Bench) -> None:
    before, limit = _free_bytes(bench), 1.0 if bench.rehearsal else 5.0
    ranks = _start(bench, ("hang",))
    try:
        deadline = _deadline(bench, 45.0)
        while len(list(bench.folder.glob("hang-*.begun"))) < RANKS and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(limit)
        still = sum(rank.poll() is None for rank in ranks)
    finally:
        began = time.perf_counter()
        _end(ranks)
    bench.judged("hung kernel: ranks still in it at the limit", float(still), float(RANKS), "is")
    bench.figure("hung kernel: from its end by the limit to no process left", [time.perf_counter() - began], "s")
    _memory_returned(bench, "hung kernel", before)


def _memory_returned(bench: Bench, name: str, before: int | None) -> None:
    after = _free_bytes(bench)
    if before is None or after is None:
        bench.seen(f"{name}: memory kept afterwards", "no device memory on a CPU")
        return
    kept = max(0, before - after) / 2**20
    bench.judged(f"{name}: memory kept afterwards", kept, float(_RETURNED_MIB), "at most", "MiB")


def _free_bytes(bench: Bench) -> int | None:
    free_memory(bench.device)
    return int(torch.cuda.mem_get_info(bench.device)[0]) if bench.device.type == "cuda" else None


def _both(bench: Bench, works: tuple[str, ...], seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Do works on both ranks; return what each left of each. Raises RuntimeError for a rank that left nothing."""
    began, deadline = time.monotonic(), _deadline(bench, seconds)
    ranks = _start(bench, works)
    try:
        for rank in ranks:
            rank.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        waited = time.monotonic() - began
        raise RuntimeError(f"{', '.join(works)}: the ranks were not ready within {waited:.0f} s") from None
    finally:
        _end(ranks)
    paths = {work: [bench.folder / f"{work}-{rank}.json" for rank in range(RANKS)] for work in works}
    if missing := [path.name for each in paths.values() for path in each if not path.exists()]:
        raise RuntimeError(f"{', '.join(missing)} was not left; exit codes {[one.returncode for one in ranks]}")
    return {work: [json.loads(path.read_text()) for path in each] for work, each in paths.items()}


def _deadline(bench: Bench, seconds: float) -> float:
    """Return when to give the ranks up, in time.monotonic: in a rehearsal at the check's own limit only."""
    left = max(1.0, bench.seconds_left)
    return time.monotonic() + (left if bench.rehearsal else min(seconds, left))


def _start(bench: Bench, works: tuple[str, ...]) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.gpu.rank_program", ",".join(works), str(bench.folder)]
    more = ["--rehearse"] if bench.rehearsal else []
    return [subprocess.Popen([*command, str(rank), *more]) for rank in range(RANKS)]


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()
        rank.wait()
