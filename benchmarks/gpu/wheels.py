"""Pack what an image with torch lacks as wheels, in one folder, on a machine with a network. Imports no other package.

    python -m benchmarks.gpu.wheels wheels/ --python 3.12            # make gpu-wheels WHEELS=wheels GPU_PYTHON=3.12
    python -m pip install --no-index --no-deps --target site wheels/*.whl       # over there

Wheels are for Linux on x86-64 and that Python, whatever runs this. Nothing that depends on torch or CUDA is resolved:
torch, numpy and transformers are the image's own. DeepSpeed has no wheel, and is built here, without its operators.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.running.needs import CARRIED

MOST_BYTES = 40 << 20
"""Of all wheels and the checkout together."""
_ALONE = ("torchao", "submitit")
"""Their requirements are the image's, or packed by name."""
_FROM_SOURCE = ("deepspeed",)
_ALSO = ("cloudpickle", "typing-extensions", "py-cpuinfo", "msgpack", "einops")
"""Requirements of what is packed alone."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Fill the folder and print its sizes. Returns 1 if a wheel could not be had or the sum is too large."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wheels", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    whole = [name for name in CARRIED.values() if name not in (*_ALONE, *_FROM_SOURCE)]
    target = ["--python-version", asked.python, "--implementation", "cp"]
    target += [part for platform in _PLATFORMS for part in ("--platform", platform)]
    failed = [] if _download(asked.folder, [*target, *whole, *_ALSO]) else whole
    failed += [name for name in _ALONE if not _download(asked.folder, [*target, "--no-deps", name])]
    failed += [name for name in _FROM_SOURCE if not _build(asked.folder, name)]
    carried = sum(path.stat().st_size for path in asked.folder.glob("*.whl"))
    checkout = _checkout_bytes()
    for path in sorted(asked.folder.glob("*.whl")):
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.name}")
    print(f"{carried / 2**20:8.2f} MiB of wheels, {checkout / 2**20:.2f} MiB of checkout, packed")
    if failed:
        print(f"could not be packed: {', '.join(failed)}", file=sys.stderr)
    if carried + checkout > MOST_BYTES:
        print(f"together more than {MOST_BYTES >> 20} MiB", file=sys.stderr)
    return 1 if failed or carried + checkout > MOST_BYTES else 0


def _download(folder: Path, arguments: Sequence[str]) -> bool:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    return subprocess.run([*pip, "--only-binary=:all:", "--dest", str(folder), *arguments], check=False).returncode == 0


def _build(folder: Path, name: str) -> bool:
    """Build a wheel of pure Python; its operators are compiled on the other machine, at first use, if at all."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        command = [*pip, "--no-build-isolation", "--wheel-dir", scratch, name]
        done = subprocess.run(command, check=False, env=environment)
        for wheel in Path(scratch).glob("*.whl"):
            os.replace(wheel, folder / wheel.name)
    return done.returncode == 0


def _checkout_bytes() -> int:
    """Return the size of the commit, packed as it would travel."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar.gz", "HEAD"]
    return len(subprocess.run(command, capture_output=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
