"""HardwareSelector: the answers that its users' scripts read, and that they are right."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.hardware.catalog import accelerator, catalog
from engine.planner.catalog import find_model
from engine.planner.choice.instances import Among, InstanceRequest, counts, options_on
from engine.planner.choice.lengths import default_length, length_note, length_of, room_note
from engine.planner.choice.machines import inference_format, instance_price, machine_for, training_precision
from engine.planner.choice.search import LAUNCHABLE, ranked, with_memory_limit
from engine.planner.choice.selector import HardwareSelector
from engine.planner.setup import TrainingSetup

SELECTOR = HardwareSelector()
SMALL = {"facebook/opt-6.7b": 16, "facebook/opt-1.3b": None}


def config_of(model: str, gpus: int, batch: int, memory: float | None = None, **more: Any) -> dict[str, Any]:
    return SELECTOR.get_distributed_training_config("text_generation", model, gpus, batch, memory, **more)


def test_integers_of_numpy_are_integers() -> None:
    """A loop over an array, or a column of pandas; the answer is written as JSON."""
    eight, four = np.int64(8), np.int32(4)
    config = config_of("facebook/opt-1.3b", eight, four, sequence_length=np.int64(512))  # type: ignore[arg-type]
    same = config_of("facebook/opt-1.3b", 8, 4, sequence_length=512)
    del config["setup"], same["setup"]
    assert json.dumps(config) == json.dumps(same)
    chosen = SELECTOR.select_hardware_for_task("text_generation", "facebook/opt-1.3b", gpu_count=four)  # type: ignore[arg-type]
    assert json.loads(json.dumps(chosen))["gpu_count"] == 4
    with pytest.raises(ValueError, match="gpu_count: 0 is not a whole number above 0"):
        config_of("facebook/opt-1.3b", np.int64(0), 4)  # type: ignore[arg-type]


def test_what_a_script_prints_of_a_selection(capsys: pytest.CaptureFixture[str]) -> None:
    result = SELECTOR.select_hardware_for_task(
        model_family="text_generation",
        model_name="facebook/opt-1.3b",
        task_type="training",
        batch_size=8,
        distributed=True,
        gpu_count=4,
    )
    print(result["primary_recommendation"], result["distributed_strategy"], result["gpu_count"])
    print(", ".join(result["fallback_options"]))
    first, second = capsys.readouterr().out.splitlines()
    name, strategy, count = first.split()
    assert name in catalog().accelerators()
    assert strategy in ("DDP", "FSDP", "DeepSpeed")
    assert count == "4"
    assert second
    assert name not in second.split(", ")


def test_what_a_script_prints_of_a_configuration() -> None:
    config = SELECTOR.get_distributed_training_config(
        model_family="text_generation", model_name="facebook/opt-1.3b", gpu_count=8, batch_size=4, max_memory_gb=24
    )
    assert config["distributed_strategy"] in ("DDP", "FSDP", "DeepSpeed")
    assert config["per_gpu_batch_size"] * config["gpu_count"] * config["gradient_accumulation_steps"] == 32
    assert config["global_batch_size"] == 32
    assert config["mixed_precision"] is True
    memory = config["estimated_memory"]
    printed = [f"{memory[name]:.2f}" for name in ("parameters_gb", "activations_gb", "optimizer_gb", "per_gpu_gb")]
    assert all(float(text) >= 0 for text in printed)
    outside = ("per_gpu_gb", "total_gb", "host_gb", "storage_gb")
    assert sum(size for name, size in memory.items() if name not in outside) == pytest.approx(memory["per_gpu_gb"])
    assert memory["per_gpu_gb"] <= 24
    assert memory["total_gb"] == pytest.approx(8 * memory["per_gpu_gb"])
    json.dumps({name: value for name, value in config.items() if name != "setup"})


def as_deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    """As a training script puts its file together from the answer."""
    chosen = config.get("deepspeed_config", {})
    return {
        "train_batch_size": config["global_batch_size"],
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps", 1),
        "zero_optimization": {
            "stage": chosen.get("zero_stage", 2),
            "offload_optimizer": chosen.get("offload_optimizer", False),
            "offload_param": chosen.get("offload_param", False),
        },
    }


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "memory"),
    [
        ("facebook/opt-6.7b", 4, 8, 16),
        ("facebook/opt-30b", 8, 1, 40),
        ("facebook/opt-13b", 4, 1, 16),
        ("llama-7b", 8, 16, None),
        ("llama-7b", 8, 16, 24),
        ("facebook/opt-1.3b", 1, 8, None),
    ],
)
def test_scripts_branch_on_the_strategy(model: str, gpus: int, batch: int, memory: float | None) -> None:
    config = config_of(model, gpus, batch, memory)
    assert config["fits"]
    assert config["explanation"].startswith(("One ", "DDP", "FSDP", "ZeRO"))
    assert ("deepspeed_config" in config) == (config["distributed_strategy"] == "DeepSpeed")
    assert ("fsdp_config" in config) == (config["distributed_strategy"] == "FSDP")
    assert config["per_gpu_batch_size"] * config["gradient_accumulation_steps"] == batch
    if "fsdp_config" in config:
        fsdp = config["fsdp_config"]
        assert fsdp["sharding_strategy"] == "FULL_SHARD"
        assert fsdp["cpu_offload"] == (config["offload"] == "cpu")
        assert fsdp["activation_checkpointing"] == config["gradient_checkpointing"]
    if "deepspeed_config" in config:
        zero = as_deepspeed(config)["zero_optimization"]
        assert zero["stage"] in (1, 2, 3)
        assert zero["offload_optimizer"] is None or zero["offload_optimizer"]["device"] in ("cpu", "nvme")


def test_the_answer_is_the_fastest_of_all_that_fit() -> None:
    config = config_of("opt-6.7b", 8, 4, accelerator="a100-40gb")
    setup = config["setup"]
    base = TrainingSetup(setup.architecture, setup.machine, sequence_length=setup.sequence_length)
    seconds = [each.seconds for each in ranked(base, 8, 32, with_memory_limit(LAUNCHABLE, None)) if each.seconds]
    assert config["step_seconds"] == min(seconds)
    assert config["candidates"][0]["step_seconds"] == config["step_seconds"]
    parts = config["predicted_time"]
    assert sum(parts[name] for name in parts if name.endswith("_seconds")) == pytest.approx(config["step_seconds"])
    assert config["fastest_layout"]["step_seconds"] <= config["step_seconds"]


def test_the_rule_of_thumb_stands_beside_with_its_own_prediction() -> None:
    config = config_of("opt-6.7b", 8, 4, accelerator="a100-80gb")
    rule = config["rule_of_thumb"]
    assert rule["choice"] == "FSDP"
    assert rule["distributed_strategy"] == "FSDP"
    assert rule["step_seconds"] >= config["step_seconds"]
    assert rule["sentence"].startswith("The rule of thumb says FSDP")
    poor = config_of("opt-6.7b", 4, 8, 16)["rule_of_thumb"]
    assert not poor["fits"]
    assert "does not fit" in poor["sentence"]
    # Offload to NVMe: 22 times as long was "2136% slower".
    far = config_of("mixtral-8x7b", 16, 1, accelerator="h100-80gb", sequence_length=4096)
    times = far["rule_of_thumb"]["step_seconds"] / far["step_seconds"]
    assert times > 2 and far["rule_of_thumb"]["sentence"].endswith(f"predicted to take {times:.3g} times as long.")


def test_what_does_not_fit_is_said_with_the_smallest_change() -> None:
    config = config_of("opt-66b", 2, 1, accelerator="a10g")
    assert config["fits"] is False
    assert config["step_seconds"] is None
    assert config["usd_per_million_tokens"] is None
    assert "Nothing fits" in config["explanation"]
    assert config["why_not"]
    assert config["smallest_change"]
    one = config_of("opt-1.3b", 1, 1, 3)
    assert one["fits"] or one["smallest_change"] != ""


def test_data_parallel_only_unless_nothing_else_fits() -> None:
    fitting = config_of("llama-2-70b", 16, 1, accelerator="h100-80gb")
    assert fitting["fits"]
    assert (fitting["layout"]["tp"], fitting["layout"]["pp"]) == (1, 1)


def test_what_was_assumed_is_said() -> None:
    config = config_of("bert-base-uncased", 1, 8)
    said = " ".join(config["assumptions"])
    assert "h100-80gb is assumed" in said
    assert "512 tokens" in said
    assert "of the family embedding" in said
    named = SELECTOR.get_distributed_training_config(
        "embedding", "bert-base-uncased", 1, 8, accelerator="t4", sequence_length=128
    )
    assert named["assumptions"] == []
    assert named["mixed_precision_dtype"] == "float16"


def test_an_unknown_model_asks_for_its_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        config_of("acme/secret-9000", 1, 1)
    with pytest.raises(ValueError, match="gpu_count: 0"):
        config_of("gpt2", 0, 1)
    with pytest.raises(ValueError, match="batch_size: -1"):
        config_of("gpt2", 1, -1)
    with pytest.raises(ValueError, match="max_memory_gb: 0"):
        config_of("gpt2", 1, 1, 0)
    with pytest.raises(ValueError, match="task_type: 'serving'"):
        SELECTOR.select_hardware_for_task("x", "gpt2", "serving")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="available_hardware: 'tpu'"):
        SELECTOR.select_hardware_for_task("x", "gpt2", available_hardware=["tpu"])  # type: ignore[list-item]


def test_words_that_would_have_no_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="accelerator, machine: mutually exclusive"):
        config_of("gpt2", 1, 1, accelerator="t4", machine="aws/p5.48xlarge")
    for ask in (SELECTOR.get_distributed_training_config, SELECTOR.get_inference_config):
        with pytest.raises(ValueError, match="market: 'Spot' is not known; use one of: on_demand, spot"):
            ask("text_generation", "gpt2", 1, 1, market="Spot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="providers: 'AWS' is not known; use one of: aws, gcp, azure"):
        SELECTOR.select_hardware_for_task("text_generation", "gpt2", providers=["AWS"])
    with pytest.raises(ValueError, match="max_seconds_per_token: has no effect on training"):
        SELECTOR.select_hardware_for_task("text_generation", "gpt2", "training", max_seconds_per_token=0.1)


def test_a_folder_with_a_config_is_enough(tmp_path: Path) -> None:
    own = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(own))
    config = config_of(str(tmp_path), 2, 2)
    assert config["fits"]
    assert config["model_parameters"] == find_model(tmp_path).parameters


def test_inference_takes_the_layout_that_answers_soonest() -> None:
    config = SELECTOR.get_inference_config("text_generation", "llama-7b", 4, 1, accelerator="a100-80gb")
    assert config["layout"]["tp"] == 4  # one sequence: replicas would idle
    assert config["tokens_per_second"] > 0
    assert config["estimated_memory"]["kv_cache_gb"] > 0
    tight = SELECTOR.get_inference_config("text_generation", "llama-2-70b", 1, 1, accelerator="a100-80gb")
    assert not tight["fits"]
    assert tight["smallest_change"]


class TestInstances:
    def test_the_cheapest_a_token_comes_first(self) -> None:
        found = SELECTOR.select_hardware_for_task("text_generation", "gpt2", "inference", batch_size=8)
        usd = [each["usd_per_million_tokens"] for each in found["options"]]
        assert usd == sorted(usd)
        assert found["instance"] == found["options"][0]["instance"]
        assert all(each["usd_per_hour"] is None for each in found["without_price"])
        assert all(each["price_source"] and each["price_as_of"] for each in found["options"])

    def test_only_the_hardware_that_is_there(self) -> None:
        rocm = SELECTOR.select_hardware_for_task("text_generation", "gpt2", available_hardware=["rocm"])
        assert {each["hardware"] for each in [*rocm["options"], *rocm["without_price"]]} == {"rocm"}
        cpu = SELECTOR.select_hardware_for_task("text_generation", "gpt2", available_hardware=["cpu"])
        assert cpu["hardware"] == "cpu"
        one = SELECTOR.select_hardware_for_task("text_generation", "gpt2", accelerators=["NVIDIA A10G"])
        assert one["primary_recommendation"] == "a10g"
        assert one["fallback_options"] == []

    def test_speed_that_is_asked_for_is_met(self) -> None:
        slow = SELECTOR.select_hardware_for_task("text_generation", "llama-7b", "inference")
        wanted = 2 * slow["options"][0]["tokens_per_second"]
        fast = SELECTOR.select_hardware_for_task(
            "text_generation",
            "llama-7b",
            "inference",
            min_tokens_per_second=wanted,
        )
        assert fast["options"][0]["usd_per_million_tokens"] >= slow["options"][0]["usd_per_million_tokens"]
        assert fast["too_slow"]
        none = SELECTOR.select_hardware_for_task("text_generation", "llama-7b", min_tokens_per_second=1e9)
        assert none["primary_recommendation"] is None
        fastest = max(none["too_slow"], key=lambda each: each["tokens_per_second"])
        assert f"Nothing is fast enough; the nearest, {fastest['instance']}, is predicted" in none["explanation"]

    def test_the_next_best_is_named_with_its_number_of_instances(self) -> None:
        found = SELECTOR.select_hardware_for_task(
            "text_generation", "gpt2", gpu_count=2, providers=["aws"], accelerators=["t4", "a10g"]
        )
        row = next(each for each in found["options"] if each["accelerator"] != found["primary_recommendation"])
        assert row["nodes"] == 2
        assert f"; next is 2 x {row['instance']} at $" in found["explanation"]
        slow = SELECTOR.select_hardware_for_task(
            "text_generation", "gpt2", gpu_count=2, providers=["aws"], accelerators=["t4"], min_tokens_per_second=1e9
        )
        fastest = max(slow["too_slow"], key=lambda each: each["tokens_per_second"])
        where = fastest["instance"] if fastest["nodes"] == 1 else f"{fastest['nodes']} x {fastest['instance']}"
        assert f"the nearest, {where}, is predicted" in slow["explanation"]

    def test_more_gpus_are_tried_where_the_fewest_that_fit_are_too_slow(self) -> None:
        """Two GPUs of the instance hold the model and take too long; four do not."""

        def chosen(**asked: Any) -> dict[str, Any]:
            return SELECTOR.select_hardware_for_task(
                "text_generation", "llama-2-7b", accelerators=["h100-80gb"], providers=["aws"], **asked
            )

        speeds = {
            count: row["tokens_per_second"]
            for count in (1, 2, 4, 8)
            for row in chosen(gpu_count=count)["options"]
            if row["instance"] == "aws/p5.48xlarge"
        }
        assert speeds[2] < speeds[4] < speeds[8]
        found = chosen(max_gpus=8, min_tokens_per_second=(speeds[2] + speeds[4]) / 2)
        assert (found["instance"], found["gpu_count"]) == ("aws/p5.48xlarge", 4)
        nothing = chosen(max_gpus=8, min_tokens_per_second=2 * speeds[8])
        assert nothing["gpu_count"] is None
        assert max(row["tokens_per_second"] for row in nothing["too_slow"]) == speeds[8]

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"gpu_count": 10**18}, "gpu_count: got 1,000,000,000,000,000,000, expected at most 65,536"),
            ({"batch_size": 10**18}, "batch_size: got 1,000,000,000,000,000,000, expected at most 1,000,000,000"),
            ({"min_tokens_per_second": math.nan}, "min_tokens_per_second: nan is not a number above 0"),
            ({"max_seconds_per_token": -1.0}, "max_seconds_per_token: -1.0 is not a number above 0"),
            ({"max_memory_gb": 1e300}, "max_memory_gb: got 1e+300, expected at most 1,000,000,000"),
        ],
    )
    def test_sizes_beyond_all_hardware_are_refused_at_once(self, given: dict[str, float], told: str) -> None:
        with pytest.raises(ValueError, match=re.escape(told)):
            SELECTOR.select_hardware_for_task("text_generation", "gpt2", **given)

    def test_spot_prices_are_for_work_that_may_be_interrupted(self) -> None:
        sure = SELECTOR.select_hardware_for_task("text_generation", "gpt2", accelerators=["t4"], providers=["aws"])
        spot = SELECTOR.select_hardware_for_task(
            "text_generation", "gpt2", accelerators=["t4"], providers=["aws"], critical=False
        )
        assert spot["recommendation"]["price_market"] == "spot"
        assert spot["recommendation"]["usd_per_hour"] < sure["recommendation"]["usd_per_hour"]

    def test_the_fewest_gpus_that_hold_it(self) -> None:
        found = SELECTOR.select_hardware_for_task(
            "text_generation", "llama-2-70b", "inference", distributed=True, accelerators=["a100-80gb"], max_gpus=8
        )
        assert found["gpu_count"] == 2
        assert found["distributed"]
        assert found["distributed_strategy"] == "tp=2"
        assert counts(True, None, None) == (1, 2, 4, 8)
        assert counts(False, None, None) == (1,)
        assert counts(True, 3, 8) == (3,)

    def test_the_largest_number_is_tried_where_it_is_no_power_of_two(self) -> None:
        assert counts(True, None, 6) == (1, 2, 4, 6)
        assert counts(False, None, 1) == (1,)
        found = SELECTOR.select_hardware_for_task(
            "text_generation", "llama-2-13b", accelerators=["a100-80gb"], max_gpus=3, max_memory_gb=11
        )
        assert found["gpu_count"] == 3

    def test_a_model_that_no_single_gpu_holds_is_tried_on_more(self) -> None:
        found = SELECTOR.select_hardware_for_task("text_generation", "llama-2-70b", accelerators=["a100-80gb"])
        assert found["gpu_count"] == 2
        assert any("no single GPU" in note for note in found["assumptions"])

    def test_one_gpu_that_nobody_asked_for_is_told(self) -> None:
        # A 70B model "costs least a token" on one of the eight H200 that are paid: two A100 do at a seventh.
        def notes(**wish: Any) -> str:
            return " ".join(SELECTOR.select_hardware_for_task("text_generation", "gpt2", **wish)["assumptions"])

        assert "no number of GPUs was named; one is taken" in notes(accelerators=["t4"])
        for wish in ({"gpu_count": 1}, {"max_gpus": 2}, {"distributed": True}):
            assert "no number of GPUs" not in notes(accelerators=["t4"], **wish)
        assert "no number of GPUs" not in notes(available_hardware=("cpu",))

    def test_nothing_at_all(self) -> None:
        options = options_on(
            InstanceRequest(find_model("gpt2"), False, 1, (1,), 128, 8), catalog(), Among(providers=("nobody",))
        )
        assert options.best is None
        assert "No instance" in options.answer()["explanation"]


def test_machines_by_accelerator() -> None:
    assert machine_for(accelerator("h100-80gb"), 8, catalog()).name == "aws/p5.48xlarge"
    assert machine_for(accelerator("t4"), 1, catalog()).name in ("aws/g4dn.xlarge", "azure/Standard_NC4as_T4_v3")
    four = machine_for(accelerator("a10g"), 4, catalog())
    assert four.accelerators >= 4
    unsold = accelerator("t4").model_copy(update={"name": "my-own"})
    mine = machine_for(unsold, 4, catalog())
    assert (mine.name, mine.usd_per_hour, mine.between) == ("my-own", None, None)


def test_an_accelerator_of_changed_figures_keeps_them() -> None:
    """A GPU that is capped or divided goes by its catalog's name; the catalog's memory was planned with instead."""
    part = accelerator("h100-80gb").model_copy(update={"memory_bytes": 40_000_000_000})
    there = machine_for(part, 8, catalog())
    assert (there.name, there.accelerator) == ("aws/p5.48xlarge", part)
    asked = {"gpu_count": 1, "batch_size": 8, "prompt_tokens": 2048}
    whole, capped = (
        SELECTOR.get_inference_config("text_generation", "llama-2-13b", accelerator=each, **asked)  # type: ignore[arg-type]
        for each in ("h100-80gb", part)
    )
    assert whole["fits"] and not capped["fits"] and "of 40.0" in capped["why_not"]


def test_prices_by_market() -> None:
    on_demand = instance_price("aws/g4dn.xlarge", "on_demand", catalog())
    spot = instance_price("aws/g4dn.xlarge", "spot", catalog())
    assert on_demand is not None
    assert spot is not None
    assert spot.usd_per_hour < on_demand.usd_per_hour
    assert spot.region in ("us-east-1", None)
    assert instance_price("aws/g4dn.xlarge", "spot", catalog(), "moon-1") is None


def test_formats_by_device() -> None:
    assert training_precision(accelerator("t4")) == "bfloat16_mixed"
    assert inference_format(accelerator("v100-16gb")) == "float16"
    assert inference_format(accelerator("h100-80gb")) == "bfloat16"
    plain = accelerator("t4").model_copy(update={"kind": "cpu", "peak_flops": {"float32": 1e11}})
    assert training_precision(plain) == "float32"
    assert inference_format(plain) == "float32"


def test_lengths_where_none_is_said() -> None:
    assert default_length(find_model("bert-base-uncased")) == 512
    assert default_length(find_model("llama-3.1-8b")) == 2048
    assert default_length(find_model("llama-3.1-8b"), "inference") == 512


def test_more_tokens_than_positions_are_remarked() -> None:
    """A prompt of all positions leaves no room for an answer, which was predicted without a word."""
    gpt2 = find_model("gpt2")
    assert room_note(gpt2, 896, 128) == room_note(find_model("t5-base"), 512, 4096) == []
    assert room_note(find_model("bert-base-uncased"), 512, 128) == []  # it generates nothing
    answer = SELECTOR.get_inference_config("text_generation", gpt2, 1, prompt_tokens=1024, accelerator="t4")
    assert answer["assumptions"] == ["1,152 tokens of prompt and answer, although gpt2 has 1,024 positions"]
    assert room_note(find_model("whisper-tiny"), 1500, 449) == [
        "449 new tokens, although whisper-tiny has 448 positions"
    ]


def test_a_plan_states_what_a_cache_without_windows_would_need() -> None:
    """Mistral's window of 4,096 tokens was all that a prompt of 24,000 cached; a server of ours keeps all of them."""
    mistral = find_model("mistral-7b")
    answer = SELECTOR.get_inference_config("text_generation", mistral, 1, 4, prompt_tokens=24_000, accelerator="l40s")
    (remark,) = answer["assumptions"]
    windowed, whole = (4 * tokens * 32 * 8 * 128 * 4 / 1e9 for tokens in (4096, 24_128))
    assert answer["estimated_memory"]["kv_cache_gb"] == pytest.approx(windowed, abs=0.01)
    needed = answer["estimated_memory"]["per_gpu_gb"] - windowed + whole
    assert answer["fits"] and f"as Rankwise's own does, needs {needed:.1f} GB a device of 47.7" in remark
    for model, tokens in (("mistral-7b", 2000), ("gpt-oss-20b", 300)):  # beside the weights it is nothing
        few = SELECTOR.get_inference_config("text_generation", model, 1, 4, prompt_tokens=tokens, accelerator="l40s")
        assert few["assumptions"] == []


def test_audio_has_the_length_of_its_encoder() -> None:
    """30 seconds are 1,500 tokens; the 448 positions of Whisper's answers were taken for the most that it reads."""
    whisper = find_model("whisper-small")
    assert length_of(whisper, None, "inference") == length_of(whisper, 1500, "inference") == 1500
    assert length_note(whisper, 1500, 1500, "inference") == []
    with pytest.raises(ValueError, match="has 1,500 positions; sequences of 1,501 tokens"):
        length_of(whisper, 1501, "inference")
    assert length_of(whisper, None) == 448  # of both sides, in training
    answer = SELECTOR.get_inference_config("audio", whisper, 1, accelerator="t4")
    assert answer["prompt_tokens"] == 1500 and "sequences of 1,500 tokens" in answer["assumptions"][-1]


def test_images_have_the_length_of_their_model() -> None:
    vit = find_model("vit-base")
    assert length_of(vit, None) == length_of(vit, 197) == 197
    assert length_note(vit, None, 197) == []
    with pytest.raises(ValueError, match="an image is a sequence of 197, got 64"):
        SELECTOR.get_distributed_training_config("vision", vit, 2, 1, sequence_length=64)


def test_a_spot_price_is_of_the_region_that_is_named() -> None:
    """Only the home region has one; elsewhere it is unknown, not that of the home region."""
    for region, known in (("us-east-1", True), ("eu-north-1", False)):
        found = SELECTOR.get_inference_config(
            "text_generation", "llama-1m", 1, machine=f"aws/g4dn.xlarge/{region}", market="spot"
        )
        assert (found["usd_per_hour"] is not None) is known
