"""`rankwise plan --serve`: the answer, its front, and what stands in the way."""

import json

from typer.testing import CliRunner, Result

from flows.cli.main import app

MODEL = ("--model", "llama-3.1-70b", "--accelerator", "h100-80gb", "--sequence-length", "1000", "--new-tokens", "300")


def plan_serve(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--serve", "--mode", "inference", *MODEL, *words])


def test_the_answer_is_the_layout_with_the_most_tokens_of_all_devices() -> None:
    """Of 8 devices a layout on 6 was said to be the best, by its tokens for each device that it uses."""
    answer = json.loads(plan_serve("--gpus", "8", "--ttft", "1", "--tpot", "0.05", "--json").stdout)
    best, front = answer["best"], answer["pareto_front"]
    assert best == max(front, key=lambda one: one["tokens_per_second"])
    assert best["devices"] == 8 and best["tpot_seconds"] <= 0.05
    assert min(one["usd_per_million_tokens"] for one in front) == best["usd_per_million_tokens"]
    assert any(one["used_devices"] < 8 for one in front)  # which are fast for a user, not for all


def test_idle_devices_are_named() -> None:
    planned = plan_serve("--gpus", "5")
    assert planned.exit_code == 0
    assert "Idle: 1 of 5 devices, which the figures per device and the price include" in planned.stdout
    assert "Idle" not in plan_serve("--gpus", "4").stdout


def test_what_is_not_fast_enough_is_answered_with_what_can_be_had() -> None:
    refused = plan_serve("--gpus", "8", "--tpot", "0.001")
    assert refused.exit_code == 3 and "the shortest TPOT" in refused.output
