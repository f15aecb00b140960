"""The checks, the most telling first, and their shares of the budget. Imports the standard library only.

A check is a module of `benchmarks.gpu.checks` with a function `run(bench)` (`benchmarks.gpu.bench.Bench`) that reports
each figure as soon as it is known.
"""

from dataclasses import dataclass

ENGINE = ("torch", "pydantic", "numpy", "scipy", "safetensors", "tokenizers")
"""What the engine imports."""
_PEER = (*ENGINE, "transformers")


@dataclass(frozen=True)
class Check:
    """One check. share: weight of its time in the budget, about its seconds on an H100.

    least_seconds: below that it is not begun. needs: packages without which it cannot run; wants: those without which
    some of its figures are missing.
    """

    name: str
    title: str
    share: float
    least_seconds: float = 10.0
    needs: tuple[str, ...] = ENGINE
    wants: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The module that runs it."""
        return f"benchmarks.gpu.checks.{self.name.replace('-', '_')}"


CHECKS = (
    Check("parity", "answers against transformers, CUDA graphs against eager steps", 55.0, needs=_PEER),
    Check("decode", "decode of an 8B shape in bfloat16", 25.0),
    Check("prefill", "prefill of an 8B shape in bfloat16", 18.0),
    Check("training", "training step of a 1B shape", 100.0, wants=("deepspeed",)),
    Check("planning", "the planner before and after it has learned, against the figures above", 30.0, needs=_PEER),
    Check("two-ranks", "two ranks on one GPU: launch, out of memory, a hung kernel, memory returned", 50.0),
    Check(
        "serving",
        "our server under load, beside the engine's own rate",
        65.0,
        needs=(*ENGINE, "fastapi", "uvicorn", "prometheus_client", "psutil", "jinja2", "httpx", "yaml"),
    ),
    Check(
        "study",
        "a whole study through slurm.launch, without Prefect",
        110.0,
        needs=(*_PEER, "submitit", "psutil", "yaml"),
    ),
    Check("decode-peers", "the same decode by transformers, static and compiled", 140.0, needs=_PEER),
    Check("decode-quantised", "the same decode with int8, int4 and float8 weights", 40.0, wants=("torchao",)),
    Check("loading", "load from disk and page cache, pinned and mapped", 40.0),
    Check("power", "power, clocks, throttling and energy a token", 22.0, wants=("pynvml",)),
    Check("tests", "every test marked gpu", 110.0, needs=(*ENGINE, "pytest", "pytest_timeout", "hypothesis", "yaml")),
)
