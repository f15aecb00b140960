"""Planted defects are called defects, clean runs are not: a short form of `benchmarks.correctness`.

Ranks are threads (correctness_runs.py); what they compute is the engine's.
"""

from pathlib import Path

import pytest

from tests.support.answers.correctness_campaign import CLEAN
from tests.support.answers.correctness_runs import FAMILIES, Setting, folder_case, made_case
from tests.support.planted_defects import DEFECTS

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[3]
NAMED = (
    "swapped shard of one down projection",
    "missing all-reduce",
    "wrong key and value head on one rank",
    "rotary position off by one while decoding",
    "stale key in the cache",
)
"""Those that are planted on every family; the others on one each."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_clean_runs_agree(family: str, dtype: str) -> None:
    case = made_case(family, seed=11)
    for setting in (CLEAN[1], CLEAN[3], CLEAN[4], CLEAN[6]):
        verdict = case.verdict(Setting(dtype=dtype, **setting))
        assert verdict.word == "agrees", (setting, verdict.reason)
        assert verdict.nearest is not None and verdict.nearest.excess < 0.9


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_worst_defects_are_found_in_every_family(family: str, name: str) -> None:
    case, defect, setting = made_case(family, seed=11), DEFECTS[name], Setting(tp=2)
    if not defect.possible(case.config, setting):
        pytest.skip("the drawn model has one key and value head")
    verdict = case.verdict(setting, defect)
    assert verdict.word == "defect" and verdict.findings[0].excess > 10


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_each_defect_is_found(name: str) -> None:
    defect = DEFECTS[name]
    for family in FAMILIES:
        case = made_case(family, seed=11)
        for setting in (Setting(tp=2), Setting(pp=2, batch=8)):
            if defect.possible(case.config, setting):
                assert case.finds(setting, defect)
                return
    pytest.skip("a defect of 16 bits alone, or of something that no drawn model has")


def test_a_coarse_defect_is_found_in_bfloat16_alone() -> None:
    case = made_case("llama", seed=11)
    for name in ("missing all-reduce", "swapped shard of one down projection", "one layer skipped"):
        assert case.verdict(Setting(tp=2, dtype="bfloat16"), DEFECTS[name]).word == "defect"


def test_the_shipped_model() -> None:
    prompts = [list(range(5, 5 + 7 * count)) for count in (1, 3, 6, 9)]
    case = folder_case(ROOT / "configs" / "models" / "tiny-stdlib", prompts)
    for dtype in ("float32", "bfloat16"):
        assert case.verdict(Setting(tp=2, dtype=dtype)).word == "agrees"
    assert case.verdict(Setting(tp=2), DEFECTS["missing all-reduce"]).word == "defect"
    assert case.verdict(Setting(batch=4), DEFECTS["epsilon of the norms ten times as large"]).word == "defect"
