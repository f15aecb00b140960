"""Products of the engine's linear layers by two checkouts in turn, on one core: speed, and whether bits are the same.

    python -m benchmarks.inference.kernels ../before                     # make bench-kernels AGAINST=../before
    python -m benchmarks.inference.kernels ../before --formats float32 --rows 1 32 --rounds 12

Each checkout computes in a process of its own with the packages of this one's environment, and compiles its own
kernels. One computes while the other waits; who begins alternates. The clock is the thread's CPU time, so that what
other processes take does not count, but what they do to caches, memory and clock does: it is the same for both.
Weights of 12 layers of 2,048 x 1,024 exceed the caches, as those of a model do.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

OUTPUTS, INPUTS, LAYERS = 2048, 1024, 12
FORMATS = ("float32", "bfloat16", "int8", "int8_dynamic", "int4")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_SLICE_SECONDS = 0.2
SIDES = ("before", "now")


def main(arguments: list[str]) -> int:
    """Print one line for each format and number of rows. Returns 1 where the bits differ."""
    parser = argparse.ArgumentParser(prog="benchmarks.inference.kernels", description=__doc__)
    parser.add_argument("against", type=Path, metavar="CHECKOUT", help="a checkout of the version before")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=8, help="slices of each; six and more give an interval")
    given = parser.parse_args(arguments)
    here = Path(__file__).resolve().parents[2]
    print("GFLOP/s, medians of slices; parentheses: 95 % interval, brackets: range of too few slices for one")
    print(f"{'format':<13} {'rows':>4} {'before':>9} {'now':>9} {'now to before':<22} bits    kernel")
    differing = 0
    for kind in given.formats:
        with ExitStack() as ending:
            checkouts = dict(zip(SIDES, (given.against.resolve(), here), strict=True))
            sides = {side: ending.enter_context(_worker(folder, kind)) for side, folder in checkouts.items()}
            for rows in given.rows:
                differing += _compare(sides, kind, rows, given.rounds)
    return 1 if differing else 0


@contextmanager
def _worker(checkout: Path, kind: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that computes with the engine of a checkout when it is asked to, on the last core that is allowed."""
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).resolve()), "--worker", kind, str(core)],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _asked(process: "subprocess.Popen[str]", rows: int) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{rows}\n")
    process.stdin.flush()
    said = process.stdout.readline()
    if not said:
        raise RuntimeError(f"a worker ended with exit code {process.wait()}")
    found: dict[str, Any] = json.loads(said)
    return found


def _compare(sides: dict[str, "subprocess.Popen[str]"], kind: str, rows: int, rounds: int) -> bool:
    """Print one line. Returns whether the bits differ."""
    from reports.numbers.statistics import paired_ratio

    first = {side: _asked(process, rows) for side, process in sides.items()}  # chooses kernels, reads the weights
    rates: dict[str, dict[int, float]] = {side: {} for side in sides}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            rates[side][number] = _asked(sides[side], rows)["gflops"]
    ratio = paired_ratio(rates["now"], rates["before"])
    assert ratio is not None
    (low, high), (left, right) = ratio.bounds, "()" if ratio.interval else "[]"
    differ = bool(first["before"]["bits"] != first["now"]["bits"])
    told = f"{ratio.value:.2f} {left}{low:.2f} to {high:.2f}{right}"
    medians = [statistics.median(rates[side].values()) for side in SIDES]
    bits = "DIFFER" if differ else "same"
    figures = f"{medians[0]:>9.1f} {medians[1]:>9.1f} {told:<22} {bits:<7} {first['now']['path']}"
    print(f"{kind:<13} {rows:>4} {figures}", flush=True)
    return differ


def _work(kind: str, core: int) -> None:
    """Answer each number of rows on stdin by a line of JSON; imports the engine of the checkout."""
    os.sched_setaffinity(0, {core})
    import torch

    from engine.kernels.linear import pack_linear
    from engine.kernels.quantized import quantize_linear

    torch.set_num_threads(1)
    numbers = torch.Generator().manual_seed(0)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weight = (torch.randn(OUTPUTS, INPUTS, generator=numbers) * 0.02).to(dtype)
    plain = kind in ("float32", "bfloat16")
    layers = [pack_linear(weight) if plain else quantize_linear(weight, None, kind) for _ in range(LAYERS)]  # type: ignore[arg-type]
    for line in sys.stdin:
        x = torch.randn(int(line), INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
        taken: list[float] = []
        while not taken or sum(taken) < _SLICE_SECONDS:
            began = time.thread_time()
            for layer in layers:
                y = layer(x)
            taken.append(time.thread_time() - began)
        flops = 2 * OUTPUTS * INPUTS * LAYERS * int(line)
        bits = hashlib.sha256(y.view(torch.uint8).numpy().tobytes()).hexdigest()
        told = {"gflops": flops / statistics.median(taken) / 1e9, "bits": bits, "path": layers[0].path}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1:]))
