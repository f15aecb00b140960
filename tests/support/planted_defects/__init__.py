"""Defects as they happen in distributed engines, to be planted on a rank of `correctness_runs`.

verdict = case.verdict(Setting(tp=2), DEFECTS["missing all-reduce"])
"""

from tests.support.planted_defects import caches, computation, sixteen_bits, sums, weights
from tests.support.planted_defects.planting import DEFECTS

__all__ = ["DEFECTS", "caches", "computation", "sixteen_bits", "sums", "weights"]
