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


def test_replicas_are_whole_and_no_more_than_the_devices() -> None:
    wish = ServingRequest(
        "vllm", find_model("llama-3-8b"), instance("aws/p5.48xlarge"), prompt_tokens=1024, new_tokens=256, devices=6,
    )  # fmt: skip
    found = services(wish, CalibratedEngines.none())
    apart = [service for service in found if service.prefill_ranks is not None]
    assert apart
    for service in found:
        decoding = service.replicas * service.point.tp * service.point.pp
        used = decoding + service.prefill_replicas * (service.prefill_ranks or 0)
        assert used == service.used_devices <= wish.devices
        assert service.prefill_replicas == round(service.prefill_replicas)
        tokens_per_second = service.replicas * service.point.batch / service.tpot_seconds
        assert service.tokens_per_second == pytest.approx(tokens_per_second)


def test_idle_devices_count_and_a_whole_machine_is_paid() -> None:
    """Of six devices two are idle with tp=4, and the machine with eight costs what it costs."""
    node = instance("aws/p5.48xlarge")
    assert node.accelerators == 8 and node.usd_per_hour is not None
    wish = ServingRequest(
        "vllm", find_model("llama-3-8b"), node, prompt_tokens=1024, new_tokens=256, devices=6, batches=(16,)
    )  # fmt: skip
    found = services(wish, CalibratedEngines.none())
    (four,) = [one for one in found if (one.point.tp, one.point.pp, one.prefill_ranks) == (4, 1, None)]
    assert (four.replicas, four.used_devices, four.devices) == (1, 4, 6)
    assert four.tokens_per_second_per_device == pytest.approx(16 / four.tpot_seconds / 6)
    assert four.usd_per_million_tokens == pytest.approx(node.usd_per_hour / 3600 / (16 / four.tpot_seconds) * 1e6)
    assert found == sorted(found, key=lambda one: -one.tokens_per_second)


def test_a_model_that_fits_on_several_stages_only_has_a_measurement_that_would_narrow_its_answer() -> None:
    node = instance("aws/g5.xlarge")  # one GPU of 24 GB
    wish = ServingRequest(
        "vllm", find_model("llama-2-13b"), node, prompt_tokens=128, new_tokens=32, devices=4, batches=(4,)
    )  # fmt: skip
    found = services(wish, CalibratedEngines.none())
    assert {service.point.tp for service in found} == {1} and all(service.point.pp > 1 for service in found)
    point, left = best_measurement(wish, CalibratedEngines.none(), found[0])
    assert point == found[0].point and 0 <= left <= 1


@pytest.mark.parametrize(("devices", "nodes"), [(1, 1), (6, 1), (8, 1), (12, 2)])
def test_whole_nodes_are_paid_for(devices: int, nodes: int) -> None:
    """A cloud rents no part of an instance: one GPU of eight costs what all eight do."""
    node = instance("aws/p5.48xlarge").model_copy(update={"usd_per_hour": 36.0})
    wish = ServingRequest(
        "vllm", find_model("llama-3-8b"), node, prompt_tokens=512, new_tokens=64, devices=devices, batches=(1, 8)
    )  # fmt: skip
    found = services(wish, CalibratedEngines.none())
    assert found
    for service in found:
        assert service.usd_per_million_tokens == pytest.approx(nodes * 0.01 / service.tokens_per_second * 1e6)
