"""Which machines serve a model: the cheapest first, enough of them for the rate, and what may be cheaper."""

from dataclasses import replace

import pytest

from configs.hardware.catalog import instance
from configs.hardware.hardware import Machine
from engine.planner.catalog import find_model
from engine.planner.engines.calibrated import CalibratedEngines
from engine.planner.engines.machines import ServingMachines, maybe_cheaper, serving_machines
from engine.planner.engines.service import ServingRequest, services

H100, L4 = instance("aws/p5.48xlarge"), instance("gcp/g2-standard-96")


def wish_of(machine: Machine = H100) -> ServingRequest:
    return ServingRequest(
        "vllm", find_model("llama-3-8b"), machine, prompt_tokens=512, new_tokens=128, devices=machine.accelerators,
        tpot_seconds=0.05, batches=(1, 16, 64),
    )  # fmt: skip


def at(machine: Machine, usd: float | None, name: str = "one") -> Machine:
    return machine.model_copy(update={"usd_per_hour": usd, "name": name})


def test_the_cheapest_token_comes_first_and_machines_without_a_price_last() -> None:
    machines = [at(H100, None, "free"), at(H100, 90.0, "dear"), at(L4, 9.0, "small"), at(H100, 30.0, "cheap")]
    found = serving_machines(wish_of(), machines, CalibratedEngines.none())
    assert [one.machine.name for one in found][-1] == "free" and {one.count for one in found} == {1}
    usd = [one.usd_per_million_tokens for one in found[:-1] if one.usd_per_million_tokens is not None]
    assert usd == sorted(usd) and len(usd) == 3
    for one in found:  # each with the most tokens of its machine
        own = services(wish_of(one.machine), CalibratedEngines.none())[0]
        assert (one.layout.point, one.layout.tokens_per_second) == (own.point, own.tokens_per_second)


def test_as_many_machines_as_carry_the_rate_are_paid() -> None:
    (one,) = serving_machines(wish_of(), [at(H100, 10.0)], CalibratedEngines.none())
    made = one.layout.tokens_per_second
    (three,) = serving_machines(wish_of(), [at(H100, 10.0)], CalibratedEngines.none(), 2.5 * made / 128)
    assert (three.count, three.usd_per_hour) == (3, 30.0)
    assert three.usd_per_million_tokens == pytest.approx(30.0 / 3600 / (2.5 * made) * 1e6)
    assert three.most == -(-2.5 * three.layout.spread // 1)


def test_a_small_rate_takes_one_small_machine_rather_than_a_large_idle_one() -> None:
    machines = [at(H100, 50.0, "large"), at(L4, 8.0, "small")]
    busy, idle = (serving_machines(wish_of(), machines, CalibratedEngines.none(), rate) for rate in (1e4, 0.1))
    assert idle[0].machine.name == "small" and {one.count for one in idle} == {1}
    assert busy[0].machine.name == "large" and busy[0].count < busy[1].count


def test_machines_whose_error_reaches_below_the_choice_are_named() -> None:
    (one,) = serving_machines(wish_of(), [at(H100, 10.0)], CalibratedEngines.none())

    def priced(usd: float, spread: float) -> ServingMachines:
        return ServingMachines(
            replace(one.layout, point=replace(one.layout.point, machine=at(H100, usd)), spread=spread), None
        )

    found = [priced(10.0, 1.1), priced(12.0, 1.3), priced(12.0, 1.1), priced(30.0, 2.0)]
    assert maybe_cheaper(found) == [found[1]]
