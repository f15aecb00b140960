"""Packages that the checks use, and which of them are missing here. Imports the standard library only.

missing_packages()                      # {"torchao": ["decode-quantised"]}
"""

import importlib.util
from collections.abc import Sequence

from benchmarks.gpu.catalog import Check

LEAST_TORCH = (2, 9)
FROM_IMAGE = ("torch", "numpy", "scipy", "transformers", "safetensors", "tokenizers")
"""What an image with torch and transformers has; too large or too closely tied to the driver to be carried along."""

CARRIED = {
    "pydantic": "pydantic",
    "submitit": "submitit",
    "torchao": "torchao",
    "deepspeed": "deepspeed",
    "hjson": "hjson",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "fastapi": "fastapi<0.151",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
    "jinja2": "jinja2",
    "httpx": "httpx",
    "pynvml": "nvidia-ml-py",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
"""Modules that `benchmarks.gpu.wheels` packs where they are missing -> the distribution that has them."""


def missing_packages(checks: Sequence[Check]) -> dict[str, list[str]]:
    """Return each missing module with the checks that cannot run, or not whole, without it."""
    found: dict[str, list[str]] = {}
    for check in checks:
        for name in (*check.needs, *check.wants):
            if importlib.util.find_spec(name) is None:
                found.setdefault(name, []).append(check.name)
    return found


def advice(missing: dict[str, list[str]]) -> list[str]:
    """Return lines that say what is missing, what that costs, and how to bring it."""
    lines = [f"missing here: {name} (for {', '.join(checks)})" for name, checks in missing.items()]
    if any(name in CARRIED for name in missing):
        lines += [
            "pack it on a machine with a network: make gpu-wheels WHEELS=wheels GPU_PYTHON=3.12",
            "and here: python -m pip install --no-index --no-deps --target site wheels/*.whl; PYTHONPATH=.:site",
        ]
    lines += [f"{name} is expected of the image" for name in missing if name not in CARRIED]
    return lines
