"""`rankwise plan --serve`: the answer, its front, and what stands in the way."""

import json

import pytest
from typer.testing import CliRunner, Result

from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Machine
from engine.planner.catalog import find_model
from engine.planner.engines.service import ServingRequest
from flows.cli.main import app
from flows.cli.plan.serve import weights_note

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


def test_what_a_cache_keeps_of_windows_is_told() -> None:
    words = ("plan", "--serve", "--model", "gemma-3-4b", "--accelerator", "a100-40gb", "--gpus", "1")
    notes = {
        "vllm": "Assumed: the KV cache of vllm keeps the window alone in layers with a sliding window",
        "sglang": "Assumed: the KV cache of sglang keeps the whole context in layers with a sliding window too: an",
    }
    for engine, note in notes.items():
        planned = CliRunner().invoke(app, [*words, "--engine", engine, "--sequence-length", "4096"])
        assert planned.exit_code == 0 and note in planned.stdout
    short = CliRunner().invoke(app, [*words, "--sequence-length", "500", "--new-tokens", "100"])
    assert short.exit_code == 0 and "sliding" not in short.stdout


def test_idle_devices_are_named() -> None:
    planned = plan_serve("--gpus", "5")
    assert planned.exit_code == 0
    assert "Idle: 1 of 5 devices, which the figures per device and the price include" in planned.stdout
    assert "Idle" not in plan_serve("--gpus", "4").stdout


def test_what_is_not_fast_enough_is_answered_with_what_can_be_had() -> None:
    refused = plan_serve("--gpus", "8", "--tpot", "0.001")
    assert refused.exit_code == 3
    said = "the shortest TPOT 0."  # in seconds, as the option: milliseconds were taken for its unit
    assert said in refused.output and " s. Raise --tpot, or use a faster device" in refused.output


SMALL = ("plan", "--serve", "--model", "llama-3-8b", "--tpot", "0.05", "--new-tokens", "64", "--rate", "20")


def test_without_a_device_the_catalog_is_searched_for_machines_that_carry_the_rate() -> None:
    planned = CliRunner().invoke(app, [*SMALL, "--accelerator", "l4", "--json"])
    answer = json.loads(planned.stdout)
    assert {one["accelerator"] for one in answer["machines"]} == {"l4"} and len(answer["machines"]) > 3
    for one in answer["machines"]:
        assert one["machines"] * one["tokens_per_second_per_machine"] >= 20 * 64
        assert (one["machines"] - 1) * one["tokens_per_second_per_machine"] < 20 * 64
    said = CliRunner().invoke(app, [*SMALL, "--accelerator", "l4"]).stdout
    best = answer["best"]
    assert f" x {best['machine']} (" in said and "for 20 requests/s of 1,024 prompt and 64 new tokens" in said
    assert f"{best['usd_per_hour']:.2f} USD/h" in said and "leave room, and measure it" in said


def test_machines_that_are_all_too_slow_are_answered_with_the_fastest() -> None:
    refused = CliRunner().invoke(app, [*SMALL[:-1], "1", "--accelerator", "t4", "--ttft", "0.0001"])
    assert refused.exit_code == 3 and "the shortest predicted TTFT" in refused.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rate", "0"), "--rate: expected requests per second above 0"),
        (("--rate", "1e-300"), "--rate: expected 1e-06 to 1,000,000,000 requests per second, got 1e-300"),
        (("--rate", "1e300"), "--rate: expected 1e-06 to 1,000,000,000 requests per second, got 1e+300"),
        (("--rate", "5", "--gpus", "8"), "--gpus, --rate: mutually exclusive"),
        (("--hardware", "cpu"), "engines on CPUs are not predicted"),
        (("--hardware", "cuda", "--gpus", "8"), "--hardware: has no effect on --serve with a device"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(words: tuple[str, ...], said: str) -> None:
    refused = CliRunner().invoke(app, ["plan", "--serve", "--model", "llama-3-8b", *words])
    assert refused.exit_code == 2 and said in refused.output
    unserved = CliRunner().invoke(app, ["plan", "--model", "llama-3-8b", "--rate", "5"])
    assert unserved.exit_code == 2 and "has no effect without --serve" in unserved.output


@pytest.mark.parametrize("more", [("--rate", "1"), ("--gpus", "1")])
def test_a_spot_price_of_another_region_is_not_taken(more: tuple[str, ...]) -> None:
    def said(region: str) -> str:
        words = ("--model", "llama-3.2-1b", "--accelerator", f"aws/g4dn.xlarge/{region}", "--spot", "--json", *more)
        return str(json.loads(plan_serve(*words).stdout)["best"]["usd_per_million_tokens"])

    assert float(said("us-east-1")) > 0 and said("eu-north-1") == "None"


def test_lengths_that_the_model_has_no_positions_for_are_said() -> None:
    words = ("plan", "--serve", "--accelerator", "h100-80gb", "--gpus", "1", "--model")
    refused = CliRunner().invoke(app, [*words, "gpt2", "--sequence-length", "2000"])
    assert refused.exit_code == 2 and "gpt2 has 1,024 positions; sequences of 2,000" in refused.output
    said = CliRunner().invoke(app, [*words, "gpt2", "--sequence-length", "1000"]).stdout
    assert "Assumed: 1,128 tokens of prompt and answer, although gpt2 has 1,024 positions" in said
    longer = CliRunner().invoke(app, [*words, "llama-2-7b", "--sequence-length", "8000"]).stdout
    assert "Assumed: sequences of 8,000 tokens, although llama-2-7b was made for 4,096" in longer
    assert "although" not in CliRunner().invoke(app, [*words, "llama-2-7b", "--sequence-length", "3000"]).stdout


def test_replicas_over_several_machines_say_that_their_network_is_not_counted() -> None:
    words = ("plan", "--serve", "--model", "llama-3.1-70b", "--accelerator", "rtx4090", "--json", "--gpus")
    spanning, inside = (json.loads(CliRunner().invoke(app, [*words, gpus]).stdout) for gpus in ("16", "8"))
    assert any(one["tp"] * one["pp"] > 8 for one in spanning["pareto_front"])
    said = "replicas of more than 8 devices span machines, and what their stages send each other takes no time"
    assert said in spanning["assumptions"] and said not in inside["assumptions"]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (("t4",), "weights in float16"),  # an engine refuses bfloat16 there, which the plan assumed
        (("l4",), "weights in bfloat16"),
        (("l4", "v100-32gb"), "weights in bfloat16, in float16 on GPUs that lack it"),
    ],
)
def test_weights_are_in_a_format_that_the_gpus_have(devices: tuple[str, ...], said: str) -> None:
    words = ("--model", "llama-3.2-1b", "--accelerator", devices[0], "--json", "--gpus", "1")
    of = [Machine(name=name, accelerator=accelerator(name)) for name in devices]
    wish = ServingRequest("vllm", find_model("llama-3.2-1b"), of[0], 512, 128, 1)
    assert weights_note(wish, of) == said
    if len(devices) == 1:
        assert said in json.loads(plan_serve(*words).stdout)["assumptions"]


@pytest.mark.parametrize("where", [("--gpus", "1"), ("--rate", "1")])
def test_limits_are_printed_with_their_units_and_those_left_out_are_named(where: tuple[str, ...]) -> None:
    # 50, meant as milliseconds, rules nothing out: the answer named a TPOT of 379 ms and no limit.
    words = ("plan", "--serve", "--model", "llama-3.2-1b", "--accelerator", "l4", *where)
    given = CliRunner().invoke(app, [*words, "--ttft", "0.5", "--tpot", "50"]).stdout
    assert "Limits: TTFT up to 0.5 s, TPOT up to 50 s" in given.splitlines() and "no limit of" not in given
    none = CliRunner().invoke(app, list(words)).stdout.splitlines()
    assert {"Assumed: no limit of TTFT (--ttft)", "Assumed: no limit of TPOT (--tpot)"} < set(none)
    assert not any(line.startswith("Limits") for line in none)
