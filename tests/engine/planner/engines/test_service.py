"""Ways to serve a model: every layout that is proposed can be started."""

from configs.hardware.catalog import instance
from engine.planner.catalog import find_model
from engine.planner.engines.calibrated import CalibratedEngines
from engine.planner.engines.service import ServingRequest, services


def test_tensor_parallelism_splits_the_heads_of_queries_and_of_keys_equally() -> None:
    """phi-4 has 40 heads and 10 key-value heads: an engine refuses 4 and 8 ranks."""
    wish = ServingRequest(
        "vllm", find_model("phi-4"), instance("aws/p5.48xlarge"), prompt_tokens=512, new_tokens=64, devices=8,
        batches=(8, 64),
    )  # fmt: skip
    found = services(wish, CalibratedEngines.none())
    assert {service.point.tp for service in found} == {1, 2}
