"""Passes of a workload over prompts: warm-up, then repetitions until the measuring rules are met.

A pass is all requests of this rank's replica, one after the other. The workload defines the processing of a request:

    found = measured_passes(requests, decode, context, check)   # decode(batch) gives a list of results
    found.seconds, found.results, found.last
    unmeasured(requests, decode, context)                   # in the memory pass, and under a profiler
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from configs.spec.measuring import Measuring
from engine.context import Context, Samples
from engine.prompts.tokens import PromptBatch
from engine.rank.agreement import max_over_ranks_of, raise_on_all_ranks

_Result = TypeVar("_Result")


@dataclass
class Passes(Generic[_Result]):
    """Wall seconds of each pass, and the results of its requests in order; `last`: results of the last pass."""

    warmup_seconds: list[float] = field(default_factory=list)
    warmup: list[_Result] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    results: list[_Result] = field(default_factory=list)
    last: list[_Result] = field(default_factory=list)

    def columns(self) -> Samples:
        """Return warmup_pass_seconds and pass_seconds."""
        return {
            "warmup_pass_seconds": np.array(self.warmup_seconds, dtype=np.float64),
            "pass_seconds": np.array(self.seconds),
        }


def measured_passes(
    requests: list[PromptBatch],
    work: Callable[[PromptBatch], list[_Result]],
    context: Context,
    check: Callable[[list[_Result]], None],
) -> Passes[_Result]:
    """Warm up, then measure until all ranks have enough.

    check: raises FloatingPointError for results that are not finite numbers; every rank calls it once, after all
    passes. All ranks raise.
    """
    rules = context.job.measuring
    found: Passes[_Result] = Passes()
    for _ in range(rules.warmup):
        spent, results = one_pass(requests, work, context)
        found.warmup_seconds.append(spent)
        found.warmup += results
    while not _enough(found.seconds, rules, context):
        spent, found.last = one_pass(requests, work, context)
        found.seconds.append(spent)
        found.results += found.last
    raise_on_all_ranks(lambda: check([*found.warmup, *found.results]), context)
    return found


def unmeasured(requests: list[PromptBatch], work: Callable[[PromptBatch], list[_Result]], context: Context) -> bool:
    """Run the work of a launch without timing: the largest request for memory, a profiler's pass; else False."""
    if context.measuring_pass == "memory":
        context.barrier()
        work(max(requests, key=lambda batch: batch.tokens.numel()))
        return True
    if context.profiling:
        one_pass(requests, work, context)
        context.barrier()
        with context.profiled():
            one_pass(requests, work, context)
        return True
    return False


def one_pass(
    requests: list[PromptBatch], work: Callable[[PromptBatch], list[_Result]], context: Context
) -> tuple[float, list[_Result]]:
    """Run one pass; return seconds and results. All ranks begin together."""
    context.barrier()
    began = time.perf_counter()
    results = [result for batch in requests for result in work(batch)]
    return time.perf_counter() - began, results


def _enough(seconds: list[float], rules: Measuring, context: Context) -> bool:
    """Return whether all ranks have measured enough: the slowest rank's time counts."""
    if len(seconds) < rules.min_passes:
        return False
    return max_over_ranks_of(sum(seconds), context) >= rules.min_seconds
