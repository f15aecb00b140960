"""Ways to serve a model: every layout that is proposed can be started."""

import pytest

from configs.hardware.catalog import instance
from engine.planner.catalog import find_model
from engine.planner.engines.calibrated import CalibratedEngines
from engine.planner.engines.service import ServingRequest, best_measurement, services


def test_tensor_parallelism_splits_the_heads_of_queries_and_of_keys_equally() -> None:
    """phi-4 has 40 heads and 10 key-value heads: an engine refuses 4 and 8 ranks."""
    wish = ServingRequest(
        "vllm", find_model("phi-4"), instance("aws/p5.48xlarge"), prompt_tokens=512, new_tokens=64, devices=8,
        batches=(8, 64),
    )  # fmt: skip
    found = services(wish, CalibratedEngines.none())
    assert {service.point.tp for service in found} == {1, 2}


def test_a_model_that_fits_on_several_stages_only_has_a_measurement_that_would_narrow_its_answer() -> None:
    node = instance("aws/g5.xlarge")  # one GPU of 24 GB
    wish = ServingRequest(
        "vllm", find_model("llama-2-13b"), node, prompt_tokens=128, new_tokens=32, devices=4, batches=(4,)
    )  # fmt: skip
    found = services(wish, CalibratedEngines.none())
    assert {service.point.tp for service in found} == {1} and all(service.point.pp > 1 for service in found)
    point, left = best_measurement(wish, CalibratedEngines.none(), found[0])
    assert point == found[0].point and 0 <= left <= 1
